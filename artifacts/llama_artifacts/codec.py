"""Frozen dataclasses to JSON values and back, strictly: every complaint carries the key path."""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from llama_artifacts.errors import LlamaExportError, ManifestError
from llama_artifacts.limits import complaint, hints, split
from llama_artifacts.strict_json import join, json_type, shown

T = TypeVar("T")
MAX_TEXT_CHARS = 1000
_SCALARS: dict[Any, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
}
_UNFIT_FOR_TEXT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def encode(value: Any) -> Any:
    """A JSON value of dataclasses, tuples, dicts and scalars. Fields that are None are kept.

    Equal values give the same JSON: a whole number is written without a fraction.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    return value


def decode(kind: type[T], value: object, *, where: str, ignored: list[str] | None = None) -> T:
    """An instance of a dataclass from a JSON value.

    Strings and keys are of at most `MAX_TEXT_CHARS` characters, none of which is a control
    character or a lone surrogate: they can be printed and written as they are.

    Args:
        kind: the dataclass; its fields are scalars, Literals, optional values, tuples, dicts with
            string keys, or dataclasses, with the limits of `llama_artifacts.limits`. Fields with
            a default may be absent.
        value: what `json.loads` gave.
        where: the file; key paths are appended after `#`.
        ignored: None to refuse unknown keys; a list takes their paths instead.

    Raises:
        ManifestError: a key is missing or unknown, or a value has another type, breaks a limit or
            is refused by the dataclass.
    """
    result: T = _Decoder(where, ignored).any(kind, value, "")
    return result


@dataclasses.dataclass(frozen=True)
class _Decoder:
    where: str
    ignored: list[str] | None

    def any(self, kind: Any, value: object, path: str) -> Any:
        bare, limits = split(kind)
        result = self._bare(bare, value, path)
        if limits and (found := complaint(limits, result)) is not None:
            raise self._error(found, path)
        return result

    def _bare(self, kind: Any, value: object, path: str) -> Any:
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind, value, path)
        origin = get_origin(kind)
        if origin in (Union, types.UnionType):
            return self._union(kind, value, path)
        if origin is Literal:
            return self._literal(get_args(kind), value, path)
        if origin is tuple:
            items = self._expect(list, "a list", value, path)
            item_kind = get_args(kind)[0]
            return tuple(self.any(item_kind, x, f"{path}[{i}]") for i, x in enumerate(items))
        if origin is dict:
            pairs = self._expect(dict, "an object", value, path)
            key_kind, item_kind = get_args(kind)
            return {
                self.any(key_kind, k, join(path, k)): self.any(item_kind, x, join(path, k))
                for k, x in pairs.items()
            }
        return self._scalar(kind, value, path)

    def _dataclass(self, kind: Any, value: object, path: str) -> Any:
        pairs = self._expect(dict, "an object", value, path)
        kinds = hints(kind)
        for key in sorted(pairs.keys() - kinds.keys()):
            if self.ignored is None:
                raise self._error("unknown key", join(path, key))
            self.ignored.append(join(path, key))
        arguments = {}
        for field in dataclasses.fields(kind):
            key_path = join(path, field.name)
            if field.name in pairs:
                arguments[field.name] = self.any(kinds[field.name], pairs[field.name], key_path)
            elif field.default is field.default_factory is dataclasses.MISSING:
                raise self._error("missing key", key_path)
        try:
            return kind(**arguments)
        except LlamaExportError as cause:
            raise self._error(cause.message, path, hint=cause.hint) from cause
        except ValueError as cause:
            raise self._error(str(cause), path) from cause

    def _union(self, kind: Any, value: object, path: str) -> Any:
        choices = get_args(kind)
        if value is None and type(None) in choices:
            return None
        choices = tuple(choice for choice in choices if choice is not type(None))
        if len(choices) == 1:
            return self.any(choices[0], value, path)
        for choice in choices:  # several scalars: a size is a number or a name
            if type(value) is split(choice)[0]:
                return self.any(choice, value, path)
        expected = " or ".join(_SCALARS[split(choice)[0]] for choice in choices)
        raise self._error(f"expected {expected}, got {json_type(value)}", path)

    def _literal(self, choices: tuple[Any, ...], value: object, path: str) -> Any:
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return choice
        got = shown(value) if isinstance(value, str) else json_type(value)
        expected = ", ".join(shown(choice) for choice in choices)
        raise self._error(f"expected one of {expected}, got {got}", path)

    def _scalar(self, kind: Any, value: object, path: str) -> Any:
        if type(value) is int and kind in (int, float):
            if not -(2**63) <= value < 2**63:
                raise self._error("expected an integer of 64 bits", path)
            return kind(value)
        self._expect(kind, _SCALARS[kind], value, path)
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error(f"expected a finite number, got {shown(value)}", path)
        if isinstance(value, str):
            self._text(value, path)
        return value

    def _text(self, value: str, path: str) -> None:
        if len(value) > MAX_TEXT_CHARS:
            message = f"expected at most {MAX_TEXT_CHARS} characters, got {len(value)}"
            raise self._error(message, path)
        if _UNFIT_FOR_TEXT.search(value):
            raise self._error(f"expected text without control characters, got {shown(value)}", path)

    def _expect(self, kind: Any, name: str, value: object, path: str) -> Any:
        if type(value) is not kind:
            raise self._error(f"expected {name}, got {json_type(value)}", path)
        return value

    def _error(self, message: str, path: str, *, hint: str | None = None) -> ManifestError:
        where = f"{self.where}#{path}" if path else self.where
        return ManifestError(message, where=where, hint=hint)
