"""Where a Hugging Face folder keeps its tensors, and its small JSON files, each read strictly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_artifacts.errors import CheckpointError, LlamaExportError
from llama_artifacts.safetensors import impostor, os_message, plain_size, read_header
from llama_artifacts.strict_json import json_type, parse_object, printable, shown
from llama_export.checkpoint.source import Stored

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_JSON_BYTES = 256 * 2**20
COMPARED_BYTES = 4 * 2**20

_PLAIN = re.compile(r"\w[\w.-]{0,200}\.safetensors", re.ASCII)


def read_bytes(path: Path, *, error: type[LlamaExportError] = CheckpointError) -> bytes:
    """A small file whole; refuses links to nowhere, huge files and what a failed download leaves."""
    try:
        num_bytes = plain_size(path, error=error)
        if num_bytes > MAX_JSON_BYTES:
            message = f"expected at most {MAX_JSON_BYTES} bytes, got {num_bytes}"
            raise error(message, where=path)
        data = path.read_bytes()
    except OSError as cause:
        raise error(os_message(path, cause), where=path) from cause
    if (found := impostor(data[:64])) is not None:
        raise error(f"expected {path.name}, got {found[0]}", where=path, hint=found[1])
    return data


def read_json(path: Path, *, error: type[LlamaExportError] = CheckpointError) -> dict[str, Any]:
    """A small JSON object."""
    return parse_object(read_bytes(path, error=error), where=path, error=error)


def is_there(path: Path) -> bool:
    """Whether the folder has an entry of that name, even a link to nowhere."""
    return path.exists() or path.is_symlink()


def locate(folder: Path, *, headers_only: bool, notes: list[str]) -> dict[str, Stored]:
    """Every tensor of a folder by name; `model.safetensors` is taken before an index.

    Raises:
        CheckpointError: no weights, a missing or damaged shard, or an index that disagrees with
            the shards.
    """
    if is_there(folder / SINGLE):
        if is_there(folder / INDEX):
            notes.append(f"took {SINGLE}, ignored {INDEX}")
        return _tensors_of(folder / SINGLE, headers_only=headers_only)
    if is_there(folder / INDEX):
        return _sharded(folder, headers_only=headers_only, notes=notes)
    raise _no_weights(folder)


def shards(weight_map: Mapping[str, str]) -> list[str]:
    """The file names of an index, sorted."""
    return sorted(set(weight_map.values()))


def read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """An index's map from tensor name to plain file name, and the total size it claims."""
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        message = f"expected weight_map as an object of file names, got {json_type(weight_map)}"
        raise CheckpointError(message, where=f"{path}#weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain(file):
            message = (
                f"expected a plain .safetensors file name for {shown(name)}, got {shown(file)}"
            )
            raise CheckpointError(message, where=f"{path}#weight_map")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if isinstance(total, int) else None


def is_same(first: Stored, second: Stored) -> bool:
    """Whether two stored tensors are equal in dtype, shape and every byte."""
    a, b = first.tensor, second.tensor
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with first.path.open("rb") as left, second.path.open("rb") as right:
        left.seek(a.start)
        right.seek(b.start)
        rest = a.end - a.start
        while rest > 0:
            size = min(rest, COMPARED_BYTES)
            if left.read(size) != right.read(size):
                return False
            rest -= size
    return True


def is_zero(stored: Stored) -> bool:
    """Whether a small tensor's bytes are all zero."""
    with stored.path.open("rb") as file:
        file.seek(stored.tensor.start)
        return not any(file.read(stored.tensor.end - stored.tensor.start))


def _is_plain(name: str) -> bool:
    return _PLAIN.fullmatch(name) is not None


def _tensors_of(path: Path, *, headers_only: bool) -> dict[str, Stored]:
    header = read_header(path, error=CheckpointError, headers_only=headers_only)
    return {name: Stored(path, name, tensor) for name, tensor in header.tensors.items()}


def _sharded(folder: Path, *, headers_only: bool, notes: list[str]) -> dict[str, Stored]:
    weight_map, total = read_index(folder / INDEX)
    for shard in shards(weight_map):
        if not is_there(folder / shard):
            message = f"{shard} named by the index is missing (incomplete download?)"
            raise CheckpointError(message, where=folder, hint="download the checkpoint again")
    found: dict[str, Stored] = {}
    for shard in shards(weight_map):
        stored = _tensors_of(folder / shard, headers_only=headers_only)
        _check_shard(weight_map, shard, stored, where=folder / INDEX)
        found |= stored
    stored_bytes = sum(entry.tensor.end - entry.tensor.start for entry in found.values())
    if total is not None and total != stored_bytes:
        notes.append(f"{INDEX} says {total} bytes in total, the shards hold {stored_bytes}")
    return found


def _check_shard(
    weight_map: Mapping[str, str], shard: str, stored: Mapping[str, Stored], *, where: Path
) -> None:
    for name, file in weight_map.items():
        if file == shard and name not in stored:
            message = f"the index puts {shown(name)} in {shard}, which does not hold it"
            raise CheckpointError(message, where=where, hint="download the checkpoint again")
    for name in stored:
        if weight_map.get(name) != shard:
            message = f"{shard} holds {shown(name)}, which the index does not put there"
            raise CheckpointError(message, where=where, hint="download the checkpoint again")


def _no_weights(folder: Path) -> CheckpointError:
    names = sorted(path.name for path in folder.iterdir())
    hint = "the folder must hold the whole checkpoint in safetensors form"
    for suffix, advice in (
        (".gguf", "name the .gguf file itself"),
        (".bin", "convert the PyTorch weights with transformers' save_pretrained"),
        (".pth", "convert Meta's original weights to the Hugging Face layout"),
    ):
        match = next((name for name in names if name.endswith(suffix)), None)
        if match is not None:
            hint = f"found {printable(match)}: {advice}"
            break
    return CheckpointError(f"expected {SINGLE} or {INDEX}, found neither", where=folder, hint=hint)
