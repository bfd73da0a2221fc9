"""The manifest's JSON Schema, written from the dataclasses and the limits in their types."""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from typing import Any, Literal, Union, get_args, get_origin

from llama_artifacts import codec
from llama_artifacts.limits import MAX_INTEGER, hints, split
from llama_artifacts.manifest import SCHEMA_MAJOR, SCHEMA_MINOR, Manifest

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEXT = {
    "type": "string",
    "maxLength": codec.MAX_TEXT_CHARS,
    "pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$",
}
_SCALARS: dict[Any, dict[str, Any]] = {
    str: _TEXT,
    int: {"type": "integer", "minimum": -MAX_INTEGER - 1, "maximum": MAX_INTEGER},
    float: {"type": "number"},
    bool: {"type": "boolean"},
}


def manifest_schema() -> dict[str, Any]:
    """The schema of a manifest of this version.

    It holds what one value can be held to alone. What ties values together (a program's file is
    listed, dimensions are declared, `min <= max`, ...) is the format's text.
    """
    definitions: dict[str, Any] = {}
    root = _dataclass(Manifest, definitions)
    return {
        "$schema": DIALECT,
        "title": f"llama-export bundle manifest {SCHEMA_MAJOR}.{SCHEMA_MINOR}",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def to_json() -> bytes:
    """The schema as it is kept in a file."""
    return (json.dumps(manifest_schema(), indent=2, ensure_ascii=True) + "\n").encode()


def _dataclass(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    kinds = hints(kind)
    properties, required = {}, []
    for field in dataclasses.fields(kind):
        properties[field.name] = _value(kinds[field.name], definitions)
        if field.default is field.default_factory is dataclasses.MISSING:
            required.append(field.name)
    return {
        "description": (inspect.getdoc(kind) or "").partition("\n")[0],
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _value(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    bare, limits = split(kind)
    schema = _bare(bare, definitions)
    for limit in limits:
        schema = {**schema, **limit.schema()}
    return schema


def _bare(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if dataclasses.is_dataclass(kind):
        name = getattr(kind, "__name__", str(kind))
        if name not in definitions:
            definitions[name] = {}  # taken, should it contain itself
            definitions[name] = _dataclass(kind, definitions)
        return {"$ref": f"#/$defs/{name}"}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_value(choice, definitions) for choice in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _value(arguments[0], definitions)}
    if origin is dict:
        return {
            "type": "object",
            "propertyNames": _value(arguments[0], definitions),
            "additionalProperties": _value(arguments[1], definitions),
        }
    return {"type": "null"} if kind is type(None) else dict(_SCALARS[kind])
