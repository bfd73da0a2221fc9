"""A call as bytes: the sizes of dimensions, then each input, from a multiple of eight bytes on.

Both sides know the program's signature, so dtypes, ranks and the order are not told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from llama_artifacts.signature import Signature, resolve
from llama_runtime.group.link import as_bytes, as_integers
from llama_runtime.states import torch_dtype

_UNUSED = -1
_ALIGNMENT = 8


def pack(
    signature: Signature, sizes: Mapping[str, int], inputs: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """The payload, uint8, of a call (or of new states, which have sizes alone)."""
    parts = [as_bytes([sizes.get(dim.name, _UNUSED) for dim in signature.dims])]
    for tensor in inputs:
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        parts += [data, torch.zeros(-data.numel() % _ALIGNMENT, dtype=torch.uint8)]
    return torch.cat(parts)


def unpack_sizes(signature: Signature, payload: torch.Tensor) -> dict[str, int]:
    """The sizes of a payload."""
    values = as_integers(payload[: 8 * len(signature.dims)])
    named = zip(signature.dims, values, strict=True)
    return {dim.name: value for dim, value in named if value != _UNUSED}


def unpack(
    signature: Signature, payload: torch.Tensor
) -> tuple[list[torch.Tensor], dict[str, int]]:
    """The inputs of a call, on the CPU, and the sizes of its dimensions."""
    sizes = unpack_sizes(signature, payload)
    inputs = []
    start = 8 * len(signature.dims)
    for spec in signature.inputs:
        shape, dtype = resolve(spec.shape, sizes), torch_dtype(spec.dtype)
        length = math.prod(shape) * dtype.itemsize
        # A copy of its own: programs may count on the alignment of new tensors.
        inputs.append(payload[start : start + length].view(dtype).reshape(shape).clone())
        start += length + -length % _ALIGNMENT
    return inputs, sizes
