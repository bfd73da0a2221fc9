"""JSON read strictly: one object, UTF-8, no duplicate keys, every complaint with its place."""

from __future__ import annotations

import json
from typing import Any

from llama_artifacts.errors import LlamaExportError

MAX_SHOWN_CHARS = 120


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
