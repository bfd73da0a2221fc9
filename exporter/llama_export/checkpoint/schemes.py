"""How a checkpoint's config.json says that its linear layers are quantised, and how to refuse it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llama_artifacts.errors import CheckpointError
from llama_artifacts.strict_json import printable, shown
from llama_export.checkpoint.fields import Fields
from llama_export.checkpoint.refusals import is_neutral

LINEAR = "Linear"
"""The target that stands for every linear layer."""
PATTERN = "re:"
"""Begins a target that is a regular expression."""
SUPPORTED = (
    "gptq, awq, compressed-tensors pack-quantized, compressed-tensors float-quantized (FP8 dynamic)"
)

_HINT = "use the unquantised or FP8-dynamic checkpoint of the same model, or a GGUF file"

Form = Literal["gptq", "awq", "pack-quantized"]
"""Whose way it is to put several codes into an int32."""


@dataclass(frozen=True)
class Scheme:
    """Which linear layers a checkpoint stores quantised.

    Attributes:
        targets: `Linear` for all of them, names of modules, or `re:` and a pattern that a name
            begins with.
        ignore: the same; what it names is not quantised although it is a target.
    """

    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    def covers(self, module: str) -> bool:
        """Whether the linear layer of that name is quantised."""
        return _is_named(module, self.targets) and not _is_named(module, self.ignore)


@dataclass(frozen=True)
class Fp8Scheme(Scheme):
    """As E4M3 codes with a scale for each output row or for the whole tensor."""


@dataclass(frozen=True)
class PackedScheme(Scheme):
    """As integer codes q, several in an int32: (q - zero) * scale for each group of a row.

    Attributes:
        form: whose way of packing.
        bits: of a code, 4 or 8.
        group_size: values of a row that share a scale and a zero; None: the whole row.
        is_symmetric: zeros are all half of the codes' range.
        is_ordered: groups are of any columns, as a tensor says (activation order); else of adjacent ones.
        zero_offset: what is taken off zeros before they are stored.
        has_borrows: it was taken off whole int32, so that a zero of 0 borrows from its neighbour.
    """

    form: Form
    bits: int
    group_size: int | None
    is_symmetric: bool
    is_ordered: bool = False
    zero_offset: int = 0
    has_borrows: bool = False

    @property
    def title(self) -> str:
        """For people: `gptq, 4 bits, groups of 128, in activation order`."""
        size = "one group a row" if self.group_size is None else f"groups of {self.group_size}"
        order = ", in activation order" if self.is_ordered else ""
        return f"{self.form}, {self.bits} bits, {size}{order}"


def check(fields: Fields, taken: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses values other than those that are taken, the first of which stands for an absent one.

    Raises:
        CheckpointError: names the key.
    """
    for key, values in taken.items():
        value = fields.values.get(key, values[0])
        if value is None and None not in values:
            value = values[0]
        if value is not None and not is_neutral(value, values):
            raise refused(fields, key, value)


def names(fields: Fields, key: str) -> tuple[str, ...]:
    """A list of names of modules, and of patterns.

    Raises:
        CheckpointError: it is none, or a pattern is no regular expression.
    """
    value = fields.values.get(key)
    found = [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise fields.fail(key, "a list of names")
    for name in found:
        if name.startswith(PATTERN):
            try:
                re.compile(name.removeprefix(PATTERN))
            except re.error as cause:
                message = f"{shown(name)} is no regular expression: {cause}"
                raise CheckpointError(message, where=fields.place(key)) from cause
    return tuple(found)


def refused(fields: Fields, key: str, value: object) -> CheckpointError:
    """The error for a key's value."""
    return unsupported(fields, key, f"config key '{fields.prefix}{key}' = {printable(value)}")


def unsupported(fields: Fields, key: str, what: str) -> CheckpointError:
    """The error for what a key says."""
    message = f"{what} is not supported; supported: {SUPPORTED}"
    return CheckpointError(message, where=fields.place(key), hint=_HINT)


def _is_named(module: str, targets: tuple[str, ...]) -> bool:
    for name in targets:
        if name in (LINEAR, module):
            return True
        if name.startswith(PATTERN) and re.match(name.removeprefix(PATTERN), module):
            return True
    return False
