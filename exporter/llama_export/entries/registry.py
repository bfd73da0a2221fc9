"""Entries: what a program of each name takes, keeps and gives, before any size is known.

Fixed sizes are spelled `Batch`, `MaxSeq`, `PageSize`, `MaxRows`, `MaxPages`, `V`, `H` and, in the
entries that generate, `Steps` or `MaxNew`; every other name in a shape is a dynamic dimension, which
a variant may fix. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from llama_artifacts.errors import BuildError
from llama_artifacts.manifest import file_stem
from llama_artifacts.signature import (
    Bounds,
    Dim,
    Shape,
    Signature,
    StateSpec,
    TensorSpec,
    parts,
)
from llama_export.checkpoint.config import LlamaConfig

COMPUTE_DTYPE = "T"
"""Stands for the compute dtype in declarations."""

POOL_PAGES = "PoolPages"
"""The dimension of a pool: how many pages it holds, page 0 among them."""

DEFAULT_ROWS = 64
DEFAULT_PAGE_SIZE = 16
DEFAULT_STEPS = 32
DEFAULT_MAX_NEW = 128

_COUNTED = re.compile(r"([a-z_]+)<([A-Za-z]+|[1-9][0-9]{0,8})>")


@dataclass(frozen=True)
class Sizes:
    """What a build fixes: the network, the sizes of its states, the compute dtype.

    Attributes:
        config: the network.
        batch: rows of the `rows` states.
        max_seq: positions of a `rows` state, the last of which is scratch.
        dtype: the compute dtype.
        page_size: positions of a page.
        max_rows: most rows of a call of the paged entries.
        max_pages: most pages of a row; None: as many as `max_seq` positions fill.
        steps: tokens that `generate` and `sample` give; None: the default, or what fits.
        max_new: most tokens that `generate_until` gives; None: as `steps`.
    """

    config: LlamaConfig
    batch: int
    max_seq: int
    dtype: str
    page_size: int = DEFAULT_PAGE_SIZE
    max_rows: int = DEFAULT_ROWS
    max_pages: int | None = None
    steps: int | None = None
    max_new: int | None = None

    def shard(self, num_shards: int) -> Sizes:
        """The sizes of one of several processes, whose states hold its own heads."""
        heads = self.config.num_kv_heads // num_shards
        return replace(self, config=replace(self.config, num_kv_heads=heads))

    def named(self) -> dict[str, int]:
        """The fixed sizes by the names that declarations use."""
        return {
            "Batch": self.batch,
            "MaxSeq": self.max_seq,
            "PageSize": self.page_size,
            "MaxRows": self.max_rows,
            "MaxPages": self.max_pages or -(-self.max_seq // self.page_size),
            "V": self.config.vocab_size,
            "H": self.config.hidden_size,
            "Steps": self.steps or min(DEFAULT_STEPS, self.max_seq - 1),
            "MaxNew": self.max_new or min(DEFAULT_MAX_NEW, self.max_seq - 1),
        }


@dataclass(frozen=True)
class Values:
    """Bounds of an integer input: from `min` to a size plus an offset.

    Attributes:
        size: a fixed size, a dimension of the call, or a number.
        offset: what is added to the size.
        less: a fixed size that is taken off, or None.
        span: see `Bounds.span`.
        min: the smallest value.
        scale: a fixed size by which a dimension is multiplied, or None.
    """

    size: str | int
    offset: int = -1
    less: str | None = None
    span: str | None = None
    min: int = 0
    scale: str | None = None

    def resolve(self, named: Mapping[str, int], dims: Mapping[str, Dim]) -> Bounds:
        """The bounds as numbers."""
        scale = 1 if self.scale is None else named[self.scale]
        offset = self.offset - (0 if self.less is None else named[self.less])
        if isinstance(self.size, int):
            return Bounds(self.min, scale * self.size + offset, self.span)
        if self.size in named:
            largest = scale * named[self.size] + offset
            if self.span is not None and self.span in named:
                return Bounds(self.min, largest - named[self.span] + 1)
            return Bounds(self.min, largest, self.span)
        largest = scale * dims[self.size].max + offset
        return Bounds(self.min, largest, None, self.size, scale, offset)


@dataclass(frozen=True)
class Tensor:
    """One declared input or output."""

    name: str
    dtype: str
    shape: Shape
    values: Values | None = None

    def resolve(self, dtype: str, named: Mapping[str, int], dims: Mapping[str, Dim]) -> TensorSpec:
        """The tensor with every fixed size as a number, and `dtype` as the compute dtype."""
        return TensorSpec(
            self.name,
            dtype if self.dtype == COMPUTE_DTYPE else self.dtype,
            tuple(_resolved(size, named) for size in self.shape),
            None if self.values is None else self.values.resolve(named, dims),
        )


def _resolved(size: int | str, named: Mapping[str, int]) -> int | str:
    if isinstance(size, int):
        return size
    factor, name = parts(size)
    return factor * named[name] if name in named else size


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
        name: what users call it; `generate<Steps>` before a number of steps is chosen, then
            `generate<32>`.
        summary: one line on what it computes.
        inputs: tensors of a call, in order.
        states: a key and a value cache per layer, in `rows` or in the pages of a `pool`; None for
            no state.
        outputs: results, in order.
        dims: the dynamic dimensions.
        counts: the size that its name fixes, by the size's name.
    """

    name: str
    summary: str
    inputs: tuple[Tensor, ...]
    states: Literal["rows", "pool"] | None
    outputs: tuple[Tensor, ...]
    dims: tuple[Range, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The method of the model that computes it."""
        return self.name.partition("<")[0]

    @property
    def arguments(self) -> dict[str, int]:
        """What the method takes for the size that the name fixes: `{"steps": 32}`."""
        return {_ARGUMENTS[size]: count for size, count in self.counts.items()}

    @property
    def stem(self) -> str:
        """The name as part of a file name: `generate-32`."""
        return file_stem(self.name)

    def sized(self, sizes: Sizes) -> EntrySpec:
        """The entry with the number that its name leaves open, if it does.

        Raises:
            BuildError: more tokens than a state holds.
        """
        open_size = next(
            (size for size in _ARGUMENTS if self.name == f"{self.method}<{size}>"), None
        )
        spec = self if open_size is None else _counted(self, open_size, sizes.named()[open_size])
        for size, count in spec.counts.items():
            if count > sizes.max_seq - 1:
                raise BuildError(
                    f"{spec.name}: {size} = {count} tokens do not fit into {sizes.max_seq - 1} "
                    "positions",
                    hint="choose a larger --max-seq or fewer tokens",
                )
        return spec

    def signature(self, sizes: Sizes, variant: Mapping[str, int] | None = None) -> Signature:
        """The declared signature for these sizes.

        Args:
            sizes: what the build fixes.
            variant: dynamic dimensions that are fixed too, by name.

        Raises:
            BuildError: the variant fixes what is no dimension of the entry, or out of its range.
        """
        fixed = dict(variant or {})
        ranges = {dim.name: dim.resolve(sizes) for dim in self.dims}
        for name, size in fixed.items():
            self._check_variant(name, size, ranges)
        dims = {name: dim for name, dim in ranges.items() if name not in fixed}
        named = {**sizes.named(), **self.counts, **fixed}
        return Signature(
            inputs=tuple(tensor.resolve(sizes.dtype, named, dims) for tensor in self.inputs),
            states=_states(self.states, sizes, fixed),
            outputs=tuple(tensor.resolve(sizes.dtype, named, dims) for tensor in self.outputs),
            dims=tuple(dims.values()),
        )

    def _check_variant(self, name: str, size: int, ranges: Mapping[str, Dim]) -> None:
        where = f"variant {self.name}:{name}={size}"
        if name not in ranges:
            known = ", ".join(ranges) or "none"
            message = f"`{self.name}` has no dynamic dimension `{name}`"
            raise BuildError(message, where=where, hint=f"it has {known}")
        dim = ranges[name]
        if not dim.min <= size <= dim.max:
            raise BuildError(
                f"expected {name} from {dim.min} to {dim.max}, got {size}", where=where
            )


_ARGUMENTS = {"Steps": "steps", "MaxNew": "max_new"}
"""Sizes that an entry's name can fix, and what the model's methods call them."""


def _counted(spec: EntrySpec, size: str, count: int) -> EntrySpec:
    return replace(spec, name=f"{spec.method}<{count}>", counts={size: count})


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
            spec = find(member)
            specs[spec.name] = spec
    return tuple(specs.values())


def groups() -> dict[str, tuple[str, ...]]:
    """Names that stand for several entries."""
    names = tuple(spec.name for spec in entries())
    return {
        "all": names,
        "serving": tuple(name for name in names if name.endswith("_paged")),
        "training": ("loss_packed", "log_probs_packed", "hidden_packed"),
        "generation": tuple(name for name in names if "<" in name),
    }


def find(name: str) -> EntrySpec:
    """The entry of that name; `generate` and `generate<Steps>` leave open what `generate<32>` fixes.

    Raises:
        BuildError: there is none; the nearest names are suggested.
    """
    by_name = {spec.name: spec for spec in entries()}
    by_method = {spec.method: spec for spec in entries()}
    if name in by_name or name in by_method:
        return by_name.get(name) or by_method[name]
    match = _COUNTED.fullmatch(name)
    spec = by_method.get(match[1]) if match else None
    if match and spec and "<" in spec.name and match[2].isdecimal():
        size = spec.name.partition("<")[2].removesuffix(">")
        return _counted(spec, size, int(match[2]))
    near = difflib.get_close_matches(name, [*by_name, *by_method, *groups()], n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known entries: {', '.join(by_name)}"
    raise BuildError(f"unknown entry `{name}`", hint=hint)


def _states(kind: str | None, sizes: Sizes, fixed: Mapping[str, int]) -> tuple[StateSpec, ...]:
    config = sizes.config
    num_pages = fixed.get(POOL_PAGES, POOL_PAGES)
    shapes: dict[str | None, Shape] = {
        "rows": (sizes.batch, config.num_kv_heads, sizes.max_seq, config.head_dim),
        "pool": (num_pages, config.num_kv_heads, sizes.page_size, config.head_dim),
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
