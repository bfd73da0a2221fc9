"""The header of a safetensors file, read in full and checked in full, without its data.

A file is eight bytes (the header's length, little endian), the header (a JSON object from tensor name
to dtype, shape and extent), and the data. The extents must cover the data exactly: no overlap, no
hole, no byte too many. Nothing in the file is believed before it is checked.
"""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_artifacts.dtypes import BY_SAFETENSORS, DType
from llama_artifacts.errors import CheckpointError, LlamaExportError
from llama_artifacts.strict_json import json_type, parse_bounded, printable, shown

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 8
MAX_TENSOR_BYTES = 2**63 - 1
METADATA_KEY = "__metadata__"
TENSOR_KEYS = {"dtype", "shape", "data_offsets"}

# What people have in place of weights, by how the file begins.
IMPOSTORS: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the data with `git lfs pull`"),
    (b"<!doctype html", "an HTML page", "download the file itself, not the page that shows it"),
    (b"<html", "an HTML page", "download the file itself, not the page that shows it"),
    (b"PK\x03\x04", "a zip archive (PyTorch weights?)", "convert the weights to safetensors"),
    (b"GGUF", "a GGUF file", "give it the suffix `.gguf` and name the file itself"),
)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file; `start` and `end` are byte offsets from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself.

    Attributes:
        tensors: by name, in the order of the file's data.
        metadata: free text by key; informative only.
        data_start: where the data begins, in bytes from the beginning of the file.
        data_end: where the data must end; the size of a whole file.
    """

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    data_start: int
    data_end: int


def read_header(
    path: Path,
    *,
    error: type[LlamaExportError] = CheckpointError,
    headers_only: bool = False,
) -> Header:
    """Reads and checks the header of one file.

    Args:
        path: the file.
        error: the type to raise.
        headers_only: accept a file whose data is absent or cut off.

    Raises:
        error: the file is missing, is something else, is truncated or padded, or breaks the format.
    """
    try:
        file_bytes = plain_size(path, error=error)
        with path.open("rb") as file:
            prefix = file.read(64)
            header_bytes = _header_bytes(prefix, file_bytes, where=path, error=error)
            file.seek(LENGTH_BYTES)
            text = file.read(header_bytes)
    except OSError as cause:
        raise error(os_message(path, cause), where=path) from cause
    if len(text) != header_bytes:
        raise error(f"expected a header of {header_bytes} bytes, got {len(text)}", where=path)
    header = parse_header(text, where=path, error=error)
    _check_size(header, file_bytes, where=path, error=error, headers_only=headers_only)
    return header


def header_digest(path: Path) -> str:
    """The SHA-256, in hexadecimal, of a file's bytes up to its data.

    Raises:
        CheckpointError: as `read_header`.
    """
    num_bytes = read_header(path, headers_only=True).data_start
    with path.open("rb") as file:
        return hashlib.sha256(file.read(num_bytes)).hexdigest()


def parse_header(text: bytes, *, where: object, error: type[LlamaExportError]) -> Header:
    """The header's JSON text as a checked `Header`."""
    if not text.startswith(b"{"):
        raise error("expected a header that begins with `{`", where=where)
    fields = parse_bounded(text, where=where, error=error)
    metadata = _metadata(fields.pop(METADATA_KEY, None), where=where, error=error)
    data_start = LENGTH_BYTES + len(text)
    tensors = {
        name: _tensor(value, data_start, where=f"{where}#{printable(name)}", error=error)
        for name, value in fields.items()
    }
    ordered = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end))
    data_end = _check_extents(ordered, data_start, where=where, error=error)
    return Header(dict(ordered), metadata, data_start, data_end)


def impostor(prefix: bytes) -> tuple[str, str] | None:
    """What a file is that begins so and is no model file, and a hint; None where it may be one."""
    start = prefix.lstrip().lower()
    for magic, what, hint in IMPOSTORS:
        if prefix.startswith(magic) or start.startswith(magic):
            return what, hint
    return None


def plain_size(path: Path, *, error: type[LlamaExportError]) -> int:
    """Bytes of a file; a pipe would keep its reader waiting, and a device may never end.

    Raises:
        error: it is neither plain nor a folder, which fails when it is read.
        OSError: there is none.
    """
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise error("expected a plain file", where=path)
    return status.st_size


def os_message(path: Path, cause: OSError) -> str:
    """Why a file cannot be read, in words that fit after its path."""
    if path.is_symlink() and not path.exists():
        return f"dangling link to {shown(str(path.readlink()))} (incomplete download?)"
    if isinstance(cause, FileNotFoundError):
        return "no such file"
    return f"cannot be read: {cause.strerror or cause}"


def _header_bytes(
    prefix: bytes, file_bytes: int, *, where: object, error: type[LlamaExportError]
) -> int:
    if file_bytes == 0:
        raise error("file is empty, 0 bytes (incomplete download?)", where=where)
    if (found := impostor(prefix)) is not None:
        raise error(f"expected a safetensors file, got {found[0]}", where=where, hint=found[1])
    if file_bytes <= LENGTH_BYTES:
        raise error(
            f"expected more than 8 bytes, got {file_bytes} (incomplete download?)", where=where
        )
    header_bytes = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if header_bytes > MAX_HEADER_BYTES:
        message = f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {header_bytes}"
        raise error(message, where=where, hint="this is not a safetensors file")
    missing = LENGTH_BYTES + header_bytes - file_bytes
    if missing > 0:
        message = f"file ends {missing} bytes before its header of {header_bytes} bytes does"
        raise error(f"{message}: it has {file_bytes} (incomplete download?)", where=where)
    return header_bytes


def _metadata(value: object, *, where: object, error: type[LlamaExportError]) -> dict[str, str]:
    if value is None:
        return {}
    place = f"{where}#{METADATA_KEY}"
    if not isinstance(value, dict):
        raise error(f"expected an object of strings, got {json_type(value)}", where=place)
    for key, text in value.items():
        if not isinstance(text, str):
            raise error(f"expected a string for {shown(key)}, got {json_type(text)}", where=place)
    return value


def _tensor(
    value: Any, data_start: int, *, where: str, error: type[LlamaExportError]
) -> StoredTensor:
    if not isinstance(value, dict):
        raise error(f"expected an object, got {json_type(value)}", where=where)
    if value.keys() != TENSOR_KEYS:
        got = ", ".join(shown(key) for key in sorted(value)[:8]) or "none"
        raise error(f"expected the keys dtype, shape and data_offsets, got {got}", where=where)
    row = _dtype(value["dtype"], where=where, error=error)
    shape = _sizes(value["shape"], "shape", where=where, error=error)
    start, end = _extent(value["data_offsets"], where=where, error=error)
    expected = _num_bytes(row, shape, where=where, error=error)
    if end - start != expected:
        message = f"shape {list(shape)} of {row.name} needs {expected} bytes, data_offsets give"
        raise error(f"{message} {end - start}", where=where)
    return StoredTensor(row.name, shape, data_start + start, data_start + end)


def _dtype(value: object, *, where: str, error: type[LlamaExportError]) -> DType:
    row = BY_SAFETENSORS.get(value) if isinstance(value, str) else None
    if row is None:
        raise error(
            f"dtype {shown(value)} is not supported",
            where=where,
            hint=f"known dtypes: {', '.join(BY_SAFETENSORS)}",
        )
    return row


def _sizes(
    value: object, field: str, *, where: str, error: type[LlamaExportError]
) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        raise error(f"expected {field} as a list of at most {MAX_DIMS} sizes", where=where)
    for size in value:
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= MAX_TENSOR_BYTES:
            raise error(
                f"expected non-negative integers in {field}, got {shown(size)}", where=where
            )
    return tuple(value)


def _extent(value: object, *, where: str, error: type[LlamaExportError]) -> tuple[int, int]:
    offsets = _sizes(value, "data_offsets", where=where, error=error)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        message = f"expected data_offsets as [start, end] with start <= end, got {list(offsets)}"
        raise error(message, where=where)
    return offsets[0], offsets[1]


def _num_bytes(
    row: DType, shape: tuple[int, ...], *, where: str, error: type[LlamaExportError]
) -> int:
    num_bytes = row.num_bytes
    for size in shape:
        num_bytes *= size
    if num_bytes > MAX_TENSOR_BYTES:
        raise error(f"shape {list(shape)} of {row.name} is larger than any file", where=where)
    return num_bytes


def _check_extents(
    ordered: list[tuple[str, StoredTensor]],
    data_start: int,
    *,
    where: object,
    error: type[LlamaExportError],
) -> int:
    """The end of the data; the tensors must follow each other without overlap or hole."""
    end, previous = data_start, "the header"
    for name, tensor in ordered:
        if tensor.start < end:
            raise error(
                f"overlaps {shown(previous)} by {end - tensor.start} bytes",
                where=f"{where}#{printable(name)}",
            )
        if tensor.start > end:
            message = (
                f"{tensor.start - end} bytes between {shown(previous)} and this belong to no tensor"
            )
            raise error(message, where=f"{where}#{printable(name)}")
        end, previous = tensor.end, name
    return end


def _check_size(
    header: Header,
    file_bytes: int,
    *,
    where: object,
    error: type[LlamaExportError],
    headers_only: bool,
) -> None:
    difference = header.data_end - file_bytes
    counts = f"expected {header.data_end} bytes, got {file_bytes}"
    if difference > 0 and not headers_only:
        message = (
            f"file is {difference} bytes shorter than its header declares (incomplete download?)"
        )
        raise error(f"{message}: {counts}", where=where, hint="download the file again")
    if difference < 0:
        message = f"file is {-difference} bytes longer than its header declares"
        raise error(f"{message}: {counts}", where=where, hint="download the file again")
