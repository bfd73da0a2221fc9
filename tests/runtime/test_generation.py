"""Entries that generate in one program, against transformers, which recomputes whole sequences.

Prompts are 180 tokens long, since shorter ones hide faults of positions; states hold a large number
before use, so that a read of what was never written shows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import llama_runtime
from llama_artifacts.errors import InputError
from llama_artifacts.manifest import FORMATS, Format
from llama_runtime import Entry, LoadedBundle, States
from tests.conftest import TINY_MAX_SEQ, TINY_STEPS
from tests.runtime.loading import LOGITS_ATOL, POISON, expected_logits, random_tokens

pytestmark = pytest.mark.slow  # the bundle takes minutes to build

BATCH, NUM_PROMPT = 4, 180
MASK = 0xFFFFFFFF


@pytest.fixture(scope="module", params=FORMATS)
def bundle(request: pytest.FixtureRequest, tiny_packed_bundle: Path) -> LoadedBundle:
    format: Format = request.param
    return llama_runtime.load(tiny_packed_bundle, format=format)


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return random_tokens(BATCH, NUM_PROMPT + 1)


@pytest.fixture(scope="module")
def greedy(tiny_checkpoint: Path, prompt: torch.Tensor) -> torch.Tensor:
    """What transformers goes on with after the prompt, whole sequences recomputed at every step."""
    tokens = prompt
    for _ in range(TINY_STEPS):
        logits = expected_logits(tiny_checkpoint, tokens)[:, -1]
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True).int()), 1)
    return tokens[:, NUM_PROMPT + 1 :]


def filled(bundle: LoadedBundle, entry: Entry, prompt: torch.Tensor) -> States:
    """States that hold the prompt but its last token, everything else poisoned."""
    states = entry.new_states()
    for tensor in states.values():
        tensor.fill_(POISON)
    order = torch.arange(NUM_PROMPT, dtype=torch.int32).repeat(BATCH)
    rows = torch.arange(BATCH, dtype=torch.int32).repeat_interleave(NUM_PROMPT)
    inputs = {
        "tokens": prompt[:, :-1].flatten(),
        "rows": rows,
        "positions": order,
        "segments": rows,
        "last": torch.arange(1, BATCH + 1, dtype=torch.int32) * NUM_PROMPT - 1,
    }
    bundle.entry("prefill_packed").run(states, inputs)
    return states


def begin(prompt: torch.Tensor) -> dict[str, Any]:
    return {"token": prompt[:, -1:].contiguous(), "pos": NUM_PROMPT}


def test_greedy_tokens_and_the_states_after_them(
    bundle: LoadedBundle, prompt: torch.Tensor, greedy: torch.Tensor, tiny_checkpoint: Path
) -> None:
    entry = bundle.entry("generate")
    states = filled(bundle, entry, prompt)
    tokens = entry.run(states, begin(prompt))[0]
    assert torch.equal(tokens, greedy)
    for tensor in states.values():  # Steps positions were written, the next is untouched
        written = (tensor != POISON).all(-1).all(1)
        assert written.sum(-1).tolist() == [NUM_PROMPT + TINY_STEPS] * BATCH
    # A step after it sees what the program has written.
    position = NUM_PROMPT + TINY_STEPS
    inputs = {"tokens": tokens[:, -1:].contiguous(), "positions": [position] * BATCH}
    logits = bundle.entry("decode_rows").run(states, inputs)[0]
    expected = expected_logits(tiny_checkpoint, torch.cat((prompt, greedy), 1))[:, -1]
    torch.testing.assert_close(logits, expected, atol=LOGITS_ATOL, rtol=1e-5)


def test_from_position_zero(bundle: LoadedBundle, tiny_checkpoint: Path) -> None:
    entry = bundle.entry("generate")
    states = entry.new_states()
    for tensor in states.values():
        tensor.fill_(POISON)
    first = random_tokens(BATCH, 1, seed=4)
    tokens = entry.run(states, {"token": first, "pos": 0})[0]
    logits = expected_logits(tiny_checkpoint, torch.cat((first, tokens), 1))
    assert torch.equal(logits[:, :-1].argmax(-1).int(), tokens)


def test_each_row_ends_at_its_own_eos(
    bundle: LoadedBundle, prompt: torch.Tensor, greedy: torch.Tensor
) -> None:
    entry = bundle.entry("generate_until")
    for eos in (int(greedy[0, 4]), int(greedy[2, 0]), int(greedy[3, -1])):
        states = filled(bundle, entry, prompt)
        tokens, count = entry.run(states, {**begin(prompt), "eos": eos})
        for row, wanted in enumerate(greedy.tolist()):
            length = wanted.index(eos) + 1 if eos in wanted else TINY_STEPS
            assert int(count[row]) == length
            assert tokens[row].tolist() == wanted[:length] + [0] * (TINY_STEPS - length)
            for tensor in states.values():  # nothing past the row's end but scratch
                rest = tensor[row, :, NUM_PROMPT + length : TINY_MAX_SEQ - 1]
                assert (rest == POISON).all()


def test_it_stops_when_all_rows_have_ended(bundle: LoadedBundle, prompt: torch.Tensor) -> None:
    """All rows alike: after eos nothing more is computed, so the scratch position stays poisoned."""
    entry = bundle.entry("generate_until")
    same = prompt[:1].expand(BATCH, -1).contiguous()
    states = filled(bundle, entry, same)
    eos = int(bundle.entry("generate").run(filled(bundle, entry, same), begin(same))[0][0, 2])
    tokens, count = entry.run(states, {**begin(same), "eos": eos})
    length = tokens[0].tolist().index(eos) + 1
    assert count.tolist() == [length] * BATCH
    assert not tokens[:, length:].any()


def _threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds on Python's integers, from the paper."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = ((c + k) & MASK for c, k in zip(counter, key, strict=True))
    distances = (13, 15, 26, 6, 17, 29, 16, 24)
    for number in range(20):
        x = (x + y) & MASK
        distance = distances[number % 8]
        y = ((y << distance | y >> (32 - distance)) & MASK) ^ x
        if number % 4 == 3:
            turn = number // 4 + 1
            x = (x + keys[turn % 3]) & MASK
            y = (y + keys[(turn + 1) % 3] + turn) & MASK
    return x, y


def _draw(logits: torch.Tensor, key: tuple[int, int], step: int, temperature: float) -> list[int]:
    """Gumbel-max in Python floats, word row * V + token of the bits of the step's key."""
    step_key = _threefry(key, (0, step))
    tokens = []
    for row, values in enumerate((logits.double() / temperature).tolist()):
        scores = []
        for token, value in enumerate(values):
            high, low = _threefry(step_key, (0, row * len(values) + token))
            uniform = max(((high ^ low) >> 9) / 2**23, 2.0**-126)
            scores.append(value - math.log(-math.log(uniform)))
        tokens.append(scores.index(max(scores)))
    return tokens


@pytest.mark.parametrize(("key", "temperature"), [((0, 42), 1.0), ((MASK, 7), 0.6)])
def test_draws_are_those_of_the_key(
    bundle: LoadedBundle,
    prompt: torch.Tensor,
    tiny_checkpoint: Path,
    key: tuple[int, int],
    temperature: float,
) -> None:
    entry = bundle.entry("sample")
    states = filled(bundle, entry, prompt)
    inputs = {**begin(prompt), "key": list(key), "temperature": temperature}
    tokens = entry.run(states, inputs)[0]
    logits = expected_logits(tiny_checkpoint, torch.cat((prompt, tokens), 1))
    for step in range(TINY_STEPS):
        wanted = _draw(logits[:, NUM_PROMPT + step], key, step, temperature)
        assert tokens[:, step].tolist() == wanted
    again = entry.run(filled(bundle, entry, prompt), inputs)[0]
    assert torch.equal(again, tokens)
    other = entry.run(filled(bundle, entry, prompt), {**inputs, "key": [key[0], key[1] ^ 1]})[0]
    assert not torch.equal(other, tokens)


def test_a_temperature_of_zero_is_greedy(
    bundle: LoadedBundle, prompt: torch.Tensor, greedy: torch.Tensor
) -> None:
    entry = bundle.entry("sample")
    for temperature in (0.0, 1e-6, 1e-45):
        inputs = {**begin(prompt), "key": [1, 2], "temperature": temperature}
        assert torch.equal(entry.run(filled(bundle, entry, prompt), inputs)[0], greedy)


LAST = TINY_MAX_SEQ - 1 - TINY_STEPS


@pytest.mark.parametrize("name", ["generate", "generate_until", "sample"])
def test_the_last_position_from_which_all_tokens_fit(bundle: LoadedBundle, name: str) -> None:
    entry = bundle.entry(name)
    others = {"generate_until": {"eos": 0}, "sample": {"key": [0, 0], "temperature": 1.0}}
    inputs = {"token": [[1]] * BATCH, **others.get(name, {})}
    states = entry.new_states()
    entry.run(states, {**inputs, "pos": LAST})
    before = [tensor.clone() for tensor in states.values()]
    with pytest.raises(InputError, match=f"pos: expected at most {LAST}, got {LAST + 1}"):
        entry.run(states, {**inputs, "pos": LAST + 1})
    assert all(map(torch.equal, before, states.values()))


def test_a_key_is_two_words_of_32_bits(bundle: LoadedBundle) -> None:
    entry = bundle.entry("sample")
    inputs = {"token": [[1]] * BATCH, "pos": 0, "temperature": 1.0}
    for key, message in (([0, MASK + 1], "at most 4294967295"), ([-1, 0], "at least 0")):
        with pytest.raises(InputError, match=f"key: expected {message}"):
            entry.run(entry.new_states(), {**inputs, "key": key})


def test_a_variant_runs_where_its_sizes_fit(tiny_packed_bundle: Path) -> None:
    loaded = llama_runtime.load(tiny_packed_bundle, format="aoti")
    records = [p for p in loaded.manifest.programs if p.variant]
    assert [(p.label, p.format) for p in records] == [("decode_paged:Rows=1", "aoti")]
    entry = loaded.entry("decode_paged")
    (variant,) = entry._variants
    calls: list[str] = []
    general, special = entry._program.run, variant.program.run
    entry._program.run = lambda *args: calls.append("general") or general(*args)  # type: ignore
    variant.program.run = lambda *args: calls.append("Rows=1") or special(*args)  # type: ignore
    states = entry.new_states(PoolPages=4)
    entry.run(states, {"tokens": [[5]], "positions": [0], "table": [[1]]})
    two = {"tokens": [[5], [5]], "positions": [0, 0], "table": [[2], [3]]}
    entry.run(states, two)
    assert calls == ["Rows=1", "general"]
    for tensor in states.values():  # both wrote the same
        torch.testing.assert_close(tensor[1], tensor[2], atol=1e-5, rtol=1e-5)
