"""What a field may hold, declared in its type: checked by the reader, told by the schema.

A limit stands in `Annotated[...]` beside the type. `codec.decode` holds every value against it with
its key path, `check_fields` does so for objects made in code, and `schema` writes it down.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints

from llama_artifacts.strict_json import shown

MAX_INTEGER = 2**63 - 1


class Limit(Protocol):
    """One thing that a value must meet."""

    def complaint(self, value: Any) -> str | None:
        """What is wrong with the value, or None."""
        ...

    def schema(self) -> dict[str, Any]:
        """The same in the words of JSON Schema."""
        ...


@dataclass(frozen=True)
class AtLeast:
    """An integer that is not smaller."""

    smallest: int

    def complaint(self, value: int) -> str | None:
        if value >= self.smallest:
            return None
        return f"expected at least {self.smallest}, got {value}"

    def schema(self) -> dict[str, Any]:
        return {"minimum": self.smallest}


@dataclass(frozen=True)
class Matches:
    """Text that a regular expression matches as a whole; `what` says so in words."""

    pattern: str
    what: str

    def complaint(self, value: str) -> str | None:
        if re.fullmatch(self.pattern, value):
            return None
        return f"expected {self.what}, got {shown(value)}"

    def schema(self) -> dict[str, Any]:
        return {"pattern": f"^{self.pattern}$"}


@dataclass(frozen=True)
class AtMostItems:
    """A list that is not longer."""

    largest: int

    def complaint(self, value: tuple[Any, ...]) -> str | None:
        if len(value) <= self.largest:
            return None
        return f"expected at most {self.largest} items, got {len(value)}"

    def schema(self) -> dict[str, Any]:
        return {"maxItems": self.largest}


_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,99}"

Size = Annotated[int, AtLeast(0)]
Count = Annotated[int, AtLeast(1)]
Sha256 = Annotated[str, Matches(r"[0-9a-f]{64}", "64 hexadecimal digits")]
FileName = Annotated[str, Matches(r"[A-Za-z0-9][A-Za-z0-9._<>+=,-]{0,199}", "a plain file name")]
"""No slash and no dot in front, so that a listed file lies beside the manifest."""
DimName = Annotated[str, Matches(_NAME, "an identifier")]
DimSize = Annotated[str, Matches(rf"([1-9][0-9]{{0,8}}\*)?{_NAME}", "a dimension such as `S`")]
EntryName = Annotated[
    str, Matches(rf"{_NAME}(<[1-9][0-9]{{0,8}}>)?", "an entry such as `decode` or `generate<32>`")
]


def split(kind: Any) -> tuple[Any, tuple[Limit, ...]]:
    """A type without its limits, and the limits."""
    if get_origin(kind) is not Annotated:
        return kind, ()
    bare, *limits = get_args(kind)
    return bare, tuple(limits)


def complaint(limits: Iterable[Limit], value: Any) -> str | None:
    """The first thing that is wrong with a value, or None."""
    return next(filter(None, (limit.complaint(value) for limit in limits)), None)


@functools.cache
def hints(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, with their limits."""
    return get_type_hints(kind, include_extras=True)


def check_fields(instance: Any) -> None:
    """Holds every field of a dataclass against the limits in its type.

    Raises:
        ValueError: with the field's name and what is wrong with it.
    """
    kind: Any = type(instance)
    kinds = hints(kind)
    for field in dataclasses.fields(instance):
        for found in _complaints(kinds[field.name], getattr(instance, field.name)):
            raise ValueError(f"`{field.name}`: {found}")


def _complaints(kind: Any, value: Any) -> Iterator[str]:
    bare, limits = split(kind)
    if limits and (found := complaint(limits, value)) is not None:
        yield found
    arguments = get_args(bare)
    if isinstance(value, tuple):
        for item in value:
            yield from _complaints(arguments[0], item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _complaints(arguments[0], key)
            yield from _complaints(arguments[1], item)
    elif value is not None:
        for choice in arguments:
            bare_choice, _ = split(choice)
            if isinstance(bare_choice, type) and isinstance(value, bare_choice):
                yield from _complaints(choice, value)
