"""The inputs of entries that take several sequences at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llama_runtime import States
from tests.runtime.loading import LOGITS_ATOL, POISON

BATCH, MAX_SEQ, PAGE_SIZE = 4, 256, 16
SCRATCH = MAX_SEQ - 1

Tensors = dict[str, torch.Tensor]


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, atol=LOGITS_ATOL, rtol=1e-5)


def packed(
    tokens: torch.Tensor, parts: Sequence[tuple[int, int, int]], padding: int = 0
) -> Tensors:
    """Parts (row, first position, end) of the rows, one after the other, then padding."""
    result = {
        "tokens": torch.cat([tokens[row, start:end] for row, start, end in parts]),
        "rows": torch.cat([torch.full((end - start,), row) for row, start, end in parts]),
        "positions": torch.cat([torch.arange(start, end) for _, start, end in parts]),
    }
    fill = {"tokens": 7, "rows": 0, "positions": SCRATCH}
    return {
        name: torch.cat((part, torch.full((padding,), fill[name]))).int()
        for name, part in result.items()
    }


def prompts(tokens: torch.Tensor, lengths: dict[int, int], padding: int = 0) -> Tensors:
    """The inputs of `prefill_packed` for prompts of these lengths by row."""
    inputs = packed(tokens, [(row, 0, length) for row, length in lengths.items()], padding)
    segments = inputs["rows"].clone()
    if padding:
        segments[-padding:] = BATCH
    ends, end = {}, 0
    for row, length in lengths.items():
        end += length
        ends[row] = end - 1
    last = ints([ends.get(row, 0) for row in range(BATCH)])
    return {**inputs, "segments": segments, "last": last}


def step(tokens: torch.Tensor, positions: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions of a step in which the rows not named are idle."""
    at = [positions.get(row, SCRATCH) for row in range(BATCH)]
    step_tokens = [
        int(tokens[row, positions[row]]) if row in positions else 5 for row in range(BATCH)
    ]
    return ints(step_tokens)[:, None], ints(at)


def scattered(num_rows: int, num_pages: int, seed: int = 0) -> torch.Tensor:
    """A table whose rows share no page and never name page 0."""
    order = torch.randperm(num_rows * num_pages, generator=torch.Generator().manual_seed(seed))
    return (order + 1).reshape(num_rows, num_pages).int()


def paged(tokens: torch.Tensor, table: torch.Tensor, parts: Sequence[tuple[int, int, int]],
          padding: int = 0) -> Tensors:  # fmt: skip
    inputs = packed(tokens, parts, padding)
    if padding:
        inputs["positions"][-padding:] = 0
    rows, positions = inputs["rows"].long(), inputs["positions"].long()
    slots = table[rows, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    if padding:
        slots[-padding:] = 0
    last = torch.zeros(len(table), dtype=torch.int32)
    end = 0
    for row, start, stop in parts:
        end += stop - start
        last[row] = end - 1
    return {**inputs, "slots": slots.int(), "last": last, "table": table}


def pool_slots(states: States, before: Tensors | None = None) -> set[int]:
    """The slots that some state was written at."""
    slots: set[int] = set()
    for name, tensor in states.items():
        old = POISON if before is None else before[name]
        changed = (tensor != old).any(-1).any(1)  # [pages, places]
        slots |= {int(page) * PAGE_SIZE + int(place) for page, place in changed.nonzero()}
    return slots
