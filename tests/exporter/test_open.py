from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.errors import CheckpointError
from llama_export import presets
from llama_export.checkpoint import hub
from llama_export.checkpoint import open as opening
from llama_export.checkpoint.hf import HfCheckpoint
from llama_export.checkpoint.open import open_checkpoint
from tests.tiny import write_tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is asked of the hub, which answers with a tiny checkpoint."""
    calls: list[tuple[str, dict[str, Any]]] = []
    folder = write_tiny(tmp_path / "cached")

    def fetch(repository: str, **options: Any) -> hub.Snapshot:
        calls.append((repository, options))
        return hub.Snapshot(folder, COMMIT)

    monkeypatch.setattr(hub, "fetch", fetch)
    return calls


def test_folder() -> None:
    write_tiny(Path("tiny"))
    checkpoint = open_checkpoint("tiny", num_layers=1)
    assert isinstance(checkpoint, HfCheckpoint)
    assert (checkpoint.name, checkpoint.config.num_layers) == ("tiny", 1)


def test_existing_path_wins_over_preset_and_repository(asked: list[Any]) -> None:
    write_tiny(Path("smollm2-135m"))
    write_tiny(Path("owner/name"))
    assert open_checkpoint("smollm2-135m").source.kind == "folder"
    assert open_checkpoint("owner/name").source.kind == "folder"
    assert not asked


def test_preset_is_pinned(asked: list[Any]) -> None:
    checkpoint = open_checkpoint("smollm2-135m-instruct", headers_only=True)
    preset = presets.find("smollm2-135m-instruct")
    assert preset is not None
    assert asked == [(preset.repository, {"revision": preset.revision, "headers_only": True})]
    assert checkpoint.name == "smollm2-135m-instruct"
    assert checkpoint.source.name == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("model", "revision", "expected"),
    [
        ("owner/name", None, None),
        ("owner/name@v1.0", None, "v1.0"),
        ("owner/name", "v2", "v2"),
        ("owner/name@refs/pr/3", None, "refs/pr/3"),
        ("owner/name@v2", "v2", "v2"),
        ("smollm2-135m", "main", "main"),
    ],
)
def test_revision(asked: list[Any], model: str, revision: str | None, expected: str | None) -> None:
    open_checkpoint(model, revision=revision)
    assert asked[0][1]["revision"] == expected


@pytest.mark.parametrize("content", [b"GGUF", b""], ids=["magic", "suffix only"])
def test_gguf_file_goes_to_its_reader(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    from llama_export.checkpoint import gguf

    name = "model.gguf" if not content else "model"
    Path(name).write_bytes(content)
    calls: list[tuple[Any, ...]] = []

    def opened(path: Path, *, num_layers: int | None, keeps_codes: bool) -> None:
        calls.append((path, num_layers, keeps_codes))

    monkeypatch.setattr(gguf.GgufCheckpoint, "open", opened)
    open_checkpoint(name, num_layers=3)
    assert calls == [(Path(name), 3, False)]


REFUSED: dict[str, tuple[str, str | None, str, str]] = {
    "empty": ("", None, "no folder, file, preset or hub repository", "expected a folder"),
    "near a preset": ("smollm2-135", None, "is called `smollm2-135`", "did you mean smollm2-135m"),
    "near a path": ("./models/tinny", None, "is called `./models/tinny`", "mean models/tiny?"),
    "unlike anything": ("zzz", None, "is called `zzz`", "smollm2-135m"),
    "too many parts": ("a/b/c", None, "is called `a/b/c`", "owner/name"),
    "escape": ("a/..", None, "", ""),
    "two at signs": ("a/b@c@d", None, "is called", "owner/name"),
    "two revisions": ("a/b@c", "d", "two revisions: `c` in the name, `d` beside it", ""),
    "revision of a path": ("models", "v1", "expected no revision for a local path", ""),
    "weights file": ("x.safetensors", None, "another kind of file", "the folder that holds it"),
    "other file": ("x.txt", None, "another kind of file", ""),
    "dangling link": ("link", None, "dangling link to `gone`", ""),
    "very long": ("x" * 5000, None, "", ""),
    "control characters": ("x\x1b[2J", None, "is called", ""),
    "zero byte": ("x\0y", None, "", ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_names(case: str) -> None:
    model, revision, message, hint = REFUSED[case]
    Path("models/tiny").mkdir(parents=True)
    Path("x.safetensors").write_bytes(b"")
    Path("x.txt").write_bytes(b"")
    Path("link").symlink_to("gone")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model, revision=revision)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_heavy_is_imported_to_read_presets() -> None:
    assert "torch" not in vars(opening)


@pytest.mark.parametrize("name", ["pipe", "pipe.gguf"])
def test_a_pipe_keeps_nobody_waiting(name: str) -> None:
    os.mkfifo(name)
    with pytest.raises(CheckpointError, match=r"expected a (plain file|checkpoint folder)"):
        open_checkpoint(name)
