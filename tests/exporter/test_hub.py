from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors

from llama_artifacts.errors import CheckpointError
from llama_artifacts.safetensors import read_header
from llama_export.checkpoint import hub
from llama_export.checkpoint.open import open_checkpoint
from llama_export.checkpoint.source import Source
from tests.tiny import tiny_config, tiny_tensors, write_tiny

# The HTTP library of the installed huggingface_hub: httpx or its successor.
http: Any = importlib.import_module(errors.HfHubHTTPError.__bases__[0].__module__.split(".")[0])

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "someone/Tiny-Llama"


def cache_repository(cache: Path, made: Path) -> Path:
    """Lays a checkpoint out as the hub's cache does: blobs, links in a snapshot, a ref."""
    root = cache / "models--someone--Tiny-Llama"
    snapshot = root / "snapshots" / COMMIT
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for file in made.iterdir():
        shutil.copyfile(file, root / "blobs" / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache without a network, and an empty cache of our own."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("LLAMA_EXPORT_CACHE", str(tmp_path / "own"))
    return tmp_path / "hub"


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_cached_repository_opens_offline(
    tmp_path: Path, cache: Path, num_shards: int, revision: str | None
) -> None:
    cache_repository(cache, write_tiny(tmp_path / "made", num_shards=num_shards))
    model = REPOSITORY if revision is None else f"{REPOSITORY}@{revision}"
    checkpoint = open_checkpoint(model)
    assert checkpoint.source == Source("hub", REPOSITORY, COMMIT)
    assert checkpoint.name == "Tiny-Llama"
    name = "model.norm.weight"
    assert torch.equal(checkpoint.read(name), tiny_tensors(tiny_config())[name])


def test_nothing_cached(cache: Path) -> None:
    with pytest.raises(CheckpointError, match="not in the local cache") as caught:
        open_checkpoint(REPOSITORY)
    assert caught.value.where == REPOSITORY
    assert "HF_HUB_OFFLINE" in (caught.value.hint or "")


def test_dangling_blob_is_named(tmp_path: Path, cache: Path) -> None:
    snapshot = cache_repository(cache, write_tiny(tmp_path / "made"))
    (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: dangling link"):
        open_checkpoint(REPOSITORY)


def test_unsupported_model_is_refused_before_weights_are_fetched(
    tmp_path: Path, cache: Path
) -> None:
    made = write_tiny(tmp_path / "made", quantization_config={"quant_method": "hqq"})
    (made / "model.safetensors").unlink()
    cache_repository(cache, made)
    with pytest.raises(CheckpointError, match="quant_method 'hqq'"):
        open_checkpoint(REPOSITORY)


def test_repository_without_config(tmp_path: Path, cache: Path) -> None:
    made = write_tiny(tmp_path / "made")
    (made / "config.json").unlink()
    cache_repository(cache, made)
    with pytest.raises(CheckpointError, match=r"the repository has no config\.json"):
        open_checkpoint(REPOSITORY)


# --- downloads ------------------------------------------------------------------------------------


class FakeHub:
    """Stands in for snapshot_download: hands out what the patterns name."""

    def __init__(self, made: Path, snapshot: Path) -> None:
        self.made, self.snapshot = made, snapshot
        self.asked: list[tuple[str | None, list[str]]] = []

    def snapshot_download(
        self, repository: str, *, revision: str | None, allow_patterns: list[str]
    ) -> str:
        assert repository == REPOSITORY
        self.asked.append((revision, allow_patterns))
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for name in allow_patterns:
            if (self.made / name).exists():
                shutil.copyfile(self.made / name, self.snapshot / name)
        return str(self.snapshot)

    def open(self, path: str, mode: str, *, revision: str, block_size: int) -> Any:
        assert (mode, revision) == ("rb", COMMIT)
        return (self.made / path.removeprefix(f"{REPOSITORY}/")).open(mode)


@pytest.fixture
def fake(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = write_tiny(tmp_path / "made", num_shards=2)
    (made / "pytorch_model.bin").write_bytes(b"x")
    (made / "consolidated.safetensors").write_bytes(b"x")
    fake = FakeHub(made, cache / COMMIT)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: SimpleNamespace(open=fake.open))
    return fake


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_only_needed_files_are_asked_for(fake: FakeHub) -> None:
    open_checkpoint(f"{REPOSITORY}@v1")
    (first, small), (second, weights) = fake.asked
    assert (first, second) == ("v1", COMMIT)
    assert set(small) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "README.md",
    }
    assert weights == SHARDS


def test_headers_only_fetches_no_data(fake: FakeHub) -> None:
    whole = open_checkpoint(str(fake.made))
    checkpoint = open_checkpoint(REPOSITORY, headers_only=True)
    assert len(fake.asked) == 1
    assert (checkpoint.config, checkpoint.tensors) == (whole.config, whole.tensors)
    assert checkpoint.source == Source("hub", REPOSITORY, COMMIT)
    assert "tokenizer.json" in checkpoint.assets()
    with pytest.raises(CheckpointError, match="opened by header only"):
        checkpoint.read("model.norm.weight")


def test_headers_are_kept_for_the_next_time(fake: FakeHub, tmp_path: Path) -> None:
    first = hub.fetch(REPOSITORY, headers_only=True)
    assert first.folder.is_relative_to(tmp_path / "own")
    for name in SHARDS:
        header = read_header(first.folder / name, headers_only=True)
        data = (first.folder / name).read_bytes()
        assert data == (fake.made / name).read_bytes()[: header.data_start]
    shutil.rmtree(fake.made)
    assert hub.fetch(REPOSITORY, headers_only=True) == first
    assert not [entry for entry in first.folder.parent.iterdir() if entry.name != COMMIT]


def test_headers_only_uses_weights_that_are_there(fake: FakeHub) -> None:
    hub.fetch(REPOSITORY)
    assert hub.fetch(REPOSITORY, headers_only=True).folder == fake.snapshot


# --- failures -------------------------------------------------------------------------------------


def response(status: int) -> Any:
    return http.Response(status, request=http.Request("GET", "https://huggingface.co/x"))


FAILURES: dict[str, tuple[Exception, str, str]] = {
    "no repository": (
        errors.RepositoryNotFoundError("404\nmore", response=response(404)),
        "no such repository, or it is private",
        "HF_TOKEN",
    ),
    "gated": (
        errors.GatedRepoError("403", response=response(403)),
        "the repository is gated",
        "accept its licence at https://huggingface.co/someone/Tiny-Llama",
    ),
    "no revision": (
        errors.RevisionNotFoundError("404", response=response(404)),
        "no such revision",
        "/commits/main",
    ),
    "no weights": (
        errors.RemoteEntryNotFoundError("404 for x", response=response(404)),
        "no safetensors weights (`404 for x`)",
        "safetensors form",
    ),
    "not cached": (
        errors.LocalEntryNotFoundError("cannot find"),
        "the hub cannot be reached",
        "HF_HUB_OFFLINE",
    ),
    "offline": (errors.OfflineModeIsEnabled("offline"), "cannot be reached", "HF_HUB_OFFLINE"),
    "server error": (
        errors.HfHubHTTPError("500 oops\nid", response=response(500)),
        "the hub request failed: `500 oops`",
        "try again",
    ),
    "no connection": (http.ConnectError("refused"), "failed: `refused`", "network"),
    "timeout": (http.ReadTimeout("slow"), "failed: `slow`", "network"),
    "bad name": (errors.HFValidationError("bad id"), "not a repository name", "owner/name"),
    "damaged header": (errors.SafetensorsParsingError("bad"), "damaged weights: `bad`", "owner"),
    "disk full": (OSError(28, "No space left on device"), "No space left", "try again"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failure_becomes_one_line_with_a_hint(
    cache: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    cause, message, hint = FAILURES[case]

    def fail(*args: Any, **options: Any) -> str:
        raise cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"{REPOSITORY}@v1")
    assert caught.value.where == f"{REPOSITORY}@v1"
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert caught.value.__cause__ is cause
    assert "\n" not in str(caught.value)
