"""Entries of dynamic dimensions at their smallest and largest sizes, against transformers.

A branch on a size that tracing took only one side of shows there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import llama_runtime
from llama_artifacts.manifest import FORMATS, Format
from llama_runtime import LoadedBundle
from tests.runtime.loading import expected_logits, random_tokens
from tests.runtime.test_packed import (
    BATCH,
    MAX_SEQ,
    PAGE_LEN,
    SCRATCH,
    Tensors,
    close,
    ints,
    paged,
    poisoned,
    prompts,
    scattered,
)

pytestmark = pytest.mark.slow  # the bundle takes minutes to build

CAPACITY = MAX_SEQ - 1


@pytest.fixture(scope="module", params=FORMATS)
def bundle(request: pytest.FixtureRequest, tiny_packed_bundle: Path) -> LoadedBundle:
    format: Format = request.param
    return llama_runtime.load(tiny_packed_bundle, format=format)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return random_tokens(BATCH, CAPACITY)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    return expected_logits(tiny_checkpoint, tokens)


def largest(bundle: LoadedBundle, entry: str, dim: str) -> int:
    return bundle.entry(entry).signature.dim(dim).max


@pytest.mark.parametrize("size", ["smallest", "largest"])
def test_slots(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor, size: str
) -> None:
    fill = bundle.entry("prefill_slots")
    num_prompts = 1 if size == "smallest" else largest(bundle, "prefill_slots", "M")
    length = 1 if size == "smallest" else largest(bundle, "prefill_slots", "S")
    rows = torch.arange(num_prompts) % BATCH
    inputs = {
        "tokens": tokens[rows, :length].contiguous(),
        "slots": rows.int(),
        "lengths": ints([length] * num_prompts),
    }
    close(fill.run(poisoned(fill), inputs)[0], expected[rows, length - 1])


@pytest.mark.parametrize("name", ["prefill_packed", "step_packed"])
@pytest.mark.parametrize("size", ["smallest", "largest"])
def test_packs(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor, name: str, size: str
) -> None:
    entry = bundle.entry(name)
    lengths = {2: 1} if size == "smallest" else dict.fromkeys(range(BATCH), CAPACITY)
    num_padding = 0 if size == "smallest" else largest(bundle, name, "P") - BATCH * CAPACITY
    inputs = prompts(tokens, lengths, num_padding)
    if name == "step_packed":
        inputs |= {"step_tokens": ints([5] * BATCH)[:, None], "step_positions": idle(BATCH)}
    logits = entry.run(poisoned(entry), inputs)[0]
    for row, length in lengths.items():
        close(logits[row], expected[row, length - 1])


def idle(num_rows: int) -> torch.Tensor:
    return ints([SCRATCH] * num_rows)


@pytest.mark.parametrize("name", ["prefill_paged", "step_paged"])
@pytest.mark.parametrize("size", ["smallest", "largest"])
def test_paged_prompts(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor, name: str, size: str
) -> None:
    entry = bundle.entry(name)
    is_small = size == "smallest"
    lengths = [1] if is_small else [CAPACITY] * BATCH
    table = scattered(len(lengths), 1 if is_small else MAX_SEQ // PAGE_LEN)
    num_padding = 0 if is_small else largest(bundle, name, "P") - BATCH * CAPACITY
    parts = [(row, 0, length) for row, length in enumerate(lengths)]
    inputs: Tensors = paged(tokens, table, parts, num_padding)
    if name == "step_paged":
        step = {"step_tokens": ints([5] * len(lengths))[:, None]}
        inputs |= {**step, "step_positions": ints([-1] * len(lengths))}
    states = poisoned(entry, PoolPages=table.numel() + 1)
    logits = entry.run(states, inputs)[0]
    for row, length in enumerate(lengths):
        close(logits[row], expected[row, length - 1])


@pytest.mark.parametrize("size", ["smallest", "most rows", "widest table"])
def test_paged_steps(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor, size: str
) -> None:
    decode = bundle.entry("decode_paged")
    num_rows = largest(bundle, "decode_paged", "Rows") if size == "most rows" else 1
    num_pages = largest(bundle, "decode_paged", "Pages") if size == "widest table" else 1
    states = poisoned(decode, PoolPages=num_rows + 1)
    table = torch.zeros(num_rows, num_pages, dtype=torch.int32)
    table[:, 0] = torch.arange(num_rows) + 1  # the pages behind the first are not in use
    rows = torch.arange(num_rows) % BATCH
    for position in range(3):
        step_tokens = tokens[rows, position][:, None].contiguous()
        inputs = {"tokens": step_tokens, "positions": ints([position] * num_rows), "table": table}
        close(decode.run(states, inputs)[0], expected[rows, position])


@pytest.mark.parametrize("name", ["hidden_packed", "log_probs_packed", "loss_packed"])
@pytest.mark.parametrize("size", ["smallest", "largest"])
def test_training(
    bundle: LoadedBundle, tokens: torch.Tensor, expected: torch.Tensor, name: str, size: str
) -> None:
    entry = bundle.entry(name)
    lengths = {0: 1} if size == "smallest" else dict.fromkeys(range(BATCH), CAPACITY)
    num_padding = 0 if size == "smallest" else largest(bundle, name, "P") - BATCH * CAPACITY
    inputs = prompts(tokens, lengths, num_padding)
    rows, places = inputs.pop("rows").long(), inputs["positions"].long()
    del inputs["last"]
    num_live = len(rows) - num_padding
    targets = random_tokens(len(rows), seed=3).long()
    logits = expected[rows[:num_live], places[:num_live]]
    wanted = logits.log_softmax(-1).gather(1, targets[:num_live, None])[:, 0]
    weights = torch.ones(len(rows))
    weights[num_live:] = 0
    inputs |= {} if name == "hidden_packed" else {"targets": targets}
    inputs |= {"weights": weights} if name == "loss_packed" else {}
    (result,) = entry.run(None, inputs)
    if name == "loss_packed":
        torch.testing.assert_close(result, -wanted.sum(), rtol=1e-5, atol=1e-4)
    elif name == "log_probs_packed":
        close(result[:num_live], wanted)
    else:
        close((result @ bundle.weights["lm_head.weight"].T)[:num_live], logits)
