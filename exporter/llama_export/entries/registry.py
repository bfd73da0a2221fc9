"""Entries: what a program of each name takes, keeps and gives, before any size is known.

Fixed sizes are spelled `Batch`, `MaxSeq`, `PageSize`, `MaxPages`, `V` and `H`; every other name in a
shape is a dynamic dimension. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llama_artifacts.errors import BuildError
from llama_artifacts.signature import Bounds, Dim, Shape, Signature, StateSpec, TensorSpec
from llama_export.checkpoint.config import LlamaConfig

COMPUTE_DTYPE = "T"
"""Stands for the compute dtype in declarations."""

POOL_PAGES = "PoolPages"
"""The dimension of a pool: how many pages it holds, page 0 among them."""


@dataclass(frozen=True)
class Sizes:
    """What a build fixes: the network, the sizes of its states, the compute dtype."""

    config: LlamaConfig
    batch: int
    max_seq: int
    dtype: str
    page_len: int = 16

    def named(self) -> dict[str, int]:
        """The fixed sizes by the names that declarations use."""
        return {
            "Batch": self.batch,
            "2*Batch": 2 * self.batch,
            "MaxSeq": self.max_seq,
            "PageSize": self.page_len,
            "MaxPages": -(-self.max_seq // self.page_len),
            "V": self.config.vocab_size,
            "H": self.config.hidden_size,
        }


@dataclass(frozen=True)
class Values:
    """Bounds of an integer input: from `min` to a size plus an offset.

    Attributes:
        size: a fixed size, or a dimension of the call.
        offset: what is added to the size.
        span: see `Bounds.span`.
        min: the smallest value.
        scale: a fixed size by which a dimension is multiplied, or None.
    """

    size: str
    offset: int = -1
    span: str | None = None
    min: int = 0
    scale: str | None = None

    def resolve(self, named: Mapping[str, int], dims: Mapping[str, Dim]) -> Bounds:
        """The bounds as numbers."""
        if self.size in named:
            return Bounds(self.min, named[self.size] + self.offset, self.span)
        scale = 1 if self.scale is None else named[self.scale]
        largest = scale * dims[self.size].max + self.offset
        return Bounds(self.min, largest, None, self.size, scale, self.offset)


@dataclass(frozen=True)
class Tensor:
    """One declared input or output."""

    name: str
    dtype: str
    shape: Shape
    values: Values | None = None

    def resolve(self, sizes: Sizes, dims: Mapping[str, Dim]) -> TensorSpec:
        """The tensor with every fixed size as a number."""
        named = sizes.named()
        shape = tuple(
            named.get(size, size) if isinstance(size, str) else size for size in self.shape
        )
        dtype = sizes.dtype if self.dtype == COMPUTE_DTYPE else self.dtype
        return TensorSpec(
            self.name,
            dtype,
            shape,
            None if self.values is None else self.values.resolve(named, dims),
        )


@dataclass(frozen=True)
class Range:
    """A declared dynamic dimension, from 1 to `max` and no further than a fixed size allows.

    Attributes:
        name: what shapes call it.
        max: the most, whatever is built.
        fits: a fixed size that it must not exceed, or None.
        offset: what is added to that size.
    """

    name: str
    max: int
    fits: str | None = None
    offset: int = 0

    def resolve(self, sizes: Sizes) -> Dim:
        """The dimension with its range as numbers."""
        if self.fits is None:
            return Dim(self.name, 1, self.max)
        return Dim(self.name, 1, min(self.max, sizes.named()[self.fits] + self.offset))


@dataclass(frozen=True)
class EntrySpec:
    """One entry.

    Attributes:
        name: what users call it; also the method of the model that computes it.
        summary: one line on what it computes.
        inputs: tensors of a call, in order.
        states: a key and a value cache per layer, in `rows` or in the pages of a `pool`; None for
            no state.
        outputs: results, in order.
        dims: the dynamic dimensions.
    """

    name: str
    summary: str
    inputs: tuple[Tensor, ...]
    states: Literal["rows", "pool"] | None
    outputs: tuple[Tensor, ...]
    dims: tuple[Range, ...] = ()

    def signature(self, sizes: Sizes) -> Signature:
        """The declared signature for these sizes."""
        dims = tuple(dim.resolve(sizes) for dim in self.dims)
        by_name = {dim.name: dim for dim in dims}
        return Signature(
            inputs=tuple(tensor.resolve(sizes, by_name) for tensor in self.inputs),
            states=_states(self.states, sizes),
            outputs=tuple(tensor.resolve(sizes, by_name) for tensor in self.outputs),
            dims=dims,
        )


def entries() -> tuple[EntrySpec, ...]:
    """Every entry, in the order of the documentation."""
    from llama_export.entries.llama import ENTRIES

    return ENTRIES


def expand(names: Sequence[str]) -> tuple[EntrySpec, ...]:
    """The entries of these names, each once; a group stands for its members.

    Raises:
        BuildError: a name is neither an entry nor a group; the nearest are suggested.
    """
    specs: dict[str, EntrySpec] = {}
    for name in names:
        for member in groups().get(name, (name,)):
            specs[member] = find(member)
    return tuple(specs.values())


def groups() -> dict[str, tuple[str, ...]]:
    """Names that stand for several entries."""
    names = tuple(spec.name for spec in entries())
    return {
        "all": names,
        "serving": tuple(name for name in names if name.endswith("_paged")),
        "training": ("loss_packed", "log_probs_packed", "hidden_packed"),
    }


def find(name: str) -> EntrySpec:
    """The entry of that name.

    Raises:
        BuildError: there is none; the nearest names are suggested.
    """
    by_name = {spec.name: spec for spec in entries()}
    if name not in by_name:
        near = difflib.get_close_matches(name, [*by_name, *groups()], n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known entries: {', '.join(by_name)}"
        raise BuildError(f"unknown entry `{name}`", hint=hint)
    return by_name[name]


def _states(kind: str | None, sizes: Sizes) -> tuple[StateSpec, ...]:
    config = sizes.config
    shapes: dict[str | None, Shape] = {
        "rows": (sizes.batch, config.num_kv_heads, sizes.max_seq, config.head_dim),
        "pool": (POOL_PAGES, config.num_kv_heads, sizes.page_len, config.head_dim),
    }
    if kind is None:
        return ()
    return tuple(
        StateSpec(
            f"{'cache' if kind == 'rows' else 'pool'}.{layer}.{part}", sizes.dtype, shapes[kind]
        )
        for layer in range(config.num_layers)
        for part in ("key", "value")
    )
