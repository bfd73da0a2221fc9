"""Every entry in every format against transformers, and what a program may touch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llama_runtime import Entry, LoadedBundle
from tests.runtime.loading import (
    BATCH,
    FORMAT_NAMES,
    LOGITS_ATOL,
    MAX_SEQ,
    SCRATCH,
    expected_logits,
    is_same,
    poisoned,
    random_tokens,
    snapshot,
    written,
)

Loaded = dict[str, LoadedBundle]
each_format = pytest.mark.parametrize("format", FORMAT_NAMES)
CAPACITY = MAX_SEQ - 1
NUM_TOKENS = 200


def assert_near(actual: object, expected: torch.Tensor) -> None:
    assert isinstance(actual, torch.Tensor)
    torch.testing.assert_close(actual, expected, atol=LOGITS_ATOL, rtol=1e-5)


@each_format
@pytest.mark.parametrize(
    ("num_rows", "num_tokens"), [(1, 1), (1, CAPACITY), (2, 2), (3, 101), (64, 1), (64, CAPACITY)]
)
def test_whole_sequences_at_their_smallest_and_largest(
    tiny_loaded: Loaded, tiny_checkpoint: Path, format: str, num_rows: int, num_tokens: int
) -> None:
    tokens = random_tokens(num_rows, num_tokens)
    expected = expected_logits(tiny_checkpoint, tokens)
    assert_near(tiny_loaded[format].entry("forward")(tokens=tokens), expected)
    assert_near(tiny_loaded[format].entry("next_token")(tokens=tokens), expected[:, -1])


@each_format
def test_decode_over_many_positions(
    tiny_loaded: Loaded, tiny_checkpoint: Path, format: str
) -> None:
    decode = tiny_loaded[format].entry("decode")
    tokens = random_tokens(BATCH, NUM_TOKENS)
    states = poisoned(decode)
    logits = [decode(states, tokens=tokens[:, i : i + 1].clone(), pos=i) for i in range(NUM_TOKENS)]
    assert_near(torch.stack(logits, 1), expected_logits(tiny_checkpoint, tokens))


@each_format
def test_decode_at_the_last_position(
    tiny_loaded: Loaded, tiny_checkpoint: Path, format: str
) -> None:
    prefill, decode = (tiny_loaded[format].entry(name) for name in ("prefill", "decode"))
    tokens = random_tokens(BATCH, CAPACITY)
    states = poisoned(prefill)
    prefill(states, tokens=tokens[:, :-1].clone(), pos=0)
    actual = decode(states, tokens=tokens[:, -1:].clone(), pos=CAPACITY - 1)
    assert_near(actual, expected_logits(tiny_checkpoint, tokens)[:, -1])


@each_format
@pytest.mark.parametrize("chunk_len", [1, 7, 37, 128, NUM_TOKENS, CAPACITY])
def test_prefill_in_chunks(
    tiny_loaded: Loaded, tiny_checkpoint: Path, format: str, chunk_len: int
) -> None:
    prefill = tiny_loaded[format].entry("prefill")
    num_tokens = 20 if chunk_len == 1 else max(chunk_len, NUM_TOKENS)
    tokens = random_tokens(BATCH, num_tokens)
    expected = expected_logits(tiny_checkpoint, tokens)
    states, position = poisoned(prefill), 0
    for chunk in tokens.split(chunk_len, dim=1):
        logits = prefill(states, tokens=chunk.contiguous(), pos=position)
        position += chunk.shape[1]
        assert_near(logits, expected[:, position - 1])


@each_format
def test_rows_at_positions_of_their_own_and_idle_rows(
    tiny_loaded: Loaded, tiny_checkpoint: Path, format: str
) -> None:
    """Row 1 starts 37 steps late and is idle before; row 0 is idle when it has ended."""
    num_tokens = 80
    entry = tiny_loaded[format].entry("decode_rows")
    tokens = random_tokens(BATCH, num_tokens)
    expected = expected_logits(tiny_checkpoint, tokens)
    states = poisoned(entry)
    for step in range(num_tokens + 37):
        places = [step, step - 37]
        live = [row for row in range(BATCH) if 0 <= places[row] < num_tokens]
        fed = [[int(tokens[row, places[row]]) if row in live else 5] for row in range(BATCH)]
        positions = [places[row] if row in live else SCRATCH for row in range(BATCH)]
        logits = entry(states, tokens=fed, positions=positions)
        assert isinstance(logits, torch.Tensor)
        for row in live:
            assert_near(logits[row], expected[row, places[row]])


@each_format
def test_another_rows_content_changes_nothing(tiny_loaded: Loaded, format: str) -> None:
    bundle = tiny_loaded[format]
    tokens, other = random_tokens(BATCH, 40), random_tokens(BATCH, 40, seed=2)
    other[0] = tokens[0]
    assert torch.equal(run_all(bundle, tokens)[0], run_all(bundle, other)[0])
    assert not torch.equal(run_all(bundle, tokens)[1], run_all(bundle, other)[1])


def run_all(bundle: LoadedBundle, tokens: torch.Tensor) -> torch.Tensor:
    """Every logit [Batch, n, V] and state of the entries with and without states."""
    forward, prefill, decode, rows = (
        bundle.entry(name) for name in ("forward", "prefill", "decode", "decode_rows")
    )
    states = poisoned(prefill)
    num_tokens = tokens.shape[1]
    parts = [forward(tokens=tokens)]
    parts += [prefill(states, tokens=tokens[:, :-2].clone(), pos=0)]
    parts += [decode(states, tokens=tokens[:, -2:-1].clone(), pos=num_tokens - 2)]
    parts += [rows(states, tokens=tokens[:, -1:].clone(), positions=[num_tokens - 1] * BATCH)]
    parts += states.tensors()
    return torch.cat([part.flatten(1) for part in parts if isinstance(part, torch.Tensor)], 1)


@each_format
@pytest.mark.parametrize("position", [0, 5, 100, CAPACITY - 1])
def test_a_step_writes_its_position_of_every_layer_alone(
    tiny_loaded: Loaded, format: str, position: int
) -> None:
    decode = tiny_loaded[format].entry("decode")
    states = zeroed(decode)
    before = snapshot(states)
    decode(states, tokens=[[3], [4]], pos=position)
    assert all(p == {(0, position), (1, position)} for p in written(before, states).values())


@each_format
def test_prefill_writes_its_span_alone(tiny_loaded: Loaded, format: str) -> None:
    prefill = tiny_loaded[format].entry("prefill")
    states = zeroed(prefill)
    before = snapshot(states)
    prefill(states, tokens=random_tokens(BATCH, 5), pos=11)
    span = {(row, position) for row in range(BATCH) for position in range(11, 16)}
    assert all(places == span for places in written(before, states).values())


@each_format
def test_an_idle_row_writes_the_scratch_position_alone(tiny_loaded: Loaded, format: str) -> None:
    entry = tiny_loaded[format].entry("decode_rows")
    states = zeroed(entry)
    before = snapshot(states)
    entry(states, tokens=[[3], [4]], positions=[7, SCRATCH])
    assert all(p == {(0, 7), (1, SCRATCH)} for p in written(before, states).values())


@each_format
def test_what_an_idle_row_holds_reaches_no_other(tiny_loaded: Loaded, format: str) -> None:
    """Poison in the positions not yet written, the scratch one too, changes no bit."""
    entry = tiny_loaded[format].entry("decode_rows")
    results = []
    for fill in (0.0, 1e4):
        states = entry.new_states()
        for tensor in states.values():
            tensor.fill_(fill)
        for position in range(6):
            logits = entry(states, tokens=[[9], [4]], positions=[position, SCRATCH])
        assert isinstance(logits, torch.Tensor)
        results.append(logits[0])
    assert torch.equal(*results)


@each_format
def test_results_belong_to_the_caller(tiny_loaded: Loaded, format: str) -> None:
    entry = tiny_loaded[format].entry("next_token")
    first = entry(tokens=[[1, 2, 3]])
    assert isinstance(first, torch.Tensor)
    kept = first.clone()
    entry(tokens=[[4, 5, 6]])
    assert torch.equal(first, kept)


@each_format
def test_sets_of_states_take_turns(tiny_loaded: Loaded, format: str) -> None:
    decode = tiny_loaded[format].entry("decode")
    alone, one, two = (poisoned(decode) for _ in range(3))
    for position, token in enumerate((7, 8, 9)):
        expected = decode(alone, tokens=[[token], [token]], pos=position)
        actual = decode(one, tokens=[[token], [token]], pos=position)
        decode(two, tokens=[[50], [60]], pos=position)
        assert isinstance(expected, torch.Tensor)
        assert isinstance(actual, torch.Tensor)
        assert torch.equal(actual, expected)
    assert is_same(alone, one)


def zeroed(entry: Entry) -> dict[str, torch.Tensor]:
    return dict(entry.new_states())
