from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_artifacts.codec import MAX_TEXT_CHARS, decode, encode
from llama_artifacts.errors import ManifestError


@dataclass(frozen=True)
class Leaf:
    size: int | str
    ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.size == 13:
            raise ValueError("13 is refused")
        if self.size == 14:
            raise ManifestError("14 is refused", where="elsewhere", hint="take 15")


@dataclass(frozen=True)
class Tree:
    name: str
    is_tall: bool
    kind: Literal["oak", "elm"]
    maybe: Literal["x"] | None
    leaves: tuple[Leaf, ...]
    by_name: dict[str, Leaf]
    note: str | None = None


VALUE: dict[str, Any] = {
    "name": "tree",
    "is_tall": True,
    "kind": "oak",
    "maybe": None,
    "leaves": [{"size": 1, "ratio": 2.5}, {"size": "S"}],
    "by_name": {"a": {"size": 3}},
    "note": None,
}


def message(changes: dict[str, Any]) -> str:
    with pytest.raises(ManifestError) as caught:
        decode(Tree, VALUE | changes, where="f.json")
    return str(caught.value)


def test_every_kind_of_field_is_decoded() -> None:
    assert decode(Tree, VALUE, where="f.json") == Tree(
        name="tree",
        is_tall=True,
        kind="oak",
        maybe=None,
        leaves=(Leaf(1, 2.5), Leaf("S")),
        by_name={"a": Leaf(3)},
    )


leaves = st.builds(
    Leaf,
    st.integers(-(2**63), 2**63 - 1).filter(lambda size: size not in (13, 14))
    | st.sampled_from(("S", "é")),
    st.floats(allow_nan=False, allow_infinity=False),
)


@given(
    st.builds(
        Tree,
        name=st.text(st.characters(exclude_categories=("Cc", "Cs"))),
        is_tall=st.booleans(),
        kind=st.sampled_from(("oak", "elm")),
        maybe=st.sampled_from(("x", None)),
        leaves=st.lists(leaves).map(tuple),
        by_name=st.dictionaries(st.sampled_from("abc"), leaves),
        note=st.none() | st.just("n"),
    )
)
def test_what_is_encoded_is_decoded_to_the_same(tree: Tree) -> None:
    assert decode(Tree, encode(tree), where="f.json") == tree


@pytest.mark.parametrize(
    ("first", "second"), [(0.0, -0.0), (3.0, 3), (-(2.0**53), -(2**53)), (1e300, 1e300)]
)
def test_equal_numbers_are_written_alike(first: float, second: float) -> None:
    assert repr(encode(Leaf(1, first))) == repr(encode(Leaf(1, second)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": None}, "f.json#name: expected a string, got null"),
        ({"name": 1}, "f.json#name: expected a string, got an integer"),
        ({"is_tall": 1}, "f.json#is_tall: expected a boolean, got an integer"),
        ({"kind": "ash"}, "f.json#kind: expected one of `oak`, `elm`, got `ash`"),
        ({"kind": None}, "f.json#kind: expected one of `oak`, `elm`, got null"),
        ({"kind": ["oak"]}, "f.json#kind: expected one of `oak`, `elm`, got a list"),
        ({"maybe": "y"}, "f.json#maybe: expected one of `x`, got `y`"),
        ({"leaves": {}}, "f.json#leaves: expected a list, got an object"),
        ({"leaves": [1]}, "f.json#leaves[0]: expected an object, got an integer"),
        ({"by_name": []}, "f.json#by_name: expected an object, got a list"),
        ({"note": 1.5}, "f.json#note: expected a string, got a number"),
        ({"by_name": {"a": {}}}, "f.json#by_name.a.size: missing key"),
        ({"leaves": [{"size": 1, "b": 1, "a": 1}]}, "f.json#leaves[0].a: unknown key"),
        ({"extra": 1}, "f.json#extra: unknown key"),
        ({"leaves": [{"size": 13}]}, "f.json#leaves[0]: 13 is refused"),
        ({"leaves": [{"size": 14}]}, "f.json#leaves[0]: 14 is refused"),
    ],
)
def test_a_misfit_is_named_with_its_key_path(changes: dict[str, Any], expected: str) -> None:
    assert message(changes) == expected


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        ({"size": True}, "size: expected an integer or a string, got a boolean"),
        ({"size": 1.0}, "size: expected an integer or a string, got a number"),
        ({"size": 2**63}, "size: expected an integer of 64 bits"),
        ({"size": -(2**63) - 1}, "size: expected an integer of 64 bits"),
        ({"size": 1, "ratio": True}, "ratio: expected a number, got a boolean"),
        ({"size": 1, "ratio": "1"}, "ratio: expected a number, got a string"),
        ({"size": 1, "ratio": float("nan")}, "ratio: expected a finite number, got `nan`"),
        ({"size": 1, "ratio": float("-inf")}, "ratio: expected a finite number, got `-inf`"),
        ({"size": 1, "ratio": 10**400}, "ratio: expected an integer of 64 bits"),
    ],
)
def test_numbers_are_finite_of_64_bits_and_no_booleans(leaf: dict[str, Any], expected: str) -> None:
    assert message({"leaves": [leaf]}) == f"f.json#leaves[0].{expected}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", r"`a\nb`"),
        ("\x1b[31m", r"`\x1b[31m`"),
        ("\ud800", r"`\ud800`"),
        ("\x9f", r"`\x9f`"),
    ],
)
def test_text_that_cannot_be_printed_is_refused_printably(text: str, shown: str) -> None:
    expected = f"expected text without control characters, got {shown}"
    assert message({"name": text}) == f"f.json#name: {expected}"
    assert message({"leaves": [{"size": text}]}) == f"f.json#leaves[0].size: {expected}"
    assert message({"by_name": {text: {"size": 1}}}).endswith(f"{shown[1:-1]}: {expected}")
    assert message({text: 1}) == f"f.json#{shown[1:-1]}: unknown key"


def test_long_text_is_refused_in_a_short_message() -> None:
    text = "x" * (MAX_TEXT_CHARS + 1)
    assert message({"name": text}) == "f.json#name: expected at most 1000 characters, got 1001"
    assert len(message({"by_name": {text: {"size": 1}}})) < 250
    assert len(message({text: 1})) < 250
    assert len(message({"kind": text})) < 250
    assert decode(Tree, VALUE | {"name": text[1:]}, where="f.json").name == text[1:]


def test_a_deep_value_in_place_of_a_choice_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    try:
        assert message({"kind": value}).endswith("expected one of `oak`, `elm`, got a list")
    finally:
        while value:  # taken apart here: the interpreter would recurse
            value = value.pop()


def test_the_hint_of_a_refusal_is_kept() -> None:
    with pytest.raises(ManifestError) as caught:
        decode(Tree, VALUE | {"leaves": [{"size": 14}]}, where="f.json")
    assert caught.value.hint == "take 15"


def test_unknown_keys_can_be_collected_instead() -> None:
    ignored: list[str] = []
    value = VALUE | {"z": 1, "by_name": {"a": {"size": 3, "new\n": {}}}}
    assert decode(Tree, value, where="f.json", ignored=ignored) == decode(Tree, VALUE, where="f")
    assert ignored == ["z", r"by_name.a.new\n"]
