from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from llama_artifacts.codec import decode
from llama_artifacts.errors import ManifestError
from llama_artifacts.limits import AtMostItems, Count, DimSize, FileName, Sha256, Size, check_fields


@dataclass(frozen=True)
class Limited:
    count: Count = 1
    digest: Sha256 | None = None
    sizes: Annotated[tuple[Count | DimSize, ...], AtMostItems(2)] = ()
    files: dict[FileName, Size] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)


CASES = [
    ("count", 0, "", "expected at least 1, got 0"),
    ("digest", "ab", "", "expected 64 hexadecimal digits, got `ab`"),
    ("digest", "A" * 64, "", f"expected 64 hexadecimal digits, got `{'A' * 64}`"),
    ("sizes", [1, 2, 3], "", "expected at most 2 items, got 3"),
    ("sizes", [1, -2], "[1]", "expected at least 1, got -2"),
    ("sizes", ["S S"], "[0]", "expected a dimension such as `S`, got `S S`"),
    ("files", {"a/b": 1}, ".a/b", "expected a plain file name, got `a/b`"),
    ("files", {"a": -1}, ".a", "expected at least 0, got -1"),
]


@pytest.mark.parametrize(("name", "value", "place", "expected"), CASES)
def test_a_read_value_is_held_to_its_limit_with_its_key_path(
    name: str, value: Any, place: str, expected: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        decode(Limited, {name: value}, where="f")
    assert str(caught.value) == f"f#{name}{place}: {expected}"


@pytest.mark.parametrize(("name", "value", "place", "expected"), CASES)
def test_a_value_made_in_code_is_held_to_it_too(
    name: str, value: Any, place: str, expected: str
) -> None:
    made = tuple(value) if isinstance(value, list) else value
    with pytest.raises(ValueError, match=f"^`{name}`: ") as caught:
        Limited(**{name: made})
    assert str(caught.value) == f"`{name}`: {expected}"


def test_what_is_within_the_limits_passes() -> None:
    value = {"count": 9, "digest": "0" * 64, "sizes": [1, "2*S"], "files": {"a.pt2": 0}}
    made = Limited(9, "0" * 64, (1, "2*S"), {"a.pt2": 0})
    assert decode(Limited, value, where="f") == made
