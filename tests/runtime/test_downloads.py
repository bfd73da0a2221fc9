"""Downloads that break off or are killed, and what the next one asks for."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import constants

from llama_artifacts.errors import IntegrityError
from llama_runtime.downloads import Remote, fetch_cached
from tests.hub_server import Hub, Repository, point_at, serving, wait_for_bytes

CHUNK = constants.DOWNLOAD_CHUNK_SIZE  # what arrives is written in such pieces
NAME = "model.safetensors"
DATA = os.urandom(1000) * (CHUNK // 400)  # two pieces and a half
WALL = 2 * CHUNK + 1000

SCRIPT = """
import sys
from llama_runtime.downloads import Remote, fetch_cached
repository, revision, name, num_bytes = sys.argv[1:]
print(fetch_cached(Remote(repository, revision, name, int(num_bytes)), lambda path: None))
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    with serving() as hub:
        point_at(hub, monkeypatch)
        hub.repositories["me/model"] = Repository()
        hub.repositories["me/model"].commit("main", {NAME: DATA}, "first")
        yield hub


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the library's own retries."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.fixture
def blobs(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "models--me--model" / "blobs"
    folder.mkdir(parents=True)
    return folder


def remote(hub: Hub, num_bytes: int = len(DATA)) -> Remote:
    return Remote("me/model", hub.repositories["me/model"].branches["main"], NAME, num_bytes)


def check(path: Path) -> None:
    if path.read_bytes() != DATA:
        raise IntegrityError("other bytes")


def fetched(hub: Hub) -> bytes:
    return fetch_cached(remote(hub), check).read_bytes()


def partial(blobs: Path) -> Path:
    tag = hashlib.sha1(b"blob %d\0" % len(DATA) + DATA).hexdigest()
    return blobs / f"{tag}.incomplete"


def test_a_file_comes_to_where_the_library_keeps_it(hub: Hub, blobs: Path) -> None:
    path = fetch_cached(remote(hub), check)
    assert path == blobs.parent / "snapshots" / remote(hub).revision / NAME
    assert path.resolve() == partial(blobs).with_suffix("").resolve()
    assert fetch_cached(remote(hub), check) == path
    assert hub.ranges[NAME] == [""]
    assert len(list(blobs.iterdir())) == 1


def test_a_connection_that_stays_broken(hub: Hub, blobs: Path, no_pause: None) -> None:
    hub.walls[NAME] = WALL
    with pytest.raises(httpx2.RemoteProtocolError):
        fetched(hub)
    assert partial(blobs).read_bytes() == DATA[: 2 * CHUNK]
    hub.walls.clear()
    hub.ranges.clear()
    assert fetched(hub) == DATA
    assert hub.ranges[NAME] == [f"bytes={2 * CHUNK}-"]
    assert not partial(blobs).exists()


def test_a_process_that_was_killed(hub: Hub, blobs: Path, tmp_path: Path) -> None:
    hub.walls[NAME] = WALL
    hub.hangs.clear()
    where = remote(hub)
    words = (where.repository, where.revision, where.name, str(where.num_bytes))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")},
    )
    wait_for_bytes(partial(blobs), 2 * CHUNK)
    process.send_signal(signal.SIGKILL)
    process.wait()
    hub.walls.clear()
    hub.hangs.set()
    assert fetched(hub) == DATA
    assert hub.ranges[NAME] == ["", f"bytes={2 * CHUNK}-"]


def test_a_server_that_knows_no_ranges(hub: Hub, blobs: Path) -> None:
    partial(blobs).write_bytes(DATA[:CHUNK])
    hub.ignores_ranges = True
    assert fetched(hub) == DATA
    assert hub.ranges[NAME] == [f"bytes={CHUNK}-"]


def test_a_part_of_something_else_costs_one_download(hub: Hub, blobs: Path) -> None:
    partial(blobs).write_bytes(bytes(CHUNK))
    assert fetched(hub) == DATA
    assert hub.ranges[NAME] == [f"bytes={CHUNK}-", ""]


def test_a_part_longer_than_the_file_is_none(hub: Hub, blobs: Path) -> None:
    partial(blobs).write_bytes(bytes(len(DATA) + 1))
    assert fetched(hub) == DATA
    assert hub.ranges[NAME] == [""]


def test_a_whole_part_needs_no_bytes(hub: Hub, blobs: Path) -> None:
    partial(blobs).write_bytes(DATA)
    assert fetched(hub) == DATA
    assert hub.ranges == {}


@pytest.mark.parametrize(("had", "asked"), [(0, [""]), (CHUNK, [f"bytes={CHUNK}-", ""])])
def test_wrong_bytes_of_the_hub_are_refused_and_not_kept(
    hub: Hub, blobs: Path, had: int, asked: list[str]
) -> None:
    if had:
        partial(blobs).write_bytes(DATA[:had])
    hub.damages.add(NAME)
    with pytest.raises(IntegrityError, match="other bytes"):
        fetched(hub)
    assert hub.ranges[NAME] == asked
    assert list(blobs.iterdir()) == []


def test_a_file_of_another_size_is_refused_before_it_is_fetched(hub: Hub) -> None:
    message = f"expected 7 bytes, the hub has {len(DATA):,}"
    with pytest.raises(IntegrityError, match=f"{NAME}: {message}"):
        fetch_cached(remote(hub, 7), check)
    assert hub.ranges == {}


def test_two_at_once_are_one_download(hub: Hub) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert all(data == DATA for data in pool.map(fetched, [hub, hub]))
    assert hub.ranges[NAME] == [""]


def test_what_plain_http_does_not_send_is_left_to_the_library(
    hub: Hub, blobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(DATA) - 1)
    with pytest.raises(ValueError, match="too large to be downloaded using the regular"):
        fetched(hub)  # the library wants Xet, which this hub has not
    assert not partial(blobs).exists()


def test_another_host_does_not_see_the_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving() as store:
        store.repositories = hub.repositories
        hub.redirect = store.url
        assert fetched(hub) == DATA
        assert hub.tokens == ["Bearer hf_secret"]
        assert store.tokens == [None]
