"""JSON read strictly: one object, UTF-8, no duplicate keys, every complaint with its place."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from llama_artifacts.errors import LlamaExportError

MAX_SHOWN_CHARS = 120
MAX_DEPTH = 32
"""Levels of objects and lists in a manifest or weights header."""
MAX_VALUES = 2**20
"""Commas and opening brackets in one, which bound what it takes in memory."""


class _DuplicateKeyError(ValueError):
    pass


def parse_object(data: bytes, *, where: object, error: type[LlamaExportError]) -> dict[str, Any]:
    """One JSON object from UTF-8 bytes.

    NaN and infinities are let through as floats, so that the reader of the field can name it.

    Raises:
        error: not UTF-8, not JSON, nested too deeply, a duplicate key, or not an object.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_pairs)
    except UnicodeDecodeError as cause:
        raise error(
            f"expected UTF-8 text, got byte {cause.start}: {cause.reason}", where=where
        ) from cause
    except _DuplicateKeyError as cause:
        raise error(f"duplicate JSON key {shown(str(cause))}", where=where) from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"expected valid JSON: {cause}", where=where) from cause
    if not isinstance(value, dict):
        raise error(f"expected a JSON object, got {json_type(value)}", where=where)
    return value


def parse_bounded(data: bytes, *, where: object, error: type[LlamaExportError]) -> dict[str, Any]:
    """One JSON object as `parse_object` reads it, of bounded size and depth and finite numbers.

    Raises:
        error: also more than `MAX_VALUES` values, deeper than `MAX_DEPTH`, NaN or an infinity.
    """
    num_values = sum(map(data.count, (b",", b"[", b"{")))
    if num_values > MAX_VALUES:
        raise error(f"expected at most {MAX_VALUES:,} values, got {num_values:,}", where=where)
    value = parse_object(data, where=where, error=error)
    for path, complaint in _unfit(value, "", 1):
        raise error(complaint, where=f"{where}#{path}")
    return value


def join(path: str, key: str) -> str:
    """The key path of a member."""
    return f"{path}.{printable(key)}" if path else printable(key)


def json_type(value: object) -> str:
    """How JSON calls the type of a value, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def printable(value: object) -> str:
    """A value as short text in which control characters and lone surrogates are escaped."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def shown(value: object) -> str:
    """A value in backticks, printable, short enough for a one-line message."""
    return f"`{printable(value)}`"


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _DuplicateKeyError(key)
        result[key] = value
    return result


def _unfit(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Key paths of what no bounded JSON may hold, and why."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, f"expected a finite number, got {shown(value)}"
    elif isinstance(value, (dict, list)) and depth > MAX_DEPTH:
        yield path, f"expected at most {MAX_DEPTH} levels of objects and lists"
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, (float, dict, list)):
                yield from _unfit(item, join(path, key), depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, (float, dict, list)):
                yield from _unfit(item, f"{path}[{index}]", depth + 1)
