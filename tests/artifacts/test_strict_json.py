from __future__ import annotations

import time
import tracemalloc

import pytest

from llama_artifacts.errors import ManifestError
from llama_artifacts.strict_json import MAX_DEPTH, MAX_VALUES, parse_bounded


def complaint(data: bytes) -> str:
    with pytest.raises(ManifestError) as caught:
        parse_bounded(data, where="f", error=ManifestError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a": NaN}', "f#a: expected a finite number, got `nan`"),
        (b'{"a": [1, {"b": -Infinity}]}', "f#a[1].b: expected a finite number, got `-inf`"),
        (b'{"a": 1e999}', "f#a: expected a finite number, got `inf`"),
        (b'{"a\\u001b": Infinity}', r"f#a\x1b: expected a finite number, got `inf`"),
        (b"[NaN]", "f: expected a JSON object, got a list"),
    ],
)
def test_numbers_are_finite(data: bytes, expected: str) -> None:
    assert complaint(data) == expected


def nested(levels: int) -> bytes:
    return b'{"a": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def test_depth_is_bounded() -> None:
    assert parse_bounded(nested(MAX_DEPTH), where="f", error=ManifestError)
    assert "expected at most 32 levels" in complaint(nested(MAX_DEPTH + 1))
    assert "expected at most 32 levels" in complaint(nested(900))
    assert "expected valid JSON" in complaint(nested(500_000))


def test_many_values_are_refused_before_they_take_memory() -> None:
    data = b'{"a": [' + b"[]," * MAX_VALUES + b"[]]}"
    tracemalloc.start()
    start = time.process_time()
    message = complaint(data)
    assert time.process_time() - start < 0.5
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message == "f: expected at most 1,048,576 values, got 2,097,155"
    assert peak < 2**20
