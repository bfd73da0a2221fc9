"""Slot, packed and paged entries against transformers, which sees each sequence alone and whole.

Sequences are 200 tokens long, since shorter ones hide faults of positions; every state holds a large
number before use, so that a read of what was never written shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import llama_runtime
from llama_artifacts.errors import InputError
from llama_artifacts.manifest import FORMATS, Format
from llama_runtime import LoadedBundle
from tests.runtime.loading import POISON, expected_logits, poisoned, random_tokens, snapshot
from tests.runtime.packing import (
    BATCH,
    PAGE_SIZE,
    SCRATCH,
    close,
    ints,
    packed,
    paged,
    pool_slots,
    prompts,
    scattered,
    step,
)

pytestmark = pytest.mark.slow  # the bundle takes minutes to build
NUM_TOKENS = 200


@pytest.fixture(scope="module", params=FORMATS)
def bundle(request: pytest.FixtureRequest, tiny_packed_bundle: Path) -> LoadedBundle:
    format: Format = request.param
    return llama_runtime.load(tiny_packed_bundle, format=format)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return random_tokens(BATCH, NUM_TOKENS)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    return expected_logits(tiny_checkpoint, tokens)


@pytest.mark.parametrize("lengths", [(1, 120, 199), (199, 16, 17)])
def test_prompts_in_slots_go_on_row_by_row(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor, lengths: tuple[int, ...]
) -> None:
    fill, decode = bundle.entry("prefill_slots"), bundle.entry("decode_rows")
    states = poisoned(fill)
    slots = (2, 0, 3)
    inputs = {"tokens": tokens[:3], "slots": ints(slots), "lengths": ints(lengths)}
    logits = fill.run(states, inputs)[0]
    for prompt, length in enumerate(lengths):
        close(logits[prompt], expected[prompt, length - 1])
    by_row = tokens[[1, 3, 0, 2]]  # which prompt each row of the cache holds
    at = dict(zip(slots, lengths, strict=True))
    step_tokens, positions = step(by_row, at)
    logits = decode.run(states, {"tokens": step_tokens, "positions": positions})[0]
    for prompt, slot in enumerate(slots):
        close(logits[slot], expected[prompt, lengths[prompt]])


def test_padding_of_slots_writes_scratch_alone(bundle: LoadedBundle, tokens: torch.Tensor) -> None:
    fill = bundle.entry("prefill_slots")
    states = poisoned(fill)
    inputs = {"tokens": tokens[:2], "slots": ints([1, 2]), "lengths": ints([5, 0])}
    fill.run(states, inputs)
    for tensor in states.values():
        written = (tensor != POISON).any(-1).any(1).nonzero().tolist()
        assert written == [*([1, p] for p in range(5)), [1, SCRATCH], [2, SCRATCH]]


@pytest.mark.parametrize("lengths", [{0: 40, 2: 150, 3: 1}, {3: 199, 1: 15}])
def test_packed_prompts_go_on_row_by_row(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor, lengths: dict[int, int]
) -> None:
    fill, decode = bundle.entry("prefill_packed"), bundle.entry("decode_rows")
    states = poisoned(fill)
    logits = fill.run(states, prompts(tokens, lengths, padding=3))[0]
    for row, length in lengths.items():
        close(logits[row], expected[row, length - 1])
    step_tokens, positions = step(tokens, lengths)
    logits = decode.run(states, {"tokens": step_tokens, "positions": positions})[0]
    for row, length in lengths.items():
        close(logits[row], expected[row, length])


def test_a_step_with_prompts_and_steps(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor
) -> None:
    entry = bundle.entry("step_packed")
    states = poisoned(entry)
    idle_tokens, idle = step(tokens, {})
    first = {0: 60, 1: 130}
    entry.run(
        states, {**prompts(tokens, first), "step_tokens": idle_tokens, "step_positions": idle}
    )
    step_tokens, positions = step(tokens, first)
    inputs = {
        **prompts(tokens, {3: 77}, 2),
        "step_tokens": step_tokens,
        "step_positions": positions,
    }
    logits = entry.run(states, inputs)[0]
    close(logits[3], expected[3, 76])
    close(logits[BATCH + 0], expected[0, 60])
    close(logits[BATCH + 1], expected[1, 130])


def test_a_neighbour_changes_no_bit_of_a_packed_prompt(
    bundle: LoadedBundle, tokens: torch.Tensor
) -> None:
    entry = bundle.entry("prefill_packed")
    lengths = {0: 50, 1: 70}
    other = tokens.clone()
    other[0] = (other[0] + 1) % 128
    states, changed = poisoned(entry), poisoned(entry)
    logits = entry.run(states, prompts(tokens, lengths))[0]
    others = entry.run(changed, prompts(other, lengths))[0]
    assert torch.equal(logits[1], others[1])
    assert not torch.equal(logits[0], others[0])
    for name, tensor in states.items():
        assert torch.equal(tensor[1], changed[name][1])


def test_training_entries(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor
) -> None:
    parts = [(2, 0, 150), (0, 0, 33), (3, 0, 1)]
    inputs = packed(tokens, parts)
    rows, positions = inputs.pop("rows").long(), inputs["positions"].long()
    inputs["segments"] = rows.int()
    targets = random_tokens(len(rows), seed=3).long()
    weights = torch.linspace(-1, 2, len(rows))
    wanted = expected[rows, positions].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    log_probs = bundle.entry("log_probs_packed").run(None, {**inputs, "targets": targets})[0]
    close(log_probs, wanted)
    loss = bundle.entry("loss_packed").run(
        None, {**inputs, "targets": targets, "weights": weights}
    )[0]
    torch.testing.assert_close(loss, -(weights * wanted).sum(), rtol=1e-5, atol=1e-4)
    hidden = bundle.entry("hidden_packed").run(None, inputs)[0]
    head = bundle.weights["lm_head.weight"]
    close(hidden @ head.T, expected[rows, positions])


def test_paged_prompts_in_chunks_then_steps(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor
) -> None:
    fill, decode = bundle.entry("prefill_paged"), bundle.entry("decode_paged")
    table = scattered(3, 13)
    states = poisoned(fill, PoolPages=40)
    fill.run(states, paged(tokens, table, [(0, 0, 90), (2, 0, 15)]))
    logits = fill.run(
        states, paged(tokens, table, [(2, 15, 33), (0, 90, 199), (1, 0, 16)], padding=2)
    )[0]
    for row, length in enumerate((199, 16, 33)):
        close(logits[row], expected[row, length - 1])
    positions = ints([199, 16, 33])
    step_tokens = tokens[torch.arange(3), positions.long()][:, None].contiguous()
    logits = decode.run(states, {"tokens": step_tokens, "positions": positions, "table": table})[0]
    close(logits, expected[torch.arange(3), positions.long()])


def test_every_length_on_a_recycled_pool(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor
) -> None:
    decode = bundle.entry("decode_paged")
    states = poisoned(decode, PoolPages=5)
    for seed in range(2):  # the second time the pages hold another sequence
        table = scattered(1, 3, seed)
        for position in range(48):
            inputs = {
                "tokens": tokens[seed, position].reshape(1, 1),
                "positions": ints([position]),
                "table": table[:, : position // PAGE_SIZE + 1].contiguous(),
            }
            close(decode.run(states, inputs)[0][0], expected[seed, position])


def test_a_shared_prefix_page(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor
) -> None:
    fill = bundle.entry("prefill_paged")
    states = poisoned(fill, PoolPages=9)
    twice = torch.cat((tokens[:1], tokens[:1]))
    table = ints([3, 5, 1, 3, 7, 2]).reshape(2, 3)
    fill.run(states, paged(twice, table[:1], [(0, 0, 40)]))
    logits = fill.run(states, paged(twice, table, [(1, 16, 37)]))[0]
    close(logits[1], expected[0, 36])


def test_a_mixed_step_over_pages(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor
) -> None:
    entry = bundle.entry("step_paged")
    table = scattered(4, 13)
    states = poisoned(entry, PoolPages=60)
    idle = {"step_tokens": torch.zeros(4, 1, dtype=torch.int32), "step_positions": ints([-1] * 4)}
    entry.run(states, {**paged(tokens, table, [(0, 0, 31), (1, 0, 160)]), **idle})
    before = snapshot(states)
    inputs = {
        **paged(tokens, table, [(2, 0, 20), (3, 0, 1)], padding=1),
        "step_tokens": ints([int(tokens[0, 31]), int(tokens[1, 160]), 0, 0])[:, None],
        "step_positions": ints([31, 160, -1, -1]),
    }
    logits = entry.run(states, inputs)[0]
    close(logits[2], expected[2, 19])
    close(logits[3], expected[3, 0])
    close(logits[4:6], torch.stack((expected[0, 31], expected[1, 160])))
    for name, tensor in states.items():
        changed = (tensor != before[name]).any(-1).any(1)  # [pages, places]
        slots = {int(slot) for slot in inputs["slots"]}
        slots |= {int(table[0, 1]) * 16 + 15, int(table[1, 10]) * 16}
        assert {int(page) * 16 + int(place) for page, place in changed.nonzero()} <= slots | {0}


def test_a_neighbour_changes_no_bit_of_a_paged_row(
    bundle: LoadedBundle, tokens: torch.Tensor
) -> None:
    fill, decode = bundle.entry("prefill_paged"), bundle.entry("decode_paged")
    table = scattered(2, 4)
    other = tokens.clone()
    other[0] = (other[0] + 1) % 128
    results = []
    for content in (tokens, other):
        states = poisoned(fill, PoolPages=9)
        fill.run(states, paged(content, table, [(0, 0, 33), (1, 0, 47)]))
        step_tokens = torch.stack((content[0, 33:34], content[1, 47:48]))
        inputs = {"tokens": step_tokens, "positions": ints([33, 47]), "table": table}
        results.append(decode.run(states, inputs)[0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("idle_page", [0, 9], ids=["no page", "a page of another row"])
def test_padding_of_a_full_pool_leaves_every_live_slot(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor, idle_page: int
) -> None:
    """Three rows own every page but the scratch one, the last page too; the fourth is padding."""
    fill, decode = bundle.entry("prefill_paged"), bundle.entry("decode_paged")
    table = torch.cat((scattered(3, 3), torch.full((1, 3), idle_page, dtype=torch.int32)))
    states = poisoned(fill, PoolPages=10)
    prompts_of_47 = paged(tokens, table, [(row, 0, 47) for row in range(3)], padding=5)
    fill.run(states, prompts_of_47)
    assert pool_slots(states) == {0, *prompts_of_47["slots"].tolist()}
    before = snapshot(states)
    inputs = {
        "tokens": torch.cat((tokens[:3, 47], ints([5])))[:, None].contiguous(),
        "positions": ints([47, 47, 47, -1]),
        "table": table,
    }
    logits = decode.run(states, inputs)[0]
    close(logits[:3], expected[:3, 47])
    assert logits.isfinite().all()
    last = {int(page) * PAGE_SIZE + PAGE_SIZE - 1 for page in table[:3, 2]}
    assert pool_slots(states, before) <= {0, *last}
    assert pool_slots(states) == {0, *range(PAGE_SIZE, 10 * PAGE_SIZE)}
    assert all(tensor.isfinite().all() for tensor in states.values())


@pytest.mark.parametrize("name", ["decode_rows", "prefill_packed", "step_packed"])
def test_padding_beside_full_rows_leaves_every_live_position(
    bundle: LoadedBundle, tokens: torch.Tensor, name: str
) -> None:
    entry = bundle.entry(name)
    states = entry.new_states()
    generator = torch.Generator().manual_seed(5)
    for tensor in states.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    before = snapshot(states)
    step_tokens, idle = step(tokens, {})
    inputs = {"tokens": step_tokens, "positions": idle}
    if name != "decode_rows":
        inputs = {
            "tokens": tokens[0, :6].clone(),
            "rows": ints([0, 3, 0, 3, 1, 2]),
            "positions": ints([SCRATCH] * 6),
            "segments": ints([0, 0, 1, 2, 3, 3]),
            "last": ints([0] * BATCH),
        }
    if name == "step_packed":
        inputs |= {"step_tokens": step_tokens, "step_positions": idle}
    logits = entry.run(states, inputs)[0]
    assert logits.isfinite().all()
    for state, tensor in states.items():
        assert torch.equal(tensor[:, :, :SCRATCH], before[state][:, :, :SCRATCH])
        assert not torch.equal(tensor, before[state])
        assert tensor.isfinite().all()


@pytest.mark.parametrize("rows", [(1,), (0, 1), (1, 0), (3, 2, 1, 0)])
def test_company_and_its_order_change_no_result(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor, rows: tuple[int, ...]
) -> None:
    """The oracle sees each sequence alone."""
    fill, decode = bundle.entry("prefill_paged"), bundle.entry("decode_paged")
    mine, lengths = tokens[list(rows)], [(33, 150, 16, 1)[row] for row in rows]
    table = scattered(len(rows), 10)
    states = poisoned(fill, PoolPages=41)
    parts = [(row, 0, length) for row, length in enumerate(lengths)]
    logits = fill.run(states, paged(mine, table, parts))[0]
    places = torch.tensor(rows), torch.tensor(lengths)
    close(logits, expected[places[0], places[1] - 1])
    step_tokens = mine[torch.arange(len(rows)), places[1]][:, None].contiguous()
    inputs = {"tokens": step_tokens, "positions": ints(lengths), "table": table}
    close(decode.run(states, inputs)[0], expected[places])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": [48]}, "positions: expected at most 47, got 48"),
        ({"positions": [-2]}, "positions: expected at least -1, got -2"),
        ({"table": [[1, 2, 9]]}, "table: expected at most 8, got 9"),
        ({"table": [[1, 2, -1]]}, "table: expected at least 0, got -1"),
        ({"tokens": [[1], [2]]}, "expected Rows = 2"),
    ],
)
def test_what_is_out_of_the_pool_is_refused(
    bundle: LoadedBundle, change: dict[str, list[int]], message: str
) -> None:
    decode = bundle.entry("decode_paged")
    states = decode.new_states(PoolPages=9)
    inputs = {"tokens": [[1]], "positions": [4], "table": [[1, 2, 3]], **change}
    with pytest.raises(InputError, match=message):
        decode.run(states, inputs)
    assert not any(tensor.any() for tensor in states.values())


def test_a_pool_needs_its_number_of_pages(bundle: LoadedBundle) -> None:
    decode = bundle.entry("decode_paged")
    with pytest.raises(InputError, match="expected PoolPages for new states, got none"):
        decode.new_states()
    with pytest.raises(InputError, match="expected PoolPages from 1 to"):
        decode.new_states(PoolPages=0)
    with pytest.raises(InputError, match="expected no sizes for new states, got PoolPages"):
        bundle.entry("decode_rows").new_states(PoolPages=4)
