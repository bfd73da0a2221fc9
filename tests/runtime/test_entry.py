"""Every input is checked before a program runs; a refusal changes nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from llama_artifacts.errors import InputError
from llama_runtime import Entry, LoadedBundle
from tests.runtime.loading import FORMAT_NAMES, SCRATCH, is_same, poisoned, snapshot

Loaded = dict[str, LoadedBundle]
TOKENS = torch.tensor([[3], [4]], dtype=torch.int32)
CHUNK = torch.tensor([[3, 4, 5], [6, 7, 8]], dtype=torch.int32)


def refused(entry: Entry, **inputs: Any) -> str:
    """The message of the refusal; the states must be as they were."""
    states = poisoned(entry) if entry.signature.states else None
    before = snapshot(states or {})
    with pytest.raises(InputError) as caught:
        entry(states, **inputs)
    assert is_same(before, states or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(params=FORMAT_NAMES)
def bundle(request: pytest.FixtureRequest, tiny_loaded: Loaded) -> LoadedBundle:
    return tiny_loaded[request.param]


@pytest.fixture
def decode(bundle: LoadedBundle) -> Entry:
    return bundle.entry("decode")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, ["missing: tokens, pos"]),
        ({"tokens": TOKENS}, ["missing: pos"]),
        ({"tokens": TOKENS, "pos": 0, "mask": 1}, ["unknown: mask"]),
        ({"tokens": TOKENS, "position": 0}, ["missing: pos", "unknown: position"]),
        ({"tokens": TOKENS.long(), "pos": 0}, ["tokens: ", "expected i32", "got i64"]),
        ({"tokens": TOKENS.float(), "pos": 0}, ["tokens: ", "got f32"]),
        ({"tokens": TOKENS.to(torch.uint16), "pos": 0}, ["tokens: ", "got uint16"]),
        ({"tokens": TOKENS.to(torch.complex64), "pos": 0}, ["tokens: ", "got complex64"]),
        ({"tokens": TOKENS.to_sparse(), "pos": 0}, ["tokens: ", "torch.sparse_coo"]),
        ({"tokens": TOKENS.to("meta"), "pos": 0}, ["tokens: ", "on cpu", "on meta"]),
        ({"tokens": CHUNK[:, :1], "pos": 0}, ["tokens: ", "contiguous", "strides (3, 1)"]),
        ({"tokens": TOKENS[:1], "pos": 0}, ["tokens: expected shape [2, 1], got [1, 1]"]),
        ({"tokens": CHUNK, "pos": 0}, ["tokens: expected shape [2, 1], got [2, 3]"]),
        ({"tokens": TOKENS[:, 0], "pos": 0}, ["tokens: expected shape [2, 1], got [2]"]),
        ({"tokens": [], "pos": 0}, ["tokens: expected shape [2, 1], got [0]"]),
        ({"tokens": [[128], [0]], "pos": 0}, ["tokens: expected at most 127, got 128"]),
        ({"tokens": [[0], [-1]], "pos": 0}, ["tokens: expected at least 0, got -1"]),
        ({"tokens": TOKENS, "pos": 255}, ["pos: expected at most 254, got 255"]),
        ({"tokens": TOKENS, "pos": -1}, ["pos: expected at least 0, got -1"]),
        ({"tokens": TOKENS, "pos": [0]}, ["pos: expected shape [], got [1]"]),
        ({"tokens": TOKENS, "pos": torch.tensor(0)}, ["pos: ", "expected i32", "got i64"]),
    ],
)
def test_a_refused_step(decode: Entry, inputs: dict[str, Any], words: list[str]) -> None:
    message = refused(decode, **inputs)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        1.5,
        math.nan,
        True,
        None,
        "1",
        1j,
        2**31,
        2**32 + 5,
        2**64,
        np.int64(2**32 + 5),
        np.float32(1),
        np.uint64(2**63),
        Ellipsis,
        [[1], [2, 3]],
        {},
    ],
    ids=repr,
)
def test_what_is_no_whole_number_is_never_rounded_or_wrapped(decode: Entry, value: object) -> None:
    assert "pos: expected i32 numbers, got " in refused(decode, tokens=TOKENS, pos=value)
    assert "tokens: expected i32 numbers" in refused(decode, tokens=[[value], [value]], pos=0)


@pytest.mark.parametrize(
    "tokens", [[[3], [4]], ((3,), (4,)), TOKENS, TOKENS.numpy(), np.array([[3], [4]], np.int64)]
)
@pytest.mark.parametrize("pos", [7, np.int16(7), torch.tensor(7, dtype=torch.int32)])
def test_numbers_lists_and_arrays_are_taken(decode: Entry, tokens: Any, pos: Any) -> None:
    expected = decode(decode.new_states(), tokens=TOKENS, pos=7)
    actual = decode(decode.new_states(), tokens=tokens, pos=pos)
    assert isinstance(actual, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("num_tokens", "pos", "words"),
    [
        (256, 0, "tokens: expected S from 1 to 255, got 256"),
        (0, 0, "tokens: expected S from 1 to 255, got 0"),
        (3, 253, "pos: expected pos + S - 1 at most 254, got 253 + 3 - 1"),
        (255, 1, "pos: expected pos + S - 1 at most 254, got 1 + 255 - 1"),
        (1, 255, "pos: expected pos + S - 1 at most 254, got 255 + 1 - 1"),
        (1, 2**31 - 1, "pos: expected pos + S - 1 at most 254, got 2147483647 + 1 - 1"),
    ],
)
def test_a_refused_span(bundle: LoadedBundle, num_tokens: int, pos: int, words: str) -> None:
    tokens = torch.zeros(2, num_tokens, dtype=torch.int32)
    assert words in refused(bundle.entry("prefill"), tokens=tokens, pos=pos)


def test_the_last_span_that_fits(bundle: LoadedBundle) -> None:
    prefill = bundle.entry("prefill")
    prefill(prefill.new_states(), tokens=CHUNK, pos=252)


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ([0, 256], "positions: expected at most 255, got 256"),
        ([-1, 0], "positions: expected at least 0, got -1"),
        ([0], "positions: expected shape [2], got [1]"),
        (0, "positions: expected shape [2], got []"),
        (torch.tensor([[1, 0], [2, 0]], dtype=torch.int32)[:, 0], "positions: "),
    ],
)
def test_refused_positions_of_rows(bundle: LoadedBundle, positions: Any, words: str) -> None:
    assert words in refused(bundle.entry("decode_rows"), tokens=TOKENS, positions=positions)


def test_the_scratch_position_is_a_row_s_to_take(bundle: LoadedBundle) -> None:
    entry = bundle.entry("decode_rows")
    entry(entry.new_states(), tokens=TOKENS, positions=[SCRATCH, 0])


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((65, 1), "tokens: expected B from 1 to 64, got 65"),
        ((0, 1), "tokens: expected B from 1 to 64, got 0"),
        ((1, 256), "tokens: expected S from 1 to 255, got 256"),
        ((1, 0), "tokens: expected S from 1 to 255, got 0"),
        ((1,), "tokens: expected shape [B, S], got [1]"),
    ],
)
def test_refused_sizes_of_whole_sequences(
    bundle: LoadedBundle, shape: tuple[int, ...], words: str
) -> None:
    for name in ("forward", "next_token"):
        assert words in refused(bundle.entry(name), tokens=torch.zeros(shape, dtype=torch.int32))


def test_states_left_out(decode: Entry) -> None:
    with pytest.raises(InputError, match="states: `decode` needs its states") as caught:
        decode(tokens=TOKENS, pos=0)
    assert caught.value.hint == "pass entry.new_states()"


@pytest.mark.parametrize("states", [TOKENS, [TOKENS], {"cache.0.key": TOKENS}])
def test_states_given_to_an_entry_without_any(bundle: LoadedBundle, states: Any) -> None:
    with pytest.raises(InputError, match="states: `forward` has no states"):
        bundle.entry("forward")(states, tokens=TOKENS)


def test_an_entry_without_states_takes_an_empty_set(bundle: LoadedBundle) -> None:
    forward = bundle.entry("forward")
    assert len(forward.new_states()) == 0
    forward(forward.new_states(), tokens=TOKENS)
    forward({}, tokens=TOKENS)


def test_plain_tensors_serve_as_states(decode: Entry) -> None:
    own = {name: torch.zeros_like(tensor) for name, tensor in decode.new_states().items()}
    shuffled = dict(reversed(own.items()))
    states = decode.new_states()
    expected = decode(states, tokens=TOKENS, pos=0)
    actual = decode(shuffled, tokens=TOKENS, pos=0)
    assert isinstance(actual, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(actual, expected)
    assert is_same(states, own)
