from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from llama_artifacts.errors import CheckpointError, LlamaExportError
from llama_export.checkpoint.gguf import GgufCheckpoint
from llama_export.checkpoint.gguf_header import read_header
from tests.exporter.test_gguf_tokenizer import write_tokenizer
from tests.tiny import write_tiny
from tests.tiny_gguf import write_tiny_gguf

U32, F32, STRING, ARRAY, U64 = 4, 6, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(
    name: str, dims: list[int], *, kind: int = 0, offset: int = 0, num_dims: int | None = None
) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", count) + sizes + struct.pack("<IQ", kind, offset)


def header(entries: list[bytes], tensors: list[bytes] | None = None, version: int = 3) -> bytes:
    tensors = tensors or []
    counts = struct.pack("<IQQ", version, len(tensors), len(entries))
    return b"GGUF" + counts + b"".join(entries) + b"".join(tensors)


def padded(head: bytes, num_data_bytes: int) -> bytes:
    return head + bytes(-len(head) % 32 + num_data_bytes)


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", U32, 0)


ALIGNMENT = "general.alignment"
DAMAGED = {
    "alignment of zero": (
        header([entry(ALIGNMENT, U32, struct.pack("<I", 0))]),
        "general.alignment must be a power of two, got 0",
    ),
    "alignment of 24": (
        header([entry(ALIGNMENT, U32, struct.pack("<I", 24))]),
        "general.alignment must be a power of two, got 24",
    ),
    "alignment as text": (
        header([entry(ALIGNMENT, STRING, text("32"))]),
        "general.alignment must be a power of two, got `32`",
    ),
    "version 1": (header([], version=1), "#version: expected version 2 or 3, got 1"),
    "big-endian": (header([], version=3 << 24), "big-endian files are not supported"),
    "too many entries": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
        "#metadata_kv_count: expected at most 0 items",
    ),
    "too many tensors": (
        b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0),
        "#tensor_count: expected at most 0 items",
    ),
    "array of 2^60": (
        header([entry("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 2**60))]),
        "#tokenizer.ggml.tokens: expected at most 0 items in the bytes that are left",
    ),
    "string of 2^63": (
        header([entry("general.name", STRING, struct.pack("<Q", 2**63))]),
        "#general.name: expected a string of at most",
    ),
    "string past the end": (
        header([entry("general.name", STRING, struct.pack("<Q", 1000) + b"short")]),
        "#general.name: expected 1000 bytes at offset",
    ),
    "string not in UTF-8": (
        header([entry("general.name", STRING, text(b"\xff\xfe"))]),
        "#general.name: expected a string in UTF-8",
    ),
    "key twice": (header([entry("a", U32, bytes(4))] * 2), "#a: the key occurs twice"),
    "bool of 7": (header([entry("a", 7, b"\x07")]), "#a: expected a bool of 0 or 1, got 7"),
    "unknown value type": (
        header([entry("a", 13, bytes(8))]),
        "expected a value type from 0 to 12",
    ),
    "unknown element type": (
        header([entry("a", ARRAY, struct.pack("<IQ", 77, 0))]),
        "expected an element type from 0 to 12, got 77",
    ),
    "deeply nested": (header([entry("a", ARRAY, nested(1000))]), "nested at most 4 deep"),
    "unprintable key": (header([entry("a\n\x1b[31m", 13, b"")]), r"#a\n\x1b[31m: expected a value"),
    "no dimensions": (header([], [tensor("t", [], num_dims=0)]) + bytes(32), "expected 1 to 4 dim"),
    "2^31 dimensions": (
        header([], [tensor("t", [1], num_dims=2**31)]),
        "#t: expected 1 to 4 dimensions, got 2147483648",
    ),
    "ne[1] of zero": (
        padded(header([], [tensor("t", [32, 0])]), 128),
        "#t: expected positive dimensions, got ne[1] = 0",
    ),
    "product overflows": (
        padded(header([], [tensor("t", [2**40, 2**40])]), 128),
        "#t: expected at most 281474976710656 elements",
    ),
    "unknown tensor type": (
        padded(header([], [tensor("t", [32], kind=99)]), 128),
        "#t: type 99 is not supported",
    ),
    "K-quant rows of 64": (
        padded(header([], [tensor("t", [64, 4], kind=14)]), 4096),
        "#t: expected rows of a multiple of 256 for Q6_K, got 64",
    ),
    "offset not aligned": (
        padded(header([], [tensor("t", [8], offset=4)]), 128),
        "#t: expected an offset aligned to 32, got 4",
    ),
    "offset past the end": (
        padded(header([], [tensor("t", [8], offset=2**40)]), 128),
        "bytes shorter than its header declares (incomplete download?)",
    ),
    "offset wraps": (
        padded(header([], [tensor("t", [8], offset=2**64 - 32)]), 128),
        "bytes shorter than its header declares",
    ),
    "tensors overlap": (
        padded(header([], [tensor("a", [16]), tensor("b", [8], offset=32)]), 128),
        "#b: shares bytes with `a`",
    ),
    "tensor twice": (
        padded(header([], [tensor("a", [8]), tensor("a", [8], offset=32)]), 128),
        "#a: the tensor occurs twice",
    ),
    "empty file": (b"", "got a file of 0 bytes"),
    "magic only": (b"GGUF", "got a file of 4 bytes"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "got a Git LFS pointer"),
    "HTML page": (b"\n<!DOCTYPE html><html>", "got an HTML page"),
    "safetensors file": (struct.pack("<Q", 64) + b"{}" + b" " * 62, "(magic `GGUF`)"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_header_is_refused_by_field(case: str, tmp_path: Path) -> None:
    content, message = DAMAGED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    start = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).isprintable()
    assert caught.value.hint
    assert peak < 4_000_000
    assert time.perf_counter() - start < 0.5


def test_alignment_of_zero_in_57_bytes(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(DAMAGED["alignment of zero"][0])
    assert path.stat().st_size == 57
    with pytest.raises(CheckpointError, match=r"general\.alignment must be a power of two, got 0"):
        GgufCheckpoint.open(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_header(tmp_path)


def test_values_of_every_type(tmp_path: Path) -> None:
    scalars = [
        ("u8", 0, "<B", 255), ("i8", 1, "<b", -1), ("u16", 2, "<H", 65535), ("i16", 3, "<h", -2),
        ("u32", 4, "<I", 2**32 - 1), ("i32", 5, "<i", -3), ("f32", F32, "<f", 1e-5),
        ("bool", 7, "<B", True), ("u64", U64, "<Q", 2**64 - 1), ("i64", 11, "<q", -4),
        ("f64", 12, "<d", 0.1), ("largest", F32, "<f", 3.4028234663852886e38),
    ]  # fmt: skip
    entries = [entry(key, kind, struct.pack(code, value)) for key, kind, code, value in scalars]
    entries.append(entry("text", STRING, text("čaj")))
    entries.append(entry("list", ARRAY, struct.pack("<IQ2i", 5, 2, -1, 1)))
    entries.append(entry("nested", ARRAY, nested(1)))
    path = tmp_path / "values.gguf"
    path.write_bytes(header(entries))
    expected = {key: value for key, _, _, value in scalars}
    assert read_header(path).metadata == expected | {"text": "čaj", "list": [-1, 1], "nested": [[]]}


def test_tensor_table_and_version_2(tmp_path: Path) -> None:
    head = header([], [tensor("b", [32, 2], kind=3, offset=64), tensor("a", [16])], version=2)
    path = tmp_path / "table.gguf"
    path.write_bytes(padded(head, 64 + 40))
    tensors = read_header(path).tensors
    start = len(head) + -len(head) % 32
    assert list(tensors) == ["b", "a"]
    assert (tensors["b"].type, tensors["b"].shape, tensors["b"].num_bytes) == ("Q4_1", (2, 32), 40)
    assert (tensors["a"].offset, tensors["b"].offset) == (start, start + 64)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    hf = write_tiny(tmp_path / "hf", has_tokenizer=False, num_hidden_layers=1)
    path = write_tiny_gguf(tmp_path, hf)
    data_start = min(tensor.offset for tensor in read_header(path).tensors.values())
    size = path.stat().st_size
    for length in [size - 32, size - 1000, data_start + 1, *range(data_start, -1, -1)]:
        os.truncate(path, length)
        with pytest.raises(CheckpointError) as caught:
            GgufCheckpoint.open(path)
        assert str(path) in str(caught.value)


def refusal(path: Path) -> str | None:
    """What opening the file complains about, if anything; other exceptions pass."""
    try:
        GgufCheckpoint.open(path).assets()
    except LlamaExportError as error:
        return str(error)
    return None


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_flipped_bytes_open_or_are_refused(has_tokenizer: bool, tmp_path: Path) -> None:
    hf = write_tiny(tmp_path / "hf", has_tokenizer=False, num_hidden_layers=1, vocab_size=320)
    if has_tokenizer:
        write_tokenizer(hf, "smollm", vocab_size=300)
    path = write_tiny_gguf(tmp_path, hf)
    data_start = min(tensor.offset for tensor in read_header(path).tensors.values())
    rng = random.Random(5)
    num_refused, slowest = 0, 0.0
    with path.open("r+b", buffering=0) as file:
        content = file.read(data_start)
        for _ in range(600 if has_tokenizer else 1500):
            places = [rng.randrange(4, data_start) for _ in range(rng.choice([1, 1, 1, 4]))]
            for place in places:
                os.pwrite(file.fileno(), bytes([rng.randrange(256)]), place)
            start = time.perf_counter()
            error = refusal(path)
            slowest = max(slowest, time.perf_counter() - start)
            assert error is None or str(path) in error
            num_refused += error is not None
            for place in places:
                os.pwrite(file.fileno(), content[place : place + 1], place)
    assert num_refused > 100
    assert slowest < 1.0
