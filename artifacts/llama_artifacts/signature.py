"""How a program is called: tensors, states and dimensions, and the check of a call against them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from llama_artifacts.dtypes import DTypeName, from_name
from llama_artifacts.errors import InputError
from llama_artifacts.limits import (
    MAX_INTEGER,
    AtLeast,
    AtMostItems,
    Count,
    DimName,
    DimSize,
    Matches,
    check_fields,
)
from llama_artifacts.strict_json import shown

MAX_RANK = 8
Shape = Annotated[tuple[Count | DimSize, ...], AtMostItems(MAX_RANK)]
"""A size per axis: a number, the name of a dynamic dimension or, in outputs, a multiple: `2*Rows`."""

TensorName = Annotated[str, Matches(r".+", "a name")]


def parts(size: str) -> tuple[int, str]:
    """The factor and the dimension of a size: 1 and `S` of `S`, 2 and `Rows` of `2*Rows`."""
    factor, star, name = size.partition("*")
    return (int(factor), name) if star and factor.isdecimal() and int(factor) else (1, size)


def resolve(shape: Shape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape in a call where dimensions have these sizes."""
    resolved = []
    for size in shape:
        factor, name = (1, "") if isinstance(size, int) else parts(size)
        resolved.append(size if isinstance(size, int) else factor * sizes[name])
    return tuple(resolved)


@dataclass(frozen=True)
class Dim:
    """A dynamic dimension; a call may choose any size from `min` to `max`, both included."""

    name: DimName
    min: Count
    max: Count

    def __post_init__(self) -> None:
        check_fields(self)
        if self.min > self.max:
            raise ValueError(f"expected min <= max for `{self.name}`, got {self.min}, {self.max}")


@dataclass(frozen=True)
class Bounds:
    """The values an integer input may hold.

    Attributes:
        min: the smallest.
        max: the largest.
        span: a dimension; value + size - 1 must not exceed `max`: the input is the first of so
            many positions.
        dim: a dimension; value must not exceed scale * size + offset either, such as an index
            into an axis of the call.
        scale: see `dim`.
        offset: see `dim`.
    """

    min: Annotated[int, AtLeast(-1)]
    max: int
    span: DimName | None = None
    dim: DimName | None = None
    scale: Count = 1
    offset: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.min > self.max:
            raise ValueError(f"expected min <= max, got {self.min}, {self.max}")

    @property
    def dims(self) -> tuple[str, ...]:
        """The dimensions that the bounds depend on."""
        return tuple(name for name in (self.span, self.dim) if name is not None)

    def largest(self, sizes: Mapping[str, int]) -> int:
        """The largest value in a call of these sizes, `span` aside."""
        if self.dim is None:
            return self.max
        return min(self.max, self.scale * sizes[self.dim] + self.offset)


@dataclass(frozen=True)
class TensorSpec:
    """One input or output."""

    name: TensorName
    dtype: DTypeName
    shape: Shape
    values: Bounds | None = None

    def __post_init__(self) -> None:
        _check_spec(self)


@dataclass(frozen=True)
class StateSpec:
    """One tensor that a program reads and writes in place; zeros when new.

    A pool of pages has a dynamic dimension, which is chosen when the state is made.
    """

    name: TensorName
    dtype: DTypeName
    shape: Shape

    def __post_init__(self) -> None:
        _check_spec(self)

    @property
    def num_bytes(self) -> int:
        """Size of the state in bytes, of one page where it is a pool."""
        fixed = [size for size in self.shape if isinstance(size, int)]
        return math.prod(fixed) * from_name(self.dtype).num_bytes


@dataclass(frozen=True)
class Signature:
    """The whole interface of a program.

    The flat order of a call is inputs, then states, each in the order given here; the flat order
    of the results is that of `outputs`.
    """

    inputs: tuple[TensorSpec, ...]
    states: tuple[StateSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...]

    def __post_init__(self) -> None:
        called = [spec.name for spec in self.inputs] + [spec.name for spec in self.states]
        for kind, names in (
            ("input or state", called),
            ("output", [spec.name for spec in self.outputs]),
            ("dimension", [dim.name for dim in self.dims]),
        ):
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise ValueError(f"expected distinct {kind} names, got {shown(twice[0])} twice")
        if not self.outputs:
            raise ValueError("expected at least one output")
        self._check_dims()

    def _check_dims(self) -> None:
        called: tuple[TensorSpec | StateSpec, ...] = (*self.inputs, *self.states)
        uses = [(spec.name, size) for spec in called for size in spec.shape]
        known, bound = {dim.name for dim in self.dims}, {size for _, size in uses}
        for spec in (*self.inputs, *self.outputs):
            uses += [(spec.name, dim) for dim in (spec.values.dims if spec.values else ())]
        for spec in self.outputs:
            uses += [(spec.name, parts(s)[1]) for s in spec.shape if isinstance(s, str)]
        for name, size in uses:
            if isinstance(size, str) and size not in known:
                raise ValueError(f"`{name}` has the undeclared dimension {shown(size)}")
            if isinstance(size, str) and size not in bound:
                raise ValueError(f"`{name}` has the dimension `{size}` of no input")

    @property
    def state_bytes(self) -> int:
        """Size of one set of states in bytes, with pools of one page."""
        return sum(spec.num_bytes for spec in self.states)

    def dim(self, name: str) -> Dim:
        """The dynamic dimension of that name.

        Raises:
            KeyError: there is none.
        """
        for dim in self.dims:
            if dim.name == name:
                return dim
        raise KeyError(name)

    def bind(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The size of each dimension in a call with inputs of these shapes.

        Raises:
            InputError: an input is missing or unknown, has another rank or size than declared, or
                a dimension is out of its range or has two sizes.
        """
        _check_names([spec.name for spec in self.inputs], list(shapes))
        sizes: dict[str, int] = {}
        for spec in self.inputs:
            self._bind_one(spec, shapes[spec.name], sizes)
        return sizes

    def _bind_one(self, spec: TensorSpec, shape: Sequence[int], sizes: dict[str, int]) -> None:
        if len(shape) != len(spec.shape):
            raise InputError(
                f"expected shape {show(spec.shape)}, got {show(shape)}", where=spec.name
            )
        for declared, size in zip(spec.shape, shape, strict=True):
            if isinstance(declared, int):
                if declared != size:
                    message = f"expected shape {show(spec.shape)}, got {show(shape)}"
                    raise InputError(message, where=spec.name)
            elif sizes.setdefault(declared, size) != size:
                message = f"expected {declared} = {sizes[declared]} as in other inputs, got {size}"
                raise InputError(message, where=spec.name)
            else:
                dim = self.dim(declared)
                if not dim.min <= size <= dim.max:
                    message = f"expected {dim.name} from {dim.min} to {dim.max}, got {size}"
                    raise InputError(message, where=spec.name)


def check_values(spec: TensorSpec, smallest: int, largest: int, sizes: Mapping[str, int]) -> None:
    """Refuses integer inputs that are out of their bounds, such as a position past the capacity.

    Raises:
        InputError: a value is too small or too large.
    """
    bounds = spec.values
    if bounds is None:
        return
    if smallest < bounds.min:
        raise InputError(f"expected at least {bounds.min}, got {smallest}", where=spec.name)
    if bounds.span is None:
        allowed = bounds.largest(sizes)
        if largest > allowed:
            raise InputError(f"expected at most {allowed}, got {largest}", where=spec.name)
    elif largest + sizes[bounds.span] - 1 > bounds.max:
        raise InputError(
            f"expected {spec.name} + {bounds.span} - 1 at most {bounds.max}, "
            f"got {largest} + {sizes[bounds.span]} - 1",
            where=spec.name,
        )


def show(shape: Sequence[int | str]) -> str:
    """A shape as `[2, S]`."""
    return f"[{', '.join(map(str, shape))}]"


def _check_names(expected: list[str], given: list[str]) -> None:
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    if missing or unknown:
        raise InputError(
            f"expected the inputs {', '.join(expected)}; "
            + "; ".join(
                f"{kind}: {', '.join(names)}"
                for kind, names in (("missing", missing), ("unknown", unknown))
                if names
            )
        )


def _check_spec(spec: TensorSpec | StateSpec) -> None:
    check_fields(spec)
    fixed = [size for size in spec.shape if isinstance(size, int)]
    if math.prod(fixed) * from_name(spec.dtype).num_bytes > MAX_INTEGER:
        raise ValueError(f"`{spec.name}` of shape {show(spec.shape)} is larger than any memory")
