"""The weights of a bundle: one map of each file, shared by every program."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import WEIGHTS_NAME, Cut, Manifest
from llama_artifacts.safetensors import StoredTensor, read_header
from llama_runtime.shards import Group

ALIGNMENT = 64
"""Bytes at whose multiples compiled code may take a tensor to begin."""


def bundle_weights(
    manifest: Manifest, places: Mapping[str, Path], group: Group | None = None
) -> dict[str, torch.Tensor]:
    """Every tensor of a bundle's weights files by name, as `map_weights` gives them.

    Args:
        manifest: of the bundle.
        places: where each of its weights files is; see `llama_runtime.places.find_weights`.
        group: of this process; None: tensors are whole.

    Raises:
        IntegrityError: a file is not sound safetensors, has another header than the manifest
            says, or two of the checkpoint's files hold a tensor of the same name.
    """
    own: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, digest in sorted(manifest.weights_headers.items()):
        found = map_weights(places[name], header_sha256=digest, cuts=manifest.cuts, group=group)
        if name == WEIGHTS_NAME:
            own = found
        elif both := sorted(found.keys() & weights.keys()):
            raise IntegrityError(f"holds `{both[0]}`, as another file does", where=places[name])
        else:
            weights |= found
    return weights | own


def map_weights(
    path: Path,
    *,
    header_sha256: str | None = None,
    cuts: Mapping[str, Cut] | None = None,
    group: Group | None = None,
) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors file, as views of one private memory map.

    The exception is a tensor that does not begin at a multiple of its element size: it is copied.

    No data is read until it is used, and pages are shared with every process that maps the file.
    Writing to a tensor changes this process's copy of the page, never the file. The map lives as
    long as any of the tensors does.

    Args:
        path: the file.
        header_sha256: what the file's header must hash to; None trusts it.
        cuts: which tensors processes of a group have in parts.
        group: of this process; None, or a group of one: every tensor is whole.

    Raises:
        IntegrityError: the file is not sound safetensors, or has another header.
    """
    header = read_header(path, error=IntegrityError)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # what is not in memory yet comes in large pages
        with contextlib.suppress(OSError):  # a system that refuses
            data.madvise(mmap.MADV_HUGEPAGE)
    if header_sha256 not in (None, hashlib.sha256(data[: header.data_start]).hexdigest()):
        raise IntegrityError(
            "its header is not the one that the programs were built for",
            where=path,
            hint="copy the bundle again, or build it again",
        )
    tensors = {}
    for name, stored in header.tensors.items():
        tensors[name] = _view(data, stored)
    if group is None or group.size == 1:
        return tensors
    return _parts(path, header.tensors, tensors, cuts or {}, group)


def _parts(
    path: Path,
    stored: Mapping[str, StoredTensor],
    whole: Mapping[str, torch.Tensor],
    cuts: Mapping[str, Cut],
    group: Group,
) -> dict[str, torch.Tensor]:
    """The tensors of one file as a process of the group binds them.

    Rows are views, if they begin where compiled code expects it. Columns are copied, once for all
    programs.

    Raises:
        IntegrityError: a tensor cannot be cut so.
    """
    parts = {name: tensor for name, tensor in whole.items() if name not in cuts}
    for name, cut in cuts.items():
        if cut.tensor not in whole:
            continue
        tensor, axis = whole[cut.tensor], 0 if cut.axis == "rows" else 1
        if tensor.ndim <= axis or tensor.shape[axis] % group.size:
            message = f"{list(tensor.shape)} does not divide into {cut.axis} for {group.size}"
            raise IntegrityError(f"`{cut.tensor}` {message} processes", where=path)
        length = tensor.shape[axis] // group.size
        place = (axis, group.rank * length, length)
        if axis == 0 and tensor.narrow(*place).data_ptr() % ALIGNMENT == 0:
            parts[name] = tensor.narrow(*place)
        else:
            parts[name] = _copy(path, stored[cut.tensor], place)
    return parts


def _copy(path: Path, stored: StoredTensor, place: tuple[int, int, int]) -> torch.Tensor:
    """A part of a tensor: of which axis, from where on, how much.

    It is read through a map of its own, so that what other processes need leaves the memory again.
    """
    first = stored.start - stored.start % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        size = stored.end - first
        data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=first)
    moved = replace(stored, start=stored.start - first, end=stored.end - first)
    return _view(data, moved).narrow(*place).clone(memory_format=torch.contiguous_format)


def _view(data: mmap.mmap, stored: StoredTensor) -> torch.Tensor:
    row = from_name(stored.dtype)
    dtype = getattr(torch, row.torch)
    if stored.start == stored.end:
        return torch.empty(stored.shape, dtype=dtype)
    if stored.start % row.num_bytes:
        # Compiled code may take an element's address to be a multiple of its size.
        own = bytearray(data[stored.start : stored.end])
        return torch.frombuffer(own, dtype=dtype).reshape(stored.shape)
    count = (stored.end - stored.start) // row.num_bytes
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=stored.start)
    return flat.reshape(stored.shape)
