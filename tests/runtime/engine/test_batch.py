from __future__ import annotations

import pytest

from llama_artifacts.signature import Dim
from llama_runtime.engine import batch
from llama_runtime.engine.batch import Ranges, Sizes
from llama_runtime.engine.request import Job
from llama_runtime.engine.scheduler import Piece, Plan
from tests.runtime.engine.fakes import request

PAGE_SIZE = 4


def piece(tokens: list[int], pages: list[int], start: int, end: int) -> Piece:
    job = Job(request("a", tokens))
    job.pages, job.num_computed = pages, start
    return Piece(job, start, end)


PROMPT = piece([10, 11, 12, 13, 14, 15, 16], [5, 2, 9], 3, 6)
STEP = piece([20, 21, 22, 23, 24], [7, 3], 4, 5)


def lists(plan: Plan, sizes: Sizes) -> dict[str, object]:
    return {name: t.tolist() for name, t in batch.inputs(plan, sizes, PAGE_SIZE).items()}


def test_steps_with_an_idle_row() -> None:
    assert lists(Plan(steps=(STEP,)), Sizes(2, 3, 0)) == {
        "tokens": [[24], [0]],
        "positions": [4, -1],
        "table": [[7, 3, 0], [0, 0, 0]],
    }


def test_pieces_of_prompts_with_padding() -> None:
    assert lists(Plan(prompts=(PROMPT, STEP)), Sizes(3, 2, 6)) == {
        "tokens": [13, 14, 15, 24, 0, 0],
        "positions": [3, 4, 5, 4, 0, 0],
        "rows": [0, 0, 0, 1, 0, 0],
        "slots": [23, 8, 9, 12, 0, 0],
        "last": [2, 3, 0],
        "table": [[5, 2], [7, 3], [0, 0]],
    }


def test_both_share_a_table_and_the_steps_come_after_the_prompts() -> None:
    found = lists(Plan((PROMPT,), (STEP,)), Sizes(2, 2, 3))
    assert found["table"] == [[5, 2], [7, 3]]
    assert (found["step_tokens"], found["step_positions"]) == ([[0], [24]], [-1, 4])
    assert found["last"] == [2, 0]


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        (Plan(steps=(STEP, STEP)), [0, 1]),
        (Plan(prompts=(PROMPT, STEP)), [1]),
        (Plan((STEP,), (STEP, STEP)), [0, 9, 10]),
        (Plan((PROMPT,), (STEP,)), [9]),
        (Plan(prompts=(PROMPT,)), []),
    ],
)
def test_the_rows_of_the_logits_that_are_asked_for(plan: Plan, rows: list[int]) -> None:
    assert batch.asked(plan, Sizes(8, 2, 8))[1] == rows


@pytest.mark.parametrize(
    ("has_buckets", "expected"), [(False, Sizes(3, 2, 7)), (True, Sizes(4, 2, 8))]
)
def test_sizes_are_the_smallest_or_powers_of_two(has_buckets: bool, expected: Sizes) -> None:
    ranges = Ranges(Dim("Rows", 1, 6), Dim("Pages", 1, 3), Dim("P", 1, 9), has_buckets)
    assert ranges.fit(Plan((PROMPT, PROMPT, STEP)), PAGE_SIZE) == expected


def test_sizes_keep_to_the_ranges() -> None:
    ranges = Ranges(Dim("Rows", 5, 5), Dim("Pages", 3, 3), Dim("P", 2, 3), has_buckets=True)
    assert ranges.fit(Plan(steps=(STEP,)), PAGE_SIZE) == Sizes(5, 3, 2)
    assert ranges.fit(Plan((PROMPT,), (STEP,)), PAGE_SIZE) == Sizes(5, 3, 3)
