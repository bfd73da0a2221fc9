from __future__ import annotations

import re
from typing import Any

import pytest

from llama_artifacts.errors import InputError, LlamaExportError
from llama_artifacts.signature import (
    Bounds,
    Dim,
    Signature,
    StateSpec,
    TensorSpec,
    check_values,
    resolve,
    show,
)

TOKENS = TensorSpec("tokens", "i32", ("B", "S"), Bounds(0, 255))
POS = TensorSpec("pos", "i32", (), Bounds(0, 62, "S"))
INDEX = TensorSpec("index", "i32", (), Bounds(-1, 62, dim="S", scale=2, offset=-1))
MASK = TensorSpec("mask", "bool", ("S", 4))
LOGITS = TensorSpec("logits", "f32", ("B", 256))
B, S = Dim("B", 1, 8), Dim("S", 2, 63)
SIGNATURE = Signature((TOKENS, POS, MASK), (), (LOGITS,), (B, S))
SHAPES: dict[str, tuple[int, ...]] = {"tokens": (3, 5), "pos": (), "mask": (5, 4)}


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("length", [2, 63])
def test_a_call_in_range_binds_every_dimension(batch: int, length: int) -> None:
    shapes = {"mask": [length, 4], "pos": [], "tokens": [batch, length]}
    assert SIGNATURE.bind(shapes) == {"B": batch, "S": length}


def test_a_signature_without_inputs_binds_nothing() -> None:
    signature = Signature((), (), (TensorSpec("x", "f32", (2,)),), ())
    assert signature.bind({}) == {}
    with pytest.raises(InputError, match="unknown: y"):
        signature.bind({"y": ()})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokens": (9, 5)}, "tokens: expected B from 1 to 8, got 9"),
        ({"tokens": (0, 5)}, "tokens: expected B from 1 to 8, got 0"),
        ({"tokens": (3, 1), "mask": (1, 4)}, "tokens: expected S from 2 to 63, got 1"),
        ({"tokens": (3, 64), "mask": (64, 4)}, "tokens: expected S from 2 to 63, got 64"),
        ({"tokens": (3, -5)}, "tokens: expected S from 2 to 63, got -5"),
        ({"mask": (6, 4)}, "mask: expected S = 5 as in other inputs, got 6"),
        ({"mask": (5, 3)}, "mask: expected shape [S, 4], got [5, 3]"),
        ({"tokens": (15,)}, "tokens: expected shape [B, S], got [15]"),
        ({"tokens": (3, 5, 1)}, "tokens: expected shape [B, S], got [3, 5, 1]"),
        ({"pos": (1,)}, "pos: expected shape [], got [1]"),
        ({"tokens": ()}, "tokens: expected shape [B, S], got []"),
    ],
)
def test_a_bad_shape_is_refused_with_both_numbers(
    changes: dict[str, tuple[int, ...]], expected: str
) -> None:
    with pytest.raises(InputError) as caught:
        SIGNATURE.bind(SHAPES | changes)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["tokens", "mask"], "missing: pos"),
        (["tokens", "mask", "pos", "x", "y"], "unknown: x, y"),
        (["tokens", "mask", "position"], "missing: pos; unknown: position"),
        ([], "missing: tokens, pos, mask"),
    ],
)
def test_missing_and_unknown_inputs_are_named(names: list[str], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        SIGNATURE.bind({name: SHAPES.get(name, ()) for name in names})
    assert str(caught.value) == f"expected the inputs tokens, pos, mask; {expected}"


@pytest.mark.parametrize(
    ("spec", "smallest", "largest", "expected"),
    [
        (TOKENS, 0, 255, None),
        (TOKENS, -1, 255, "tokens: expected at least 0, got -1"),
        (TOKENS, 0, 256, "tokens: expected at most 255, got 256"),
        (POS, 0, 58, None),
        (POS, 58, 58, None),
        (POS, 0, 59, "pos: expected pos + S - 1 at most 62, got 59 + 5 - 1"),
        (POS, -1, 58, "pos: expected at least 0, got -1"),
        (MASK, -(2**31), 2**31, None),
        (INDEX, -1, 9, None),
        (INDEX, -2, 9, "index: expected at least -1, got -2"),
        (INDEX, 0, 10, "index: expected at most 9, got 10"),
    ],
)
def test_values_are_held_against_their_bounds(
    spec: TensorSpec, smallest: int, largest: int, expected: str | None
) -> None:
    sizes = {"B": 3, "S": 5}
    if expected is None:
        check_values(spec, smallest, largest, sizes)
        return
    with pytest.raises(InputError) as caught:
        check_values(spec, smallest, largest, sizes)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Dim("2x", 1, 2), "`name`: expected an identifier, got `2x`"),
        (lambda: Dim("", 1, 2), "`name`: expected an identifier, got ``"),
        (lambda: Dim("S", 0, 2), "`min`: expected at least 1, got 0"),
        (lambda: Dim("S", 3, 2), "expected min <= max for `S`, got 3, 2"),
        (lambda: Bounds(-2, 2), "`min`: expected at least -1, got -2"),
        (lambda: Bounds(3, 2), "expected min <= max, got 3, 2"),
        (lambda: Bounds(0, 2, dim="S", scale=0), "`scale`: expected at least 1, got 0"),
        (lambda: TensorSpec("", "f32", ()), "`name`: expected a name, got ``"),
        (lambda: TensorSpec("x", "f33", ()), "unknown dtype `f33`"),
        (lambda: TensorSpec("x", "f32", (2, 0)), "`shape`: expected at least 1, got 0"),
        (lambda: StateSpec("x", "f32", (-1,)), "`shape`: expected at least 1, got -1"),
        (lambda: TensorSpec("x", "f32", (1,) * 9), "`shape`: expected at most 8 items, got 9"),
        (lambda: TensorSpec("x", "f32", ("0*S",)), "`shape`: expected a dimension such as `S`"),
        (lambda: TensorSpec("x", "f32", ("\u0661*S",)), "`shape`: expected a dimension such as"),
        (
            lambda: StateSpec("x", "f32", (2**31, 2**31)),
            "`x` of shape [2147483648, 2147483648] is larger than any memory",
        ),
    ],
)
def test_a_part_that_makes_no_sense_is_refused(make: Any, expected: str) -> None:
    with pytest.raises((ValueError, LlamaExportError), match=re.escape(expected)):
        make()


STATE = StateSpec("cache", "bf16", (2, 3))
POOL = StateSpec("pool", "bf16", ("Pages", 3))
DOUBLED = TensorSpec("x", "f32", ("2*S",))


@pytest.mark.parametrize(
    ("inputs", "states", "outputs", "dims", "expected"),
    [
        ((POS, TOKENS, POS), (), (LOGITS,), (B, S), "input or state names, got `pos` twice"),
        ((TOKENS,), (STATE, STATE), (LOGITS,), (B, S), "input or state names, got `cache` twice"),
        (
            (TOKENS, TensorSpec("cache", "f32", ())),
            (STATE,),
            (LOGITS,),
            (B, S),
            "input or state names, got `cache` twice",
        ),
        ((TOKENS,), (), (LOGITS, LOGITS), (B, S), "output names, got `logits` twice"),
        ((TOKENS,), (), (LOGITS,), (B, S, B), "dimension names, got `B` twice"),
        ((TOKENS,), (), (), (B, S), "expected at least one output"),
        ((TOKENS,), (), (LOGITS,), (B,), "`tokens` has the undeclared dimension `S`"),
        ((), (), (LOGITS,), (), "`logits` has the undeclared dimension `B`"),
        ((MASK,), (), (LOGITS,), (B, S), "`logits` has the dimension `B` of no input"),
        (
            (POS,),
            (),
            (TensorSpec("x", "f32", ()),),
            (S,),
            "`pos` has the dimension `S` of no input",
        ),
        ((POS,), (), (TensorSpec("x", "f32", ()),), (), "`pos` has the undeclared dimension `S`"),
        ((INDEX,), (), (LOGITS,), (B,), "`index` has the undeclared dimension `S`"),
        ((TOKENS,), (POOL,), (LOGITS,), (B, S), "`pool` has the undeclared dimension `Pages`"),
        ((TOKENS, DOUBLED), (), (LOGITS,), (B, S), "`x` has the undeclared dimension `2*S`"),
    ],
)
def test_a_signature_that_cannot_be_called_is_refused(
    inputs: Any, states: Any, outputs: Any, dims: Any, expected: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        Signature(inputs, states, outputs, dims)


def test_sizes_of_a_call_give_the_shapes() -> None:
    Signature((TOKENS,), (POOL,), (LOGITS, DOUBLED), (B, S, Dim("Pages", 1, 9)))
    assert resolve((4, "S", "2*S"), {"S": 5}) == (4, 5, 10)
    assert POOL.num_bytes == 6  # of one page


def test_state_bytes_add_up() -> None:
    states = (STATE, StateSpec("pool", "i8", (7,)), StateSpec("flag", "i64", ()))
    signature = Signature((TOKENS,), states, (LOGITS,), (B, S))
    assert [state.num_bytes for state in states] == [12, 7, 8]
    assert signature.state_bytes == 27
    assert SIGNATURE.state_bytes == 0


def test_dimensions_are_found_by_name() -> None:
    assert SIGNATURE.dim("S") is S
    with pytest.raises(KeyError, match="Pages"):
        SIGNATURE.dim("Pages")


def test_shapes_are_shown_as_declared() -> None:
    assert show((2, "S")) == "[2, S]"
    assert show(()) == "[]"
