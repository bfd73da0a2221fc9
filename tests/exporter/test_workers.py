"""Programs that are made at the same time, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.errors import BuildError
from llama_export import workers
from llama_export.build import build
from llama_export.recipe import Recipe
from tests.cli.running import environment

ENTRIES = ("decode", "next_token", "decode_rows")


def recipe(model: Path, output: Path, **choices: Any) -> Recipe:
    given: dict[str, Any] = {"formats": ("pt2",), "max_seq": 32, "weights": "none", **choices}
    return Recipe(str(model), output, ENTRIES, **given)


@pytest.mark.slow
def test_two_processes_make_what_one_makes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    one = build(recipe(tiny_checkpoint, tmp_path / "one"))
    two = build(recipe(tiny_checkpoint, tmp_path / "two", jobs=2))
    assert [made.label for made in two.programs] == list(ENTRIES)
    for path in one.folder.iterdir():
        assert path.read_bytes() == (two.folder / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_an_error_of_a_worker_is_the_builds(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker opens the checkpoint anew, and finds it changed."""
    model = tmp_path / "m"
    model.mkdir()
    for path in tiny_checkpoint.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    real = workers._pinned

    def spoil(blueprint: Any) -> Recipe:
        (model / "config.json").write_text("{}")
        return real(blueprint)

    monkeypatch.setattr(workers, "_pinned", spoil)
    with pytest.raises(Exception, match=r"config\.json") as caught:
        build(recipe(model, tmp_path / "b", jobs=2))
    assert type(caught.value).__name__ == "CheckpointError"
    assert caught.value.hint  # type: ignore[attr-defined]
    assert not (tmp_path / "b").exists()


def test_a_worker_that_dies_is_told(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BuildError, match="a process that makes programs ended with status 1") as e:
        build(recipe(tiny_checkpoint, tmp_path / "b", jobs=2))
    assert "-j 1" in (e.value.hint or "")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("cores", "free", "expected"),
    [(8, 64 * 2**30, 8), (8, 10 * 2**30, 3), (2, 1 * 2**30, 1), (1, 64 * 2**30, 1)],
)
def test_as_many_as_cores_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch, cores: int, free: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(workers, "_free_bytes", lambda: free)
    assert workers.default_jobs() == expected


def test_the_free_memory_is_that_of_the_kernel() -> None:
    assert 0 < workers._free_bytes() < 2**50


@pytest.mark.slow
def test_a_killed_build_leaves_no_process(tiny_checkpoint: Path, tmp_path: Path) -> None:
    words = ["build", tiny_checkpoint, "-o", tmp_path / "b", "--weights", "none", "-j", "2"]
    words += [word for entry in ENTRIES for word in ("--entry", entry)]
    process = subprocess.Popen(
        [sys.executable, "-m", "llama_export", *map(str, words), "--no-cache"],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children: list[int] = []
    deadline = time.monotonic() + 120
    while len(children) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        listing = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        children = [int(pid) for pid in listing.read_text().split()]
    assert len(children) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    for _ in range(600):  # one that has just begun learns it when its imports are done
        alive = [pid for pid in children if is_alive(pid)]
        if not alive:
            break
        time.sleep(0.1)
    assert not alive
    assert not (tmp_path / "b").exists()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (
            b"Z",
            b"X",
        )
    except OSError:
        return False
