"""Buckets: the few sizes for which calls are captured, and the padding that fills a call up to one.

Sizes are rounded up to powers of two, or to the most that a dimension allows. What is added to a
call writes to scratch alone (page 0 of a pool, the last position of a row), and its results are cut
off again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch

from llama_artifacts.errors import InputError
from llama_artifacts.signature import Shape, Signature, TensorSpec, parts, resolve
from llama_runtime.states import torch_dtype

MAX_TOKENS = 512
"""A padded call of more tokens runs eagerly: launches cost it little, padding would cost much."""

# For each entry that can be padded, the inputs whose padding is not 0 but the largest or the
# smallest value that they may hold: the scratch position of a row, the position of an idle row.
_PADDING: Mapping[str, Mapping[str, str]] = {
    "decode_rows": {"positions": "max"},
    "prefill_slots": {},
    "prefill_packed": {"positions": "max"},
    "step_packed": {"positions": "max", "step_positions": "max"},
    "decode_paged": {"positions": "min"},
    "prefill_paged": {},
    "step_paged": {"step_positions": "min"},
}
_LOOPS = ("generate", "sample", "generate_until")


def can_be_captured(entry: str, signature: Signature) -> bool:
    """Whether a program is the same work in every call of the same sizes, and can be padded.

    A loop asks at every step whether to go on, and so reads back from the device; of the others,
    those with a dimension that padding would change, such as `prefill` with S, need a variant that
    fixes it.
    """
    if entry.partition("<")[0] in _LOOPS:
        return False
    return entry in _PADDING or not input_dims(signature)


def input_dims(signature: Signature) -> list[str]:
    """The dynamic dimensions of a program's inputs, each once."""
    sizes = [size for spec in signature.inputs for size in spec.shape if isinstance(size, str)]
    return list(dict.fromkeys(sizes))


def bucket(signature: Signature, sizes: Mapping[str, int]) -> dict[str, int] | None:
    """The sizes rounded up, those of pools as they are; None where the call is too large."""
    dims = input_dims(signature)
    rounded = {name: min(_power(sizes[name]), signature.dim(name).max) for name in dims}
    found = {**sizes, **rounded}
    return found if not dims or _num_tokens(signature, found) <= MAX_TOKENS else None


def padding(entry: str, spec: TensorSpec) -> int:
    """What fills an input up."""
    side = _PADDING.get(entry, {}).get(spec.name)
    if side is None or spec.values is None:
        return 0
    return spec.values.max if side == "max" else spec.values.min


def fill(buffer: torch.Tensor, tensor: torch.Tensor, value: int) -> None:
    """Puts a tensor at the beginning of a buffer of its rank, and the value into the rest."""
    if buffer.shape != tensor.shape:
        buffer.fill_(value)
    buffer[tuple(slice(size) for size in tensor.shape)].copy_(tensor)


def cut(
    output: torch.Tensor, shape: Shape, found: Mapping[str, int], sizes: Mapping[str, int]
) -> torch.Tensor:
    """A new tensor without what padding gave: an axis `2*Rows` is two runs, each cut by itself."""
    for axis, size in enumerate(shape):
        factor, name = (1, "") if isinstance(size, int) else parts(size)
        if name and found[name] != sizes[name]:
            runs = output.unflatten(axis, (factor, found[name]))
            output = runs.narrow(axis + 1, 0, sizes[name]).flatten(axis, axis + 1)
    return output.clone(memory_format=torch.contiguous_format)


def calls_of_padding(
    entry: str, signature: Signature, largest: Mapping[str, int]
) -> list[dict[str, torch.Tensor]]:
    """The inputs, on the CPU, of a call of each bucket up to these sizes; the largest first.

    They hold padding alone, so such a call writes nothing but scratch.

    Raises:
        InputError: the entry cannot be called with padding, or a dimension is missing, unknown or
            out of its range.
    """
    if entry not in _PADDING:
        raise InputError(
            f"`{entry}` has no padding", where="entry", hint="its first call captures it"
        )
    dims = input_dims(signature)
    if sorted(largest) != sorted(dims):
        raise InputError(f"expected sizes of {', '.join(dims) or 'none'}", where=entry)
    ladders = [_ladder(signature, name, largest[name]) for name in dims]
    found = [dict(zip(dims, sizes, strict=True)) for sizes in itertools.product(*ladders)]
    fitting = [sizes for sizes in found if _num_tokens(signature, sizes) <= MAX_TOKENS]
    fitting.sort(key=lambda sizes: math.prod(sizes.values()), reverse=True)
    return [_padded_inputs(entry, signature.inputs, sizes) for sizes in fitting]


def _ladder(signature: Signature, name: str, largest: int) -> list[int]:
    dim = signature.dim(name)
    if not dim.min <= largest <= dim.max:
        raise InputError(f"expected {name} from {dim.min} to {dim.max}, got {largest}")
    top = min(_power(largest), dim.max)
    sizes = {min(1 << n, top) for n in range(top.bit_length() + 1)}
    return sorted(size for size in sizes if size >= dim.min)


def _padded_inputs(
    entry: str, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    return {
        spec.name: torch.full(
            resolve(spec.shape, sizes), padding(entry, spec), dtype=torch_dtype(spec.dtype)
        )
        for spec in inputs
    }


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _num_tokens(signature: Signature, sizes: Mapping[str, int]) -> int:
    """Of a call's first input, which in every entry holds the tokens."""
    return math.prod(resolve(signature.inputs[0].shape, sizes))
