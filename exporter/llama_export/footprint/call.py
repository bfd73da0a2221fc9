"""The one call whose memory is asked for: sizes of every dimension, from a batch and a length.

The call is the largest of its kind: it fills its rows up to the length, and takes as many tokens at
once as the entry does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import BuildError
from llama_artifacts.signature import (
    Dim,
    Shape,
    Signature,
    StateSpec,
    TensorSpec,
    parts,
    resolve,
)
from llama_export.entries.registry import POOL_PAGES, EntrySpec, Sizes

BATCH, MAX_SEQ = "Batch", "MaxSeq"
MOST = 1 << 30
"""The largest size of an open signature's own dimensions."""


@dataclass(frozen=True)
class Asked:
    """What is asked.

    Attributes:
        batch: sequences.
        seq_len: positions of a sequence's state, the last of them scratch in rows; tokens of a
            sequence where there is no state.
        tokens: most that one call takes, of a row or packed; None: as many as the entry does.
    """

    batch: int
    seq_len: int
    tokens: int | None = None


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        signature: of the program, with the numbers that a build fixes.
        sizes: of the dynamic dimensions.
        position: the furthest that a row can stand.
    """

    signature: Signature
    sizes: Mapping[str, int]
    position: int

    @property
    def rows(self) -> int:
        """Sequences of the call."""
        shapes = [
            state.shape for state in self.signature.states[:1] if POOL_PAGES not in state.shape
        ]
        shapes += [spec.shape for spec in self.signature.inputs if len(spec.shape) == 2]
        return resolve(shapes[0], self.sizes)[0] if shapes else 1

    @property
    def all_sizes(self) -> dict[str, int]:
        """`sizes`, and what a build fixes where an open signature has a dimension."""
        sizes = {BATCH: self.rows, **self.sizes}
        states = self.signature.states
        return sizes | ({MAX_SEQ: resolve(states[0].shape, sizes)[2]} if states else {})

    @property
    def state_bytes(self) -> int:
        """Bytes of one set of states."""
        return _num_bytes(self.signature.states, self.sizes)

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs."""
        return _num_bytes(self.signature.inputs, self.sizes)


def plan_call(spec: EntrySpec, signature: Signature, asked: Asked) -> Call:
    """The largest call of a program for this batch and length.

    Raises:
        BuildError: a dimension is out of its declared range.
    """
    sizes = _sizes(spec, signature, asked)
    ranges = {dim.name: dim for dim in signature.dims}
    sizes = {name: size for name, size in sizes.items() if name in ranges}
    for name, size in sizes.items():
        dim = ranges[name]
        if not dim.min <= size <= dim.max:
            raise BuildError(
                f"expected {name} from {dim.min} to {dim.max}, got {size:,}",
                where=spec.name,
                hint="ask for another --batch, --seq-len or --tokens",
            )
    return Call(signature, sizes, _furthest(signature, sizes, asked))


def open_signature(
    spec: EntrySpec, sizes: Sizes, *, has_batch: bool = True, has_length: bool = True
) -> Signature:
    """The declared signature, with what a build fixes as dimensions of their own.

    Args:
        spec: the entry.
        sizes: the numbers of what stays fixed.
        has_batch: `Batch` is a dimension; else also the rows of a paged step are fixed.
        has_length: `MaxSeq` is a dimension.
    """
    variant = {"Rows": sizes.batch} if not has_batch and spec.states == "pool" else None
    signature = spec.signature(sizes, variant)
    if spec.states != "rows":
        return signature
    batch = BATCH if has_batch else sizes.batch
    length = MAX_SEQ if has_length else sizes.max_seq
    states = tuple(
        replace(state, shape=(batch, state.shape[1], length, state.shape[3]))
        for state in signature.states
    )
    own = (Dim(BATCH, 1, MOST),) * has_batch + (Dim(MAX_SEQ, 2, MOST),) * has_length
    inputs, outputs = signature.inputs, signature.outputs
    if has_batch:
        inputs = tuple(
            replace(tensor, shape=_opened(declared.shape, tensor.shape))
            for declared, tensor in zip(spec.inputs, inputs, strict=True)
        )
        outputs = tuple(
            replace(tensor, shape=_opened(declared.shape, tensor.shape))
            for declared, tensor in zip(spec.outputs, outputs, strict=True)
        )
    return Signature(inputs, states, outputs, (*signature.dims, *own))


def _opened(declared: Shape, resolved: Shape) -> Shape:
    return tuple(
        size if isinstance(size, str) and parts(size)[1] == BATCH else number
        for size, number in zip(declared, resolved, strict=True)
    )


def _sizes(spec: EntrySpec, signature: Signature, asked: Asked) -> dict[str, int]:
    """Every dimension that the entry might have."""
    batch, length = asked.batch, asked.seq_len
    is_rows = spec.states == "rows"
    usable = length - 1 if is_rows else length
    most = {dim.name: dim.max for dim in signature.dims}
    row, packed = usable, batch * usable
    if asked.tokens is not None:
        row, packed = min(asked.tokens, row), min(asked.tokens, packed)
    elif spec.states is not None:
        row, packed = min(most.get("S", row), row), min(most.get("P", packed), packed)
    sizes = {"B": batch, "M": batch, "Rows": batch, "S": row, "P": packed}
    if spec.states == "pool":
        num_pages = math.ceil(length / _page_size(signature))
        sizes |= {"Pages": num_pages, POOL_PAGES: batch * num_pages + 1}  # page 0 is scratch
    return sizes


def _page_size(signature: Signature) -> int:
    size = signature.states[0].shape[2]
    assert isinstance(size, int)
    return size


def _furthest(signature: Signature, sizes: Mapping[str, int], asked: Asked) -> int:
    """The last position that `pos` may be, or that one of `positions` may be and is read."""
    for spec in signature.inputs:
        if spec.name == "pos" and spec.values is not None:
            new = sizes[spec.values.span] if spec.values.span is not None else 1
            return spec.values.max - new + 1
    return asked.seq_len - 2


def _num_bytes(specs: Sequence[TensorSpec | StateSpec], sizes: Mapping[str, int]) -> int:
    return sum(
        math.prod(resolve(spec.shape, sizes)) * from_name(spec.dtype).num_bytes for spec in specs
    )
