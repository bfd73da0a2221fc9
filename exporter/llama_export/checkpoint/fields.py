"""Typed reading of one JSON object: every value checked, every complaint with its key path."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llama_artifacts.errors import CheckpointError
from llama_artifacts.strict_json import json_type, shown

MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True)
class Fields:
    """A JSON object and where it stands; an absent key and null both read as None.

    Attributes:
        values: the object.
        where: the file.
        prefix: the key path of the object within the file, with its dot; empty at the top.
    """

    values: Mapping[str, Any]
    where: str
    prefix: str = ""

    def place(self, key: str) -> str:
        """The file and key path of one key."""
        return f"{self.where}#{self.prefix}{key}"

    def fail(self, key: str, expected: str, *, hint: str | None = None) -> CheckpointError:
        """The error for a value that is not what was expected."""
        value = self.values.get(key)
        message = f"expected {self.prefix}{key} as {expected}, got {shown(value)}"
        if isinstance(value, str) or value is None:
            message += f" ({json_type(value)})"
        return CheckpointError(message, where=self.place(key), hint=hint)

    def integer(self, key: str) -> int | None:
        """A positive integer that fits 31 bits."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_INTEGER:
            raise self.fail(key, "a positive integer")
        return value

    def required_integer(self, key: str, *, hint: str | None = None) -> int:
        """A positive integer that must be there."""
        value = self.integer(key)
        if value is None:
            raise self.fail(key, "a positive integer", hint=hint)
        return value

    def number(self, key: str) -> float | None:
        """A finite positive number, as a float."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, "a positive number")
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if not math.isfinite(result) or result <= 0:
            raise self.fail(key, "a positive number")
        return result

    def required_number(self, key: str) -> float:
        """A finite positive number that must be there."""
        value = self.number(key)
        if value is None:
            raise self.fail(key, "a positive number")
        return value

    def boolean(self, key: str) -> bool | None:
        """True or false; integers are not taken for booleans."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, "a string")
        return value

    def nested(self, key: str) -> Fields | None:
        """An object within this one."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return Fields(value, self.where, f"{self.prefix}{key}.")
