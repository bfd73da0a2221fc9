"""Metadata of a GGUF file by key, each value checked for its kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeGuard, TypeVar

from llama_artifacts.errors import CheckpointError, LlamaExportError
from llama_artifacts.strict_json import shown
from llama_export.checkpoint.gguf_header import Value, place

T = TypeVar("T")

MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True)
class Metadata:
    """The entries of one file; every complaint names the file and the key.

    A getter returns its default where the key is absent, and refuses an absent key without one.
    """

    path: Path
    values: Mapping[str, Value]
    error: type[LlamaExportError] = CheckpointError

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fail(self, key: str, message: str, *, hint: str) -> NoReturn:
        """Raise an error about one key."""
        raise self.error(message, where=place(self.path, key), hint=hint)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0) -> int:
        """An integer from `minimum` to 2^31 - 1."""
        value = self._get(key, default)
        if _is_number(value) and isinstance(value, int) and minimum <= value <= MAX_INTEGER:
            return value
        self._wrong(key, f"an integer from {minimum} to {MAX_INTEGER}", value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._get(key, default)
        if _is_number(value) and math.isfinite(value) and value > 0:
            return float(value)
        self._wrong(key, "a number above zero", value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if isinstance(value, bool):
            return value
        self._wrong(key, "a boolean", value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if isinstance(value, str):
            return value
        self._wrong(key, "a string", value)

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        return self._items(key, str, "a list of strings")

    def integers(self, key: str) -> list[int]:
        """A list of integers."""
        return self._items(key, int, "a list of integers")

    def _get(self, key: str, default: Value | None) -> Value:
        value = self.values.get(key, default)
        if value is None:
            self.fail(key, f"{key} is missing", hint="convert the model with a newer converter")
        return value

    def _items(self, key: str, kind: type[T], what: str) -> list[T]:
        value = self._get(key, None)
        if isinstance(value, list):
            items: list[T] = [item for item in value if type(item) is kind]  # no bool as an int
            if len(items) == len(value):
                return items
        self._wrong(key, what, value)

    def _wrong(self, key: str, expected: str, value: Value) -> NoReturn:
        got = f"a list of {len(value)}" if isinstance(value, list) else shown(value)
        self.fail(key, f"{key} must be {expected}, got {got}", hint="convert the model again")


def _is_number(value: Value) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
