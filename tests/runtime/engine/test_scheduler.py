from __future__ import annotations

import pytest

from llama_runtime.engine.blocks import PagePool
from llama_runtime.engine.request import Job
from llama_runtime.engine.scheduler import Scheduler
from tests.runtime.engine.fakes import prompt_of, request

PAGE_SIZE = 4
Calls = list[tuple[list[tuple[str, int, int]], list[str]]]


def calls(scheduler: Scheduler, num_calls: int) -> Calls:
    """Pieces and steps of the next calls; every text goes on with token 1."""
    result: Calls = []
    for _ in range(num_calls):
        plan = scheduler.plan()
        for piece in plan.pieces:
            scheduler.computed(piece)
            if piece.is_last:
                piece.job.tokens.append(1)
        prompts = [(p.job.request.id, p.start, p.end) for p in plan.prompts]
        result.append((prompts, [p.job.request.id for p in plan.steps]))
    return result


def scheduler_of(
    lengths: dict[str, int],
    *,
    pages: int = 50,
    rows: int = 4,
    budget: int = 8,
    max_piece: int = 100,
    can_mix: bool = True,
) -> Scheduler:
    scheduler = Scheduler(
        PagePool(pages, PAGE_SIZE),
        max_rows=rows,
        token_budget=budget,
        max_piece=max_piece,
        can_mix=can_mix,
    )
    for seed, (name, length) in enumerate(lengths.items()):
        scheduler.waiting.append(Job(request(name, prompt_of(length, seed), 100)))
    return scheduler


def test_nothing_to_do() -> None:
    assert calls(scheduler_of({}), 2) == [([], []), ([], [])]


def test_short_prompts_share_a_call_and_then_step_together() -> None:
    assert calls(scheduler_of({"a": 3, "b": 4, "c": 1}), 2) == [
        ([("a", 0, 3), ("b", 0, 4), ("c", 0, 1)], []),
        ([], ["a", "b", "c"]),
    ]


def test_a_long_prompt_comes_in_pieces_beside_steps() -> None:
    assert calls(scheduler_of({"a": 3, "b": 20}), 5) == [
        ([("a", 0, 3), ("b", 0, 5)], []),
        ([("b", 5, 12)], ["a"]),
        ([("b", 12, 19)], ["a"]),
        ([], ["a", "b"]),  # one token was left, which is a step
        ([], ["a", "b"]),
    ]


def test_prompts_and_steps_take_turns() -> None:
    assert calls(scheduler_of({"a": 3, "b": 20}, can_mix=False), 6) == [
        ([("a", 0, 3), ("b", 0, 5)], []),
        ([], ["a"]),
        ([("b", 5, 13)], []),
        ([], ["a"]),
        ([("b", 13, 20)], []),
        ([], ["a", "b"]),
    ]


def test_a_call_takes_no_more_tokens_than_its_program() -> None:
    assert calls(scheduler_of({"a": 9}, max_piece=6), 2) == [
        ([("a", 0, 6)], []),
        ([("a", 6, 9)], []),
    ]


def test_a_budget_that_steps_use_up_still_lets_a_prompt_go_on() -> None:
    found = calls(scheduler_of({"a": 1, "b": 1, "c": 3}, budget=2), 4)
    assert found == [
        ([("a", 0, 1), ("b", 0, 1)], []),
        ([("c", 0, 1)], ["a", "b"]),
        ([("c", 1, 2)], ["a", "b"]),
        ([], ["a", "b", "c"]),
    ]


def test_no_more_run_than_there_are_rows() -> None:
    scheduler = scheduler_of({"a": 1, "b": 1, "c": 1}, rows=2)
    assert calls(scheduler, 2)[1] == ([], ["a", "b"])
    scheduler.end(scheduler.running[0])
    assert calls(scheduler, 1) == [([("c", 0, 1)], ["b"])]


def test_a_short_prompt_does_not_overtake_one_that_waits_for_pages() -> None:
    scheduler = scheduler_of({"a": 8, "b": 16, "c": 1}, pages=5)
    assert calls(scheduler, 3) == [([("a", 0, 8)], []), ([], ["a"]), ([], ["a"])]
    scheduler.end(scheduler.running[0])
    assert calls(scheduler, 1) == [([("b", 0, 8)], [])]


def test_the_youngest_is_sent_back_when_a_step_finds_no_page() -> None:
    scheduler = scheduler_of({"a": 4, "b": 4, "c": 7}, pages=5, budget=20)
    assert calls(scheduler, 1) == [([("a", 0, 4), ("b", 0, 4)], [])]
    assert calls(scheduler, 3) == [([], ["a", "b"])] * 3
    # Both need a third page: one is free, so the younger waits, in front of who came later.
    assert calls(scheduler, 2) == [([], ["a", "b"]), ([], ["a"])]
    assert [job.request.id for job in scheduler.waiting] == ["b", "c"]
    assert scheduler.num_preemptions == 1
    assert scheduler.pool.num_used == 3


def test_who_was_sent_back_goes_on_from_what_is_still_known() -> None:
    scheduler = scheduler_of({"a": 4, "b": 4}, pages=5)
    calls(scheduler, 6)
    scheduler.end(scheduler.running[0])
    (prompts, _), *_ = calls(scheduler, 1)
    name, start, end = prompts[0]
    assert (name, start % PAGE_SIZE, end) == ("b", 0, 9)
    assert start in (4, 8)
    assert scheduler.prefix_hit_tokens == 0  # no prompt's first time


@pytest.mark.parametrize("ending", ["end", "fail"])
def test_a_job_that_ends_leaves_no_page(ending: str) -> None:
    scheduler = scheduler_of({"a": 9, "b": 9, "c": 9}, rows=2, budget=12)
    calls(scheduler, 1)
    for job in [*scheduler.running, *scheduler.waiting]:
        getattr(scheduler, ending)(job)
    assert scheduler.pool.num_used == 0
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.pool.num_cached == (3 if ending == "end" else 0) - (ending == "end")
