"""The weights of a bundle: one map of each file, shared by every program."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Mapping
from pathlib import Path

import torch

from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import WEIGHTS_NAME, Manifest
from llama_artifacts.safetensors import StoredTensor, read_header


def bundle_weights(manifest: Manifest, places: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """Every tensor of a bundle's weights files by name, as `map_weights` gives them.

    Args:
        manifest: of the bundle.
        places: where each of its weights files is; see `llama_runtime.places.find_weights`.

    Raises:
        IntegrityError: a file is not sound safetensors, has another header than the manifest
            says, or two of the checkpoint's files hold a tensor of the same name.
    """
    own: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, digest in sorted(manifest.weights_headers.items()):
        found = map_weights(places[name], header_sha256=digest)
        if name == WEIGHTS_NAME:
            own = found
        elif both := sorted(found.keys() & weights.keys()):
            raise IntegrityError(f"holds `{both[0]}`, as another file does", where=places[name])
        else:
            weights |= found
    return weights | own


def map_weights(path: Path, *, header_sha256: str | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors file, as views of one private memory map.

    The exception is a tensor that does not begin at a multiple of its element size: it is copied.

    No data is read until it is used, and pages are shared with every process that maps the file.
    Writing to a tensor changes this process's copy of the page, never the file. The map lives as
    long as any of the tensors does.

    Args:
        path: the file.
        header_sha256: what the file's header must hash to; None trusts it.

    Raises:
        IntegrityError: the file is not sound safetensors, or has another header.
    """
    header = read_header(path, error=IntegrityError)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if header_sha256 not in (None, hashlib.sha256(data[: header.data_start]).hexdigest()):
        raise IntegrityError(
            "its header is not the one that the programs were built for",
            where=path,
            hint="copy the bundle again, or build it again",
        )
    tensors = {}
    for name, stored in header.tensors.items():
        tensors[name] = _view(data, stored)
    return tensors


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
