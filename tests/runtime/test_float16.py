"""Programs that compute in float16, where a mask as a large number overflows and gives NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import llama_runtime
from llama_export.build import build
from llama_export.recipe import Recipe
from llama_runtime import Entry, LoadedBundle, States
from tests.runtime.loading import expected_logits, random_tokens
from tests.tiny import write_tiny

pytestmark = pytest.mark.slow  # it builds bundles of its own

BATCH, MAX_SEQ = 3, 32
SCRATCH = MAX_SEQ - 1
ATOL = 0.03  # some roundings of logits up to 4
ENTRIES = ("prefill_slots", "prefill_packed", "decode_rows", "prefill_paged", "decode_paged")

Ints = list[int]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float16") / "m"
    return write_tiny(folder, dtype=torch.float16, torch_dtype="float16")


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> LoadedBundle:
    output = checkpoint.with_name("bundle")
    recipe = Recipe(
        str(checkpoint), output, ENTRIES, ("pt2",), max_seq=MAX_SEQ, batch=BATCH, page_size=8
    )
    return llama_runtime.load(build(recipe).folder, format="pt2")


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return random_tokens(BATCH, 10)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    return expected_logits(checkpoint, tokens)


def poisoned(entry: Entry, **sizes: int) -> States:
    states = entry.new_states(**sizes)
    for tensor in states.values():
        assert tensor.dtype == torch.float16
        tensor.fill_(1e4)
    return states


def check(logits: torch.Tensor, states: States, wanted: dict[int, torch.Tensor]) -> None:
    """Nothing is NaN or infinite, padding included; the live rows are the oracle's."""
    assert logits.dtype == torch.float16
    assert logits.isfinite().all()
    assert all(tensor.isfinite().all() for tensor in states.values())
    for row, one in wanted.items():
        torch.testing.assert_close(logits[row].float(), one, atol=ATOL, rtol=0)


def ints(values: Ints) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_prompts_of_unequal_length_and_idle_rows(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor
) -> None:
    fill, decode = bundle.entry("prefill_slots"), bundle.entry("decode_rows")
    states = poisoned(fill)
    inputs = {"tokens": tokens, "slots": ints([0, 1, 2]), "lengths": ints([3, 7, 0])}
    wanted = {0: expected[0, 2], 1: expected[1, 6]}
    check(fill.run(states, inputs)[0], states, wanted)
    step = [[int(tokens[0, 3])], [int(tokens[1, 7])], [5]]
    logits = decode.run(states, {"tokens": step, "positions": [3, 7, SCRATCH]})[0]
    check(logits, states, {0: expected[0, 3], 1: expected[1, 7]})


def test_packed_prompts_and_padding(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor
) -> None:
    fill = bundle.entry("prefill_packed")
    states = poisoned(fill)
    inputs = {
        "tokens": torch.cat((tokens[0, :3], tokens[1, :7], ints([5, 5]))),
        "rows": ints([0] * 3 + [1] * 7 + [0, 2]),
        "positions": ints([*range(3), *range(7), SCRATCH, SCRATCH]),
        "segments": ints([0] * 3 + [1] * 7 + [2, 3]),
        "last": ints([2, 9, 11]),
    }
    check(fill.run(states, inputs)[0], states, {0: expected[0, 2], 1: expected[1, 6]})


def test_pages_padding_and_idle_rows(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor
) -> None:
    fill, decode = bundle.entry("prefill_paged"), bundle.entry("decode_paged")
    states = poisoned(fill, PoolPages=5)
    table = torch.tensor([[3, 1], [2, 4], [0, 0]], dtype=torch.int32)
    inputs = {
        "tokens": torch.cat((tokens[0, :3], tokens[1, :9], ints([5, 5]))),
        "positions": ints([*range(3), *range(9), 0, 0]),
        "rows": ints([0] * 3 + [1] * 9 + [0, 2]),
        "slots": ints([*range(24, 27), *range(16, 24), 32, 0, 0]),
        "last": ints([2, 11, 13]),
        "table": table,
    }
    check(fill.run(states, inputs)[0], states, {0: expected[0, 2], 1: expected[1, 8]})
    step = [[int(tokens[0, 3])], [int(tokens[1, 9])], [5]]
    logits = decode.run(states, {"tokens": step, "positions": [3, 9, -1], "table": table})[0]
    check(logits, states, {0: expected[0, 3], 1: expected[1, 9]})
