"""Snapshots: the states of a conversation up to its position, in one safetensors file.

Beside the states, cut to the positions in use, the file has the token ids that were fed, int32
[Batch, position], and the digest of what gives the states their meaning: the weights, the network
and the dtype. Formats, devices and capacities are not in it, so a snapshot of one program goes on in
another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from llama_artifacts.errors import (
    CompatibilityError,
    IntegrityError,
    LlamaExportError,
    SessionError,
)
from llama_artifacts.manifest import Manifest
from llama_artifacts.safetensors import read_header
from llama_artifacts.signature import Signature, TensorSpec, check_values, show
from llama_artifacts.strict_json import printable
from llama_runtime.shards import Group
from llama_runtime.states import torch_dtype
from llama_runtime.weights import map_weights

KIND = "llama-export snapshot 1"
TOKENS = "tokens"
_HINT = "save it again with this bundle"


@dataclass(frozen=True)
class Snapshot:
    """What a snapshot holds.

    Attributes:
        tokens: the ids that were fed, int32 [Batch, position].
        states: by name, [Batch, KvHeads, position, HeadDim], on the CPU.
    """

    tokens: torch.Tensor
    states: Mapping[str, torch.Tensor]


def bundle_digest(manifest: Manifest, signature: Signature) -> str:
    """The digest of what must be the same for states to mean the same, as hexadecimal SHA-256.

    Those are the weights files, the network, how FP8 products are computed, and the states' names,
    dtypes and sizes, but for the number of positions.
    """
    files = {**manifest.files, **manifest.referenced}
    model = asdict(manifest.model)
    model.pop("rope")  # a description for people; its frequencies are among the weights
    states = [(s.name, s.dtype, [*s.shape[:2], *s.shape[3:]]) for s in signature.states]
    numerics = sorted({program.numerics or "" for program in manifest.programs})
    weights = {name: files[name].sha256 for name in manifest.weights_headers}
    content = json.dumps([weights, model, states, numerics], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def check_alone(group: Group | None, folder: Path) -> None:
    """Refuses to save or restore where several processes have a part of the states each.

    Raises:
        SessionError: there are several.
    """
    if group is not None and group.size > 1:
        raise SessionError(
            f"states of {group.size} processes cannot be saved or restored: each has a part of them",
            where=folder,
            hint="run it in one process, with programs of one shard",
        )


def write(path: Path, snapshot: Snapshot, digest: str) -> None:
    """Writes a file whole or not at all; one that is there is replaced.

    Raises:
        SessionError: it cannot be written there.
    """
    tensors = {**snapshot.states, TOKENS: snapshot.tokens}
    metadata = {"kind": KIND, "bundle": digest, "content": _content_digest(tensors)}
    with _staged(path) as staged:
        save_file({name: t.contiguous() for name, t in tensors.items()}, staged, metadata)


def read(
    path: Path, digest: str, *, signature: Signature, tokens: TensorSpec, capacity: int
) -> Snapshot:
    """The snapshot in a file, whole and fit for states of the signature.

    Args:
        path: the file.
        digest: of the bundle, as `bundle_digest` gives it.
        signature: of the entry whose states will take it.
        tokens: the entry's input of tokens.
        capacity: most positions that it may fill.

    Raises:
        IntegrityError: no snapshot, or a damaged one.
        CompatibilityError: the snapshot of another bundle, dtype or batch, or a longer one.
    """
    if not path.is_file():
        what = "something else" if path.exists() else "no such file"
        hint = "name a file that `--save-state` or `Session.save` wrote"
        raise IntegrityError(f"expected a snapshot, got {what}", where=path, hint=hint)
    metadata = read_header(path, error=IntegrityError).metadata
    if (kind := metadata.get("kind")) != KIND:
        raise IntegrityError(f"expected a `{KIND}`, got {kind!r:.60}", where=path, hint=_HINT)
    found = map_weights(path)
    ids = found.pop(TOKENS, None)
    if ids is None or ids.ndim != 2 or ids.dtype != torch_dtype(tokens.dtype):
        raise IntegrityError(f"expected `{TOKENS}` as i32 [Batch, S]", where=path, hint=_HINT)
    _check_fit(path, found, ids, signature, capacity)
    if metadata.get("bundle") != digest:
        raise CompatibilityError("made with other weights", where=path, hint=_HINT)
    if metadata.get("content") != _content_digest({**found, TOKENS: ids}):
        raise IntegrityError("its content changed since it was saved", where=path, hint=_HINT)
    _check_ids(path, ids, tokens)
    return Snapshot(ids.clone(), found)


def _check_fit(
    path: Path,
    found: Mapping[str, torch.Tensor],
    ids: torch.Tensor,
    signature: Signature,
    capacity: int,
) -> None:
    batch, position = ids.shape
    for spec in signature.states:
        shape = (*spec.shape[:2], position, *spec.shape[3:])
        expected = f"expected {spec.dtype} {show(shape)}"
        if spec.name not in found:
            raise CompatibilityError(
                f"{expected}, got none", where=f"{path}#{spec.name}", hint=_HINT
            )
        tensor = found[spec.name]
        if tensor.dtype != torch_dtype(spec.dtype) or tuple(tensor.shape) != shape:
            got = f"{str(tensor.dtype).removeprefix('torch.')} {show(tuple(tensor.shape))}"
            raise CompatibilityError(
                f"{expected}, got {got}", where=f"{path}#{spec.name}", hint=_HINT
            )
        if batch != spec.shape[0]:
            message = f"expected tokens of {spec.shape[0]} rows, got {batch}"
            raise CompatibilityError(message, where=path, hint=_HINT)
    if more := sorted(found.keys() - {spec.name for spec in signature.states}):
        raise CompatibilityError(
            "a state that the bundle does not keep",
            where=f"{path}#{printable(more[0])}",
            hint=_HINT,
        )
    if position > capacity:
        raise CompatibilityError(
            f"expected at most {capacity} positions, got {position}",
            where=path,
            hint="build with a larger --max-seq",
        )


def _check_ids(path: Path, ids: torch.Tensor, tokens: TensorSpec) -> None:
    if ids.numel() == 0:
        raise IntegrityError("expected tokens, got none", where=path, hint=_HINT)
    try:
        check_values(replace(tokens, name=TOKENS), int(ids.min()), int(ids.max()), {})
    except LlamaExportError as cause:
        raise IntegrityError(cause.message, where=f"{path}#{TOKENS}", hint=_HINT) from cause


def _content_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}\n".encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """A file beside the target that takes its place when all went well."""
    if path.exists() and not path.is_file():  # a device would be gone
        raise SessionError("expected a plain file", where=path, hint="choose another file")
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(descriptor)
        staged = Path(name)
        try:
            yield staged
            with staged.open("rb") as file:
                os.fsync(file.fileno())
            staged.replace(path)
        finally:
            staged.unlink(missing_ok=True)
    except (OSError, SafetensorError) as cause:
        message = f"cannot be written: {getattr(cause, 'strerror', None) or cause}"
        raise SessionError(message, where=path, hint="choose another file") from cause
