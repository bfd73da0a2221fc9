"""The serving entries on a real model: every way to feed one prompt gives the same tokens.

Building the programs takes minutes, so that only `make test-long` runs these tests. It takes the
portable programs; `LLAMA_EXPORT_TEST_FORMATS=pt2,aoti,onnx make test-long` takes all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import llama_runtime
from llama_artifacts.manifest import Format
from llama_runtime import Entry, LoadedBundle, States
from tests.end_to_end.oracle import Oracle
from tests.end_to_end.texts import TEXT

pytestmark = [pytest.mark.slow, pytest.mark.long]

_LOG = logging.getLogger(__name__)

FORMATS = tuple(os.environ.get("LLAMA_EXPORT_TEST_FORMATS", "pt2").split(","))
ENTRIES = (
    *("prefill_slots", "prefill_packed", "step_packed", "decode_rows"),
    *("serving", "generate<15>", "log_probs_packed"),
)
BATCH, MAX_SEQ, PAGE_LEN, POISON = 3, 512, 16, 1e4
SCRATCH = MAX_SEQ - 1
NUM_NEW, NUM_PAGES = 16, 12
ATOL = 2e-4

Prompts = list[list[int]]
Table = torch.Tensor


@pytest.fixture(scope="module", params=FORMATS)
def bundle(
    request: pytest.FixtureRequest,
    smollm2_gguf: Path,
    cli: Callable[..., object],
    tmp_path_factory: pytest.TempPathFactory,
) -> LoadedBundle:
    format: Format = request.param
    output = tmp_path_factory.mktemp("serving") / format
    entries = [word for name in ENTRIES for word in ("--entry", name)]
    sizes = ("--batch", BATCH, "--max-seq", MAX_SEQ, "--page-size", PAGE_LEN)
    done = cli("build", smollm2_gguf, "-o", output, "--dtype", "f32", "--format", format,
               *entries, *sizes)  # fmt: skip
    assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    return llama_runtime.load(output, format=format)


@pytest.fixture(scope="module")
def prompts(bundle: LoadedBundle) -> Prompts:
    """The prompt that is followed, and two others."""
    messages = [{"role": "user", "content": f"Sum this up in one sentence:\n{TEXT[:500]}"}]
    prompt = bundle.tokenizer.encode_chat(messages)
    assert 100 < len(prompt) < NUM_PAGES * PAGE_LEN - NUM_NEW
    return [prompt, bundle.tokenizer.encode(TEXT[700:900]), bundle.tokenizer.encode(TEXT[900:930])]


@pytest.fixture(scope="module")
def expected(oracle_f32: Oracle, prompts: Prompts) -> tuple[torch.Tensor, list[int]]:
    """Logits after the prompt, and the greedy tokens after it."""
    logits = oracle_f32.logits(prompts[0])[-1]
    return logits, oracle_f32.greedy(prompts[0], max_new=NUM_NEW)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def new_states(entry: Entry) -> States:
    is_pool = "PoolPages" in {dim.name for dim in entry.signature.dims}
    states = entry.new_states(**({"PoolPages": BATCH * NUM_PAGES + 1} if is_pool else {}))
    for tensor in states.values():
        tensor.fill_(POISON)
    return states


def follow_rows(bundle: LoadedBundle, states: States, row: int, token: int, at: int) -> list[int]:
    """Greedy tokens of one row from the token at a position; the other rows are idle."""
    tokens, entry = [token], bundle.entry("decode_rows")
    while len(tokens) < NUM_NEW:
        positions = [SCRATCH] * BATCH
        positions[row] = at + len(tokens) - 1
        step = {"tokens": [[tokens[-1]]] * BATCH, "positions": positions}
        tokens.append(int(entry.run(states, step)[0][row].argmax()))
    return tokens


def follow_pages(
    bundle: LoadedBundle, states: States, table: Table, token: int, at: int
) -> list[int]:
    tokens, entry = [token], bundle.entry("decode_paged")
    while len(tokens) < NUM_NEW:
        step = {"tokens": [[tokens[-1]]], "positions": [at + len(tokens) - 1], "table": table[:1]}
        tokens.append(int(entry.run(states, step)[0][0].argmax()))
    return tokens


def packed(parts: list[tuple[int, list[int], int]]) -> dict[str, torch.Tensor]:
    """Tokens of (row, tokens, first position), one part after the other."""
    return {
        "tokens": ints([token for _, tokens, _ in parts for token in tokens]),
        "rows": ints([row for row, tokens, _ in parts for _ in tokens]),
        "positions": ints([first + i for _, tokens, first in parts for i in range(len(tokens))]),
    }


def prompts_of(parts: list[tuple[int, list[int], int]]) -> dict[str, torch.Tensor]:
    inputs = packed(parts)
    ends = {int(row): index for index, row in enumerate(inputs["rows"])}
    last = ints([ends.get(row, 0) for row in range(BATCH)])
    return {**inputs, "segments": inputs["rows"], "last": last}


def scattered() -> Table:
    order = torch.randperm(BATCH * NUM_PAGES, generator=torch.Generator().manual_seed(3))
    return (order + 1).reshape(BATCH, NUM_PAGES).int()


def paged(parts: list[tuple[int, list[int], int]], table: Table) -> dict[str, torch.Tensor]:
    inputs = packed(parts)
    rows, positions = inputs["rows"].long(), inputs["positions"].long()
    slots = table[rows, positions // PAGE_LEN] * PAGE_LEN + positions % PAGE_LEN
    ends = {int(row): index for index, row in enumerate(rows)}
    last = ints([ends.get(row, 0) for row in range(len(table))])
    return {**inputs, "slots": slots.int(), "last": last, "table": table}


Way = Callable[[LoadedBundle, Prompts], tuple[torch.Tensor, list[int]]]


def in_slots(bundle: LoadedBundle, prompts: Prompts) -> tuple[torch.Tensor, list[int]]:
    entry = bundle.entry("prefill_slots")
    states, width = new_states(entry), max(map(len, prompts))
    inputs = {
        "tokens": [prompt + [0] * (width - len(prompt)) for prompt in prompts],
        "slots": [2, 0, 1],
        "lengths": [len(prompt) for prompt in prompts],
    }
    logits = entry.run(states, inputs)[0][0]
    return logits, follow_rows(bundle, states, 2, int(logits.argmax()), len(prompts[0]))


def packed_with_others(bundle: LoadedBundle, prompts: Prompts) -> tuple[torch.Tensor, list[int]]:
    entry = bundle.entry("prefill_packed")
    states = new_states(entry)
    parts = [(0, prompts[1], 0), (1, prompts[0], 0), (2, prompts[2], 0)]
    logits = entry.run(states, prompts_of(parts))[0][1]
    return logits, follow_rows(bundle, states, 1, int(logits.argmax()), len(prompts[0]))


def beside_a_step(bundle: LoadedBundle, prompts: Prompts) -> tuple[torch.Tensor, list[int]]:
    entry = bundle.entry("step_packed")
    states = new_states(entry)
    idle = {"step_tokens": [[0]] * BATCH, "step_positions": [SCRATCH] * BATCH}
    entry.run(states, {**prompts_of([(0, prompts[1], 0)]), **idle})
    step = {"step_tokens": [[7]] * BATCH, "step_positions": [len(prompts[1]), SCRATCH, SCRATCH]}
    logits = entry.run(states, {**prompts_of([(2, prompts[0], 0)]), **step})[0][2]
    return logits, follow_rows(bundle, states, 2, int(logits.argmax()), len(prompts[0]))


def step_by_step(bundle: LoadedBundle, prompts: Prompts) -> tuple[torch.Tensor, list[int]]:
    entry = bundle.entry("decode_rows")
    states = new_states(entry)
    for position, token in enumerate(prompts[0]):
        step = {"tokens": [[token]] * BATCH, "positions": [position, SCRATCH, SCRATCH]}
        logits = entry.run(states, step)[0][0]
    return logits, follow_rows(bundle, states, 0, int(logits.argmax()), len(prompts[0]))


def over_pages(bundle: LoadedBundle, prompts: Prompts) -> tuple[torch.Tensor, list[int]]:
    entry, table = bundle.entry("prefill_paged"), scattered()
    states = new_states(entry)
    parts = [(1, prompts[1], 0), (0, prompts[0], 0), (2, prompts[2], 0)]
    logits = entry.run(states, paged(parts, table))[0][0]
    return logits, follow_pages(bundle, states, table, int(logits.argmax()), len(prompts[0]))


def in_chunks(bundle: LoadedBundle, prompts: Prompts) -> tuple[torch.Tensor, list[int]]:
    entry, table = bundle.entry("prefill_paged"), scattered()
    states, prompt = new_states(entry), prompts[0]
    entry.run(states, paged([(0, prompt[:37], 0)], table))
    entry.run(states, paged([(1, prompts[1], 0), (0, prompt[37:90], 37)], table))
    logits = entry.run(states, paged([(0, prompt[90:], 90)], table))[0][0]
    return logits, follow_pages(bundle, states, table, int(logits.argmax()), len(prompt))


def after_a_shared_prefix(bundle: LoadedBundle, prompts: Prompts) -> tuple[torch.Tensor, list[int]]:
    entry, table = bundle.entry("prefill_paged"), scattered()
    states, prompt, num_shared = new_states(entry), prompts[0], 3
    shared = prompt[: num_shared * PAGE_LEN]
    entry.run(states, paged([(1, shared + prompts[1][:40], 0)], table))
    table[0, :num_shared] = table[1, :num_shared]
    rest = [(0, prompt[len(shared) :], len(shared))]
    logits = entry.run(states, paged(rest, table))[0][0]
    return logits, follow_pages(bundle, states, table, int(logits.argmax()), len(prompt))


def beside_a_paged_step(bundle: LoadedBundle, prompts: Prompts) -> tuple[torch.Tensor, list[int]]:
    entry, table = bundle.entry("step_paged"), scattered()
    states = new_states(entry)
    idle = {"step_tokens": [[0]] * BATCH, "step_positions": [-1] * BATCH}
    entry.run(states, {**paged([(1, prompts[1], 0)], table), **idle})
    step = {"step_tokens": [[7]] * BATCH, "step_positions": [-1, len(prompts[1]), -1]}
    logits = entry.run(states, {**paged([(0, prompts[0], 0)], table), **step})[0][0]
    return logits, follow_pages(bundle, states, table, int(logits.argmax()), len(prompts[0]))


def step_by_paged_step(bundle: LoadedBundle, prompts: Prompts) -> tuple[torch.Tensor, list[int]]:
    entry, table = bundle.entry("decode_paged"), scattered()
    states = new_states(entry)
    for position, token in enumerate(prompts[0]):
        step = {"tokens": [[token]], "positions": [position], "table": table[:1]}
        logits = entry.run(states, step)[0][0]
    return logits, follow_pages(bundle, states, table, int(logits.argmax()), len(prompts[0]))


def in_one_loop(bundle: LoadedBundle, prompts: Prompts) -> tuple[torch.Tensor, list[int]]:
    entry, fill = bundle.entry("generate"), bundle.entry("prefill_packed")
    states = new_states(fill)
    parts = [(row, prompts[0], 0) for row in range(BATCH)]
    logits = fill.run(states, prompts_of(parts))[0][1]
    first = int(logits.argmax())
    start = {"token": [[first]] * BATCH, "pos": len(prompts[0])}
    return logits, [first, *entry.run(states, start)[0][1].tolist()]


WAYS: tuple[Way, ...] = (
    in_slots,
    packed_with_others,
    beside_a_step,
    step_by_step,
    over_pages,
    in_chunks,
    after_a_shared_prefix,
    beside_a_paged_step,
    step_by_paged_step,
    in_one_loop,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_gives_the_tokens_of_the_reference(
    bundle: LoadedBundle, prompts: Prompts, expected: tuple[torch.Tensor, list[int]], way: Way
) -> None:
    logits, tokens = way(bundle, prompts)
    difference = float((logits.float() - expected[0]).abs().max())
    _LOG.info("%s: largest difference %.1e", way.__name__, difference)
    assert difference < ATOL
    assert tokens == expected[1]


def test_log_probs_of_packed_prompts(
    bundle: LoadedBundle, prompts: Prompts, oracle_f32: Oracle
) -> None:
    inputs = packed([(row, prompt, 0) for row, prompt in enumerate(prompts)])
    rows = inputs.pop("rows")
    targets = torch.cat([ints([*prompt[1:], 0]) for prompt in prompts]).long()
    found = bundle.entry("log_probs_packed").run(
        None, {**inputs, "segments": rows, "targets": targets}
    )[0]
    logits = torch.cat([oracle_f32.logits(prompt) for prompt in prompts])
    wanted = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, wanted, atol=ATOL, rtol=0)
