"""MODEL as a user names it: a folder, a GGUF file, a preset or a hub repository."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from llama_artifacts.errors import CheckpointError, ChoiceError
from llama_artifacts.manifest import Source
from llama_artifacts.strict_json import shown
from llama_export import presets
from llama_export.checkpoint.hf import HfCheckpoint
from llama_export.checkpoint.layout import coded_modules
from llama_export.checkpoint.source import Checkpoint, TensorInfo

GGUF_MAGIC = b"GGUF"

_REPOSITORY = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]{1,200}))?",
    re.ASCII,
)


def open_checkpoint(
    model: str,
    *,
    headers_only: bool = False,
    num_layers: int | None = None,
    revision: str | None = None,
    keeps_codes: bool = False,
) -> Checkpoint:
    """Opens a model by what the user called it.

    An existing path wins, then a preset's name, then `owner/name[@revision]` on the hub.

    Args:
        model: path, preset name, or repository.
        headers_only: weights without their data will do; `read` then fails.
        num_layers: use only this many of the layers.
        revision: the hub revision; not for local paths.
        keeps_codes: a GGUF file's integers stay as they are, instead of being decoded.

    Raises:
        CheckpointError: nothing of that name, or what is there is no checkpoint.
        ChoiceError: `keeps_codes`, and there are none, or none that would not be kept anyway.
        TokenizerError: tokenizer and vocabulary contradict each other.
    """
    checkpoint = _open(model, headers_only, num_layers, revision, keeps_codes)
    if keeps_codes:
        check_codes(checkpoint.tensors, is_choice=checkpoint.source.kind == "gguf")
    return checkpoint


def check_codes(tensors: Mapping[str, TensorInfo], *, is_choice: bool) -> None:
    """Refuses `--quantize stored` where it has nothing to keep.

    Args:
        tensors: of the checkpoint.
        is_choice: its codes could also be decoded.

    Raises:
        ChoiceError: there are no codes, or there is no choice.
    """
    if is_choice and coded_modules(tensors):
        return
    if coded_modules(tensors):
        raise ChoiceError(
            "--quantize stored is for GGUF files; the codes of this checkpoint are always kept",
            hint="leave --quantize out",
        )
    raise ChoiceError(
        "--quantize stored keeps a GGUF file's matrices of q8_0, q4_0, q4_1 and q4_k, got none",
        hint="use --quantize int8 or int4, or leave it out",
    )


def _open(
    model: str,
    headers_only: bool,
    num_layers: int | None,
    revision: str | None,
    keeps_codes: bool,
) -> Checkpoint:
    path = Path(model)
    if os.path.lexists(model):
        if revision is not None:
            message = f"expected no revision for a local path, got {shown(revision)}"
            raise CheckpointError(message, where=path)
        return _open_path(path, headers_only, num_layers, keeps_codes)
    preset = presets.find(model)
    if preset is None:
        repository, pinned = parse_repository(model, revision)
    else:
        repository, pinned = preset.repository, revision or preset.revision
    return _open_hub(
        repository,
        pinned,
        name=None if preset is None else preset.name,
        headers_only=headers_only,
        num_layers=num_layers,
    )


def _open_path(
    path: Path, headers_only: bool, num_layers: int | None, keeps_codes: bool
) -> Checkpoint:
    if path.is_dir():
        return HfCheckpoint.open(path, headers_only=headers_only, num_layers=num_layers)
    if not path.exists():
        message = f"dangling link to {shown(str(path.readlink()))}"
        raise CheckpointError(message, where=path)
    if path.suffix == ".gguf" or _begins_as_gguf(path):
        from llama_export.checkpoint.gguf import GgufCheckpoint

        return GgufCheckpoint.open(path, num_layers=num_layers, keeps_codes=keeps_codes)
    hint = "name the folder that holds it" if path.suffix in (".safetensors", ".json") else None
    message = "expected a checkpoint folder or a .gguf file, got another kind of file"
    raise CheckpointError(message, where=path, hint=hint)


def _begins_as_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def parse_repository(model: str, revision: str | None = None) -> tuple[str, str | None]:
    """`owner/name` and the revision of `owner/name[@revision]`.

    Raises:
        CheckpointError: it is of another form, or names another revision than `revision`.
    """
    match = _REPOSITORY.fullmatch(model)
    if match is None or ".." in model:
        raise _unknown(model)
    named = match["revision"]
    if named is not None and revision is not None and named != revision:
        message = f"two revisions: {shown(named)} in the name, {shown(revision)} beside it"
        raise CheckpointError(message, where=model)
    return match["name"], named or revision


def _open_hub(
    repository: str,
    revision: str | None,
    *,
    name: str | None,
    headers_only: bool,
    num_layers: int | None,
) -> Checkpoint:
    from llama_export.checkpoint import hub

    snapshot = hub.fetch(repository, revision=revision, headers_only=headers_only)
    return HfCheckpoint.open(
        snapshot.folder,
        headers_only=headers_only,
        num_layers=num_layers,
        source=Source("hub", repository, snapshot.revision),
        name=name or repository.rpartition("/")[2],
    )


def _unknown(model: str) -> CheckpointError:
    known = presets.names()
    near = difflib.get_close_matches(model.lower(), known, n=3) or _neighbours(model)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = f"expected a folder, a .gguf file, owner/name, or a preset: {', '.join(known)}"
    message = f"no folder, file, preset or hub repository is called {shown(model)}"
    return CheckpointError(message, hint=hint)


def _neighbours(model: str) -> list[str]:
    """Entries of the folder that the path points into, of nearly the same name."""
    path = Path(model)
    try:
        entries = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        return []
    return [str(path.parent / name) for name in difflib.get_close_matches(path.name, entries, n=3)]
