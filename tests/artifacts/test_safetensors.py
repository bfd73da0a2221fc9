from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from llama_artifacts.dtypes import DTYPES
from llama_artifacts.errors import CheckpointError, IntegrityError
from llama_artifacts.safetensors import MAX_HEADER_BYTES, parse_header, read_header

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def raw(header: object, data: bytes = b"", *, text: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if text is None else text
    return len(text).to_bytes(8, "little") + text + data


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


def test_header_of_the_reference_writer_is_read_back(tmp_path: Path) -> None:
    tensors = {row.name: torch.zeros(3, 2).to(getattr(torch, row.torch)) for row in DTYPES} | {
        "scalar": torch.zeros(()),
        "empty": torch.zeros(0, 4),
    }
    path = tmp_path / "all.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.data_end == path.stat().st_size
    assert {name: stored.shape for name, stored in header.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    for row in DTYPES:
        stored = header.tensors[row.name]
        assert (stored.dtype, stored.end - stored.start) == (row.name, 6 * row.num_bytes)


def test_extents_are_offsets_from_the_beginning_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.arange(5.0)}, path)
    stored = read_header(path).tensors["x"]
    data = path.read_bytes()[stored.start : stored.end]
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("metadata", [None, {}, {"format": "mlx"}, {"format": "np", "x": ""}])
def test_metadata_is_informative_only(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    header: dict[str, Any] = {"a": A}
    if metadata is not None:
        header["__metadata__"] = metadata
    assert read_header(write(tmp_path, raw(header, bytes(24)))).metadata == (metadata or {})


def test_padding_spaces_after_the_header_are_allowed(tmp_path: Path) -> None:
    text = json.dumps({"a": A}).encode() + b"     "
    assert "a" in read_header(write(tmp_path, raw(None, bytes(24), text=text))).tensors


BAD_FIELDS: dict[str, tuple[object, str, str]] = {
    "not an object": ([], "", "begins with `{`"),
    "tensor is a list": ({"a": []}, "#a", "expected an object, got a list"),
    "missing key": ({"a": {"dtype": "F32", "shape": []}}, "#a", "the keys dtype, shape and data"),
    "unknown key": ({"a": {**A, "strides": [1]}}, "#a", "`strides`"),
    "unknown dtype": ({"a": {**A, "dtype": "Q4"}}, "#a", "dtype `Q4` is not supported"),
    "dtype is a number": ({"a": {**A, "dtype": 3}}, "#a", "dtype `3` is not supported"),
    "dtype is a list": ({"a": {**A, "dtype": []}}, "#a", "is not supported"),
    "shape is a string": ({"a": {**A, "shape": "2"}}, "#a", "expected shape as a list"),
    "shape has a float": ({"a": {**A, "shape": [6.0]}}, "#a", "in shape, got `6.0`"),
    "shape has a boolean": ({"a": {**A, "shape": [True, 6]}}, "#a", "in shape, got `True`"),
    "shape is negative": ({"a": {**A, "shape": [-2, -3]}}, "#a", "in shape, got `-2`"),
    "shape has too many axes": ({"a": {**A, "shape": [1] * 9}}, "#a", "at most 8"),
    "shape overflows": ({"a": {**A, "shape": [2**40, 2**40]}}, "#a", "larger than any file"),
    "shape and extent differ": ({"a": {**A, "shape": [65, 64]}}, "#a", "needs 16640 bytes"),
    "extent is reversed": ({"a": {**A, "data_offsets": [24, 0]}}, "#a", "start <= end"),
    "extent has one end": ({"a": {**A, "data_offsets": [24]}}, "#a", "[start, end]"),
    "extent is negative": ({"a": {**A, "data_offsets": [-24, 0]}}, "#a", "got `-24`"),
    "extent is huge": ({"a": {**A, "data_offsets": [0, 2**70]}}, "#a", "in data_offsets"),
    "two tensors share an extent": ({"a": A, "b": A}, "#b", "overlaps `a` by 24 bytes"),
    "tensors overlap": (
        {"a": A, "b": {**B, "data_offsets": [20, 28]}},
        "#b",
        "overlaps `a` by 4 bytes",
    ),
    "hole between tensors": (
        {"a": A, "b": {**B, "data_offsets": [28, 36]}},
        "#b",
        "4 bytes between `a`",
    ),
    "hole before the first": ({"b": B}, "#b", "24 bytes between `the header`"),
    "metadata is a list": ({"__metadata__": [1]}, "#__metadata__", "an object of strings"),
    "metadata has a number": ({"__metadata__": {"k": 1}}, "#__metadata__", "a string for `k`"),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_malformed_header_is_refused_by_name(tmp_path: Path, case: str) -> None:
    header, place, message = BAD_FIELDS[case]
    path = write(tmp_path, raw(header, bytes(24)))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.where == f"{path}{place}"
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


GOOD = raw({"a": A, "b": B}, bytes(32))

BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "file is empty, 0 bytes"),
    "four bytes": (b"abcd", "expected more than 8 bytes, got 4"),
    "truncated data": (GOOD[:-10], "file is 10 bytes shorter than its header declares"),
    "no data": (GOOD[:-32], "file is 32 bytes shorter than its header declares"),
    "trailing bytes": (GOOD + bytes(7), "file is 7 bytes longer than its header declares"),
    "truncated header": (GOOD[:60], "before its header of"),
    "huge header": ((2**62).to_bytes(8, "little") + bytes(64), f"at most {MAX_HEADER_BYTES} bytes"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    "HTML page": (b"\n<!DOCTYPE html><html><body>404</body></html>", "an HTML page"),
    "HTML without doctype": (b"<html lang='en'><head></head></html>", "an HTML page"),
    "zip": (b"PK\x03\x04" + bytes(60), "a zip archive"),
    "gguf": (b"GGUF" + bytes(60), "a GGUF file"),
    "not UTF-8": (raw(None, text=b'{"\xff": 1}'), "expected UTF-8"),
    "not JSON": (raw(None, text=b'{"a": }'), "expected valid JSON"),
    "nested too deeply": (raw(None, text=b'{"a":' * 100_000), "expected valid JSON"),
    "number too long": (raw(None, text=b'{"a": ' + b"9" * 9000 + b"}"), "expected valid JSON"),
    "duplicate tensor": (raw(None, text=b'{"a": {}, "a": {}}'), "duplicate JSON key `a`"),
    "duplicate field": (
        raw(None, text=b'{"a": {"dtype": "F32", "dtype": "F16"}}'),
        "duplicate JSON key `dtype`",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_damaged_file_is_refused_with_its_path(tmp_path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    path = write(tmp_path, content)
    with pytest.raises(IntegrityError) as caught:
        read_header(path, error=IntegrityError)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_are_in_the_message_of_a_truncated_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD[:-10])
    with pytest.raises(CheckpointError, match=f"expected {len(GOOD)} bytes, got {len(GOOD) - 10}"):
        read_header(path)


@pytest.mark.parametrize("kept", [0, 1, 31, 32])
def test_headers_only_accepts_absent_data(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path, GOOD[: len(GOOD) - 32 + kept])
    assert set(read_header(path, headers_only=True).tensors) == {"a", "b"}


def test_headers_only_refuses_trailing_bytes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="1 bytes longer"):
        read_header(write(tmp_path, GOOD + b"x"), headers_only=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "cannot be read"),
        (lambda path: path.symlink_to("gone"), "dangling link to `gone`"),
    ],
    ids=["absent", "folder", "dangling link"],
)
def test_unreadable_path_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    path = tmp_path / "model.safetensors"
    make(path)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


def test_control_characters_of_a_name_do_not_reach_the_terminal(tmp_path: Path) -> None:
    header = {"a\x1b[2J": A, "b\n": A}
    with pytest.raises(CheckpointError) as caught:
        read_header(write(tmp_path, raw(header, bytes(24))))
    assert "\x1b" not in str(caught.value)
    assert "#b\\n: overlaps `a\\x1b[2J`" in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_escape_as_another_error(text: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse_header(text + b"!", where="f", error=CheckpointError)


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "F32"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_arbitrary_json_is_a_header_or_a_known_error(value: object) -> None:
    text = json.dumps({"a": value}).encode()
    with pytest.raises(CheckpointError):
        parse_header(text, where="f", error=CheckpointError)
