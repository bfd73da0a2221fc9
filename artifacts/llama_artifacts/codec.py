"""Frozen dataclasses to JSON values and back, strictly: every complaint carries the key path."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from llama_artifacts.errors import LlamaExportError, ManifestError
from llama_artifacts.strict_json import json_type, shown

T = TypeVar("T")
_SCALARS: dict[Any, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
}


def encode(value: Any) -> Any:
    """A JSON value of dataclasses, tuples, dicts and scalars. Fields that are None are kept."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


def decode(kind: type[T], value: object, *, where: str) -> T:
    """An instance of a dataclass from a JSON value.

    Args:
        kind: the dataclass; its fields are scalars, Literals, optional values, tuples, dicts with
            string keys, or dataclasses. Fields with a default may be absent.
        value: what `json.loads` gave.
        where: the file; key paths are appended after `#`.

    Raises:
        ManifestError: a key is missing or unknown, or a value has another type or is refused by
            the dataclass.
    """
    return _decode(kind, value, where, "")  # type: ignore[no-any-return]


def _decode(kind: Any, value: object, where: str, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where, path)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(kind, value, where, path)
    if origin is Literal:
        if value not in get_args(kind) or isinstance(value, bool):
            expected = ", ".join(shown(choice) for choice in get_args(kind))
            raise _error(f"expected one of {expected}, got {shown(value)}", where, path)
        return value
    if origin is tuple:
        items = _expect(list, "a list", value, where, path)
        item_kind = get_args(kind)[0]
        return tuple(_decode(item_kind, x, where, f"{path}[{i}]") for i, x in enumerate(items))
    if origin is dict:
        pairs = _expect(dict, "an object", value, where, path)
        item_kind = get_args(kind)[1]
        return {k: _decode(item_kind, x, where, _join(path, k)) for k, x in pairs.items()}
    return _decode_scalar(kind, value, where, path)


def _decode_dataclass(kind: Any, value: object, where: str, path: str) -> Any:
    pairs = _expect(dict, "an object", value, where, path)
    hints, fields = get_type_hints(kind), dataclasses.fields(kind)
    unknown = sorted(pairs.keys() - {f.name for f in fields})
    if unknown:
        raise _error("unknown key", where, _join(path, unknown[0]))
    arguments = {}
    for field in fields:
        if field.name in pairs:
            key_path = _join(path, field.name)
            arguments[field.name] = _decode(hints[field.name], pairs[field.name], where, key_path)
        elif field.default is dataclasses.MISSING:
            raise _error("missing key", where, _join(path, field.name))
    try:
        return kind(**arguments)
    except LlamaExportError as cause:
        raise _error(cause.message, where, path) from cause
    except ValueError as cause:
        raise _error(str(cause), where, path) from cause


def _decode_union(kind: Any, value: object, where: str, path: str) -> Any:
    choices = get_args(kind)
    if value is None and type(None) in choices:
        return None
    choices = tuple(choice for choice in choices if choice is not type(None))
    if len(choices) == 1:
        return _decode(choices[0], value, where, path)
    for choice in choices:  # several scalars: a size is a number or a name
        if type(value) is choice:
            return _decode_scalar(choice, value, where, path)
    expected = " or ".join(_SCALARS[choice] for choice in choices)
    raise _error(f"expected {expected}, got {json_type(value)}", where, path)


def _decode_scalar(kind: Any, value: object, where: str, path: str) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    _expect(kind, _SCALARS[kind], value, where, path)
    if isinstance(value, float) and not math.isfinite(value):
        raise _error(f"expected a finite number, got {shown(value)}", where, path)
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise _error("expected an integer of 64 bits", where, path)
    return value


def _expect(kind: Any, name: str, value: object, where: str, path: str) -> Any:
    if type(value) is not kind:
        raise _error(f"expected {name}, got {json_type(value)}", where, path)
    return value


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _error(message: str, where: str, path: str) -> ManifestError:
    return ManifestError(message, where=f"{where}#{path}" if path else where)
