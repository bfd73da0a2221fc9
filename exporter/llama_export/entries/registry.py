"""Entries: what a program of each name takes, keeps and gives, before any size is known.

Fixed sizes are spelled `Batch`, `MaxSeq` and `V`; every other name in a shape is a dynamic
dimension. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from llama_artifacts.errors import BuildError
from llama_artifacts.signature import Bounds, Dim, Shape, Signature, StateSpec, TensorSpec
from llama_export.checkpoint.config import LlamaConfig

COMPUTE_DTYPE = "T"
"""Stands for the compute dtype in declarations."""


@dataclass(frozen=True)
class Sizes:
    """What a build fixes: the network, the rows and positions of its states, the compute dtype."""

    config: LlamaConfig
    batch: int
    max_seq: int
    dtype: str

    def named(self) -> dict[str, int]:
        """The fixed sizes by the names that declarations use."""
        return {"Batch": self.batch, "MaxSeq": self.max_seq, "V": self.config.vocab_size}


@dataclass(frozen=True)
class Values:
    """Bounds of an integer input: from 0 to a named size plus an offset; see `Bounds.span`."""

    size: str
    offset: int
    span: str | None = None

    def resolve(self, sizes: Mapping[str, int]) -> Bounds:
        """The bounds as numbers."""
        return Bounds(0, sizes[self.size] + self.offset, self.span)


@dataclass(frozen=True)
class Tensor:
    """One declared input or output."""

    name: str
    dtype: str
    shape: Shape
    values: Values | None = None

    def resolve(self, sizes: Sizes) -> TensorSpec:
        """The tensor with every fixed size as a number."""
        named = sizes.named()
        shape = tuple(
            named.get(size, size) if isinstance(size, str) else size for size in self.shape
        )
        dtype = sizes.dtype if self.dtype == COMPUTE_DTYPE else self.dtype
        return TensorSpec(
            self.name, dtype, shape, None if self.values is None else self.values.resolve(named)
        )


@dataclass(frozen=True)
class Range:
    """A declared dynamic dimension: from 1 to the smaller of `max` and MaxSeq - 1, where given."""

    name: str
    max: int
    fits_state: bool = True

    def resolve(self, sizes: Sizes) -> Dim:
        """The dimension with its range as numbers."""
        return Dim(self.name, 1, min(self.max, sizes.max_seq - 1) if self.fits_state else self.max)


@dataclass(frozen=True)
class EntrySpec:
    """One entry.

    Attributes:
        name: what users call it; also the method of the model that computes it.
        summary: one line on what it computes.
        inputs: tensors of a call, in order.
        states: `rows` for a key and a value cache per layer, None for no state.
        outputs: results, in order.
        dims: the dynamic dimensions.
    """

    name: str
    summary: str
    inputs: tuple[Tensor, ...]
    states: Literal["rows"] | None
    outputs: tuple[Tensor, ...]
    dims: tuple[Range, ...] = ()

    def signature(self, sizes: Sizes) -> Signature:
        """The declared signature for these sizes."""
        return Signature(
            inputs=tuple(tensor.resolve(sizes) for tensor in self.inputs),
            states=_rows_states(sizes) if self.states == "rows" else (),
            outputs=tuple(tensor.resolve(sizes) for tensor in self.outputs),
            dims=tuple(dim.resolve(sizes) for dim in self.dims),
        )


def entries() -> tuple[EntrySpec, ...]:
    """Every entry, in the order of the documentation."""
    from llama_export.entries.llama import ENTRIES

    return ENTRIES


def find(name: str) -> EntrySpec:
    """The entry of that name.

    Raises:
        BuildError: there is none; the nearest names are suggested.
    """
    by_name = {spec.name: spec for spec in entries()}
    if name not in by_name:
        near = difflib.get_close_matches(name, by_name, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known entries: {', '.join(by_name)}"
        raise BuildError(f"unknown entry `{name}`", hint=hint)
    return by_name[name]


def _rows_states(sizes: Sizes) -> tuple[StateSpec, ...]:
    config = sizes.config
    shape = (sizes.batch, config.num_kv_heads, sizes.max_seq, config.head_dim)
    return tuple(
        StateSpec(f"cache.{layer}.{part}", sizes.dtype, shape)
        for layer in range(config.num_layers)
        for part in ("key", "value")
    )
