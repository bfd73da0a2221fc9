"""The header of a GGUF file, read without trusting any number in it.

The layout, all little-endian: magic `GGUF`, version, number of tensors, number of metadata entries;
then each entry (key, type, value), each tensor (name, dimensions, type, offset), padding to
`general.alignment`, and the data. Counts and lengths are compared with the bytes that are left
before anything is allocated. Every fault is a `CheckpointError` that names the file and the field.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

from llama_artifacts.errors import CheckpointError
from llama_artifacts.safetensors import plain_size
from llama_artifacts.strict_json import shown

Value: TypeAlias = "int | float | bool | str | list[Value]"

VERSIONS = (2, 3)
MAX_HEADER_BYTES = 1 << 28
MAX_ITEMS = 1 << 22  # array elements of the whole metadata; a 256k vocabulary needs about a million
MAX_NAME_BYTES = 1 << 16
MAX_TEXT_BYTES = 1 << 24
MAX_NESTING = 4
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 1 << 48
DEFAULT_ALIGNMENT = 32
MAX_SHORTENED = 1e37  # rounding a float32 above may leave its range

_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
# The least number of bytes that an element takes: a string its length, an array its head.
_ITEM_BYTES = {kind: struct.calcsize(code) for kind, code in _SCALARS.items()} | {8: 8, 9: 12}
_UINT32, _UINT64 = struct.Struct("<I"), struct.Struct("<Q")
_MIN_ENTRY_BYTES, _MIN_TENSOR_BYTES = 13, 32
_DOWNLOAD_AGAIN = "the file is damaged; download or convert it again"


@dataclass(frozen=True)
class GgufTensor:
    """One row of the tensor table: type such as `Q4_1`, shape outermost first, place in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensor table of one file, both checked against its size."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file.

    Raises:
        CheckpointError: the file cannot be read, is no GGUF file, or contradicts itself.
    """
    try:
        plain_size(path, error=CheckpointError)
        with path.open("rb") as file:
            head = file.read(64)
            _check_magic(head, path)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Parser(view, path).header()
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror or error}", where=path, hint="check the path"
        ) from error


def place(path: Path, field: str) -> str:
    """File and field for a complaint; the field, which the file chose, short and printable."""
    return f"{path}#{shown(field).strip('`')}"


def _check_magic(head: bytes, path: Path) -> None:
    if head.startswith(b"GGUF") and len(head) >= 24:
        return
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            "expected a GGUF file, got a Git LFS pointer", where=path, hint="run `git lfs pull`"
        )
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise CheckpointError(
            "expected a GGUF file, got an HTML page",
            where=path,
            hint="the download was answered by a web page: log in or correct the address",
        )
    if head.startswith(b"GGUF") or not head:
        got = f"a file of {len(head)} bytes"
    else:
        got = f"the first bytes {head[:4]!r}"
    raise CheckpointError(
        f"expected a GGUF file (magic `GGUF`), got {got}", where=path, hint=_DOWNLOAD_AGAIN
    )


class _Parser:
    """A cursor over the mapped file; `field` is what the next complaint is about."""

    def __init__(self, view: mmap.mmap, path: Path) -> None:
        self._view = view
        self._size = len(view)
        self._end = min(self._size, MAX_HEADER_BYTES)
        self._pos = 4
        self._items_left = MAX_ITEMS
        self._path = path
        self._field = "header"

    def header(self) -> GgufHeader:
        self._check_version()
        num_tensors = self._count("tensor_count", _MIN_TENSOR_BYTES)
        num_entries = self._count("metadata_kv_count", _MIN_ENTRY_BYTES)
        metadata = self._metadata(num_entries)
        alignment = self._alignment(metadata)
        tensors = self._tensors(num_tensors)
        start = -(-self._pos // alignment) * alignment
        return GgufHeader(self._path, metadata, self._placed(tensors, start, alignment))

    def _fail(self, message: str, hint: str = _DOWNLOAD_AGAIN) -> NoReturn:
        raise CheckpointError(message, where=place(self._path, self._field), hint=hint)

    def _check_version(self) -> None:
        self._field = "version"
        version = self._uint32()
        if version in VERSIONS:
            return
        if version & 0xFFFF == 0:
            self._fail("big-endian files are not supported", "convert it for a little-endian host")
        self._fail(f"expected version 2 or 3, got {version}", "convert the model again")

    def _take(self, num_bytes: int) -> int:
        """Move past `num_bytes` and return where they start."""
        start = self._pos
        if num_bytes > self._end - start:
            self._fail(
                f"expected {num_bytes} bytes at offset {start}, got {self._end - start} to the end"
            )
        self._pos = start + num_bytes
        return start

    def _uint32(self) -> int:
        return int(_UINT32.unpack_from(self._view, self._take(4))[0])

    def _uint64(self) -> int:
        return int(_UINT64.unpack_from(self._view, self._take(8))[0])

    def _count(self, field: str, item_bytes: int) -> int:
        self._field = field
        return self._check_count(self._uint64(), item_bytes)

    def _check_count(self, count: int, item_bytes: int) -> int:
        room = (self._end - self._pos) // item_bytes
        if count > room:
            self._fail(f"expected at most {room} items in the bytes that are left, got {count}")
        return count

    def _text(self, limit: int) -> str:
        num_bytes = self._uint64()
        if num_bytes > limit:
            self._fail(f"expected a string of at most {limit} bytes, got {num_bytes}")
        start = self._take(num_bytes)
        try:
            return self._view[start : self._pos].decode()
        except UnicodeDecodeError:
            self._fail("expected a string in UTF-8, got other bytes")

    def _metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for index in range(count):
            self._field = f"metadata[{index}]"
            key = self._text(MAX_NAME_BYTES)
            self._field = key
            if key in metadata:
                self._fail("the key occurs twice")
            metadata[key] = self._value(self._uint32(), 0)
        return metadata

    def _value(self, kind: int, depth: int) -> Value:
        if kind == _STRING:
            return self._text(MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(depth + 1)
        if kind not in _SCALARS:
            self._fail(f"expected a value type from 0 to 12, got {kind}")
        return self._scalars(kind, 1)[0]

    def _array(self, depth: int) -> list[Value]:
        if depth > MAX_NESTING:
            self._fail(f"expected arrays nested at most {MAX_NESTING} deep")
        kind = self._uint32()
        if kind not in _ITEM_BYTES:
            self._fail(f"expected an element type from 0 to 12, got {kind}")
        count = self._check_count(self._uint64(), _ITEM_BYTES[kind])
        self._items_left -= count
        if self._items_left < 0:
            self._fail(f"expected at most {MAX_ITEMS} array elements in the metadata")
        if kind in _SCALARS:
            return self._scalars(kind, count)
        return [self._value(kind, depth) for _ in range(count)]

    def _scalars(self, kind: int, count: int) -> list[Value]:
        code = _SCALARS[kind]
        start = self._take(count * _ITEM_BYTES[kind])
        values = struct.unpack_from(f"<{count}{code[1]}", self._view, start)
        if kind == _BOOL:
            if any(value > 1 for value in values):
                self._fail(f"expected a bool of 0 or 1, got {max(values)}")
            return [bool(value) for value in values]
        if kind == _FLOAT32 and count == 1:
            return [_shortest_float32(values[0])]
        return list(values)

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        self._field = "general.alignment"
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or value <= 0 or value & (value - 1):  # type: ignore[operator]
            got = value if is_integer else shown(value)
            self._fail(f"general.alignment must be a power of two, got {got}")
        return int(value)  # type: ignore[arg-type]

    def _tensors(self, count: int) -> list[GgufTensor]:
        """The tensor table as stored, offsets relative to the data, sizes not yet known."""
        tensors: dict[str, GgufTensor] = {}
        for index in range(count):
            self._field = f"tensors[{index}]"
            name = self._text(MAX_NAME_BYTES)
            self._field = name
            if name in tensors:
                self._fail("the tensor occurs twice")
            shape = self._shape()
            block, block_bytes, kind = self._tensor_type()
            if shape[-1] % block:
                self._fail(f"expected rows of a multiple of {block} for {kind}, got {shape[-1]}")
            num_bytes = math.prod(shape) // block * block_bytes
            tensors[name] = GgufTensor(name, kind, shape, self._uint64(), num_bytes)
        return list(tensors.values())

    def _shape(self) -> tuple[int, ...]:
        num_dims = self._uint32()
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            self._fail(f"expected 1 to {MAX_DIMENSIONS} dimensions, got {num_dims}")
        dims = [self._uint64() for _ in range(num_dims)]
        for axis, size in enumerate(dims):
            if size == 0:
                self._fail(f"expected positive dimensions, got ne[{axis}] = 0")
        if math.prod(dims) > MAX_ELEMENTS:
            self._fail(f"expected at most {MAX_ELEMENTS} elements, got the dimensions {dims}")
        return tuple(reversed(dims))

    def _tensor_type(self) -> tuple[int, int, str]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        number = self._uint32()
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            self._fail(f"type {number} is not supported", "convert the model to a known type")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        return block, block_bytes, kind.name

    def _placed(
        self, tensors: list[GgufTensor], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """The tensors with absolute offsets, once they are known to lie apart inside the file."""
        placed = {}
        end, last = 0, ""
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            self._field = tensor.name
            if tensor.offset % alignment:
                self._fail(f"expected an offset aligned to {alignment}, got {tensor.offset}")
            if tensor.offset < end:
                self._fail(f"shares bytes with {shown(last)}")
            end, last = tensor.offset + tensor.num_bytes, tensor.name
            placed[tensor.name] = GgufTensor(
                tensor.name, tensor.type, tensor.shape, start + tensor.offset, tensor.num_bytes
            )
        if tensors and start + end > self._size:
            missing = start + end - self._size
            raise CheckpointError(
                f"file is {missing} bytes shorter than its header declares (incomplete download?)",
                where=place(self._path, last),
                hint="download it again",
            )
        return {tensor.name: placed[tensor.name] for tensor in tensors}


def _shortest_float32(value: float) -> float:
    """The shortest decimal that is the same float32, so that 1e-5 reads as 1e-05."""
    if not math.isfinite(value) or abs(value) > MAX_SHORTENED:
        return value
    stored = struct.pack("<f", value)
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((near for near in candidates if struct.pack("<f", near) == stored), value)
