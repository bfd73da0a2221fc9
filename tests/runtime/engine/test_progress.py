"""Whatever comes in whatever order: pages are conserved, every request ends, no step is idle."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_artifacts.errors import SessionError
from llama_runtime.engine import Engine, Output
from tests.runtime.engine.fakes import (
    PAGED,
    TAKING_TURNS,
    FakeBundle,
    check,
    engine_of,
    finish,
    greedy,
    prompt_of,
    request,
    tokens_of,
)

PAGE_SIZE = 4


@dataclass(frozen=True)
class Visit:
    """A request, the steps that pass before it comes, and those after which it is cancelled."""

    gap: int
    prompt: tuple[int, ...]
    max_new: int
    patience: int | None


TEXTS = [prompt_of(40, seed) for seed in range(3)]  # prompts are their beginnings, often shared
VISITS = st.lists(
    st.builds(
        Visit,
        gap=st.integers(0, 3),
        prompt=st.builds(
            lambda text, size: text[:size], st.sampled_from(TEXTS), st.integers(1, 16)
        ),
        max_new=st.sampled_from([20, 1, 5, 60]),
        patience=st.none() | st.integers(0, 30),
    ),
    min_size=4,
    max_size=8,
)


@dataclass
class Run:
    """An engine, its requests, and what it gave them.

    Attributes:
        places: after each step the first of the requests in the engine, and how far it is.
    """

    engine: Engine
    visits: dict[str, Visit]
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    places: list[tuple[str, int]] = field(default_factory=list)

    def come(self, name: str) -> None:
        self.engine.add(request(name, self.visits[name].prompt, self.visits[name].max_new))

    def leave(self, name: str) -> None:
        if self.engine.cancel(name):
            self.cancelled.add(name)

    def step(self) -> None:
        before = self.engine.stats.num_steps
        outputs = self.engine.step()
        check(self.engine)
        assert outputs or self.engine.stats.num_steps > before
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self._check_first()

    def _check_first(self) -> None:
        """Of two steps one at least takes the first of those in the engine further."""
        scheduler = self.engine._scheduler
        job = scheduler.first
        if job is not None:
            jobs = [*scheduler.running, *scheduler.waiting]
            assert job.request.id == min(each.request.id for each in jobs)
            self.places.append((job.request.id, job.num_computed))
            for name, num_computed in self.places[-3:-2]:
                assert name != job.request.id or num_computed < job.num_computed

    def check_end(self, name: str, max_positions: int) -> None:
        """One end, the last output, for the right reason, after the right tokens."""
        visit, outputs = self.visits[name], self.outputs[name]
        assert [o.finish_reason is None for o in outputs] == [True] * (len(outputs) - 1) + [False]
        room = max_positions - len(visit.prompt) + 1
        expected = greedy(visit.prompt, min(visit.max_new, room))
        if outputs[-1].finish_reason != "length":
            expected = expected[: len(outputs) - 1]
        assert tokens_of(outputs) == expected
        assert (outputs[-1].finish_reason == "cancelled") == (name in self.cancelled)
        if outputs[-1].finish_reason == "error":
            assert "device lost" in str(outputs[-1].error)


@settings(max_examples=50, deadline=None)
@given(
    names=st.sampled_from([PAGED, TAKING_TURNS]),
    rows=st.integers(1, 4),
    pages=st.integers(4, 10),
    token_budget=st.integers(1, 24),
    has_prefix_cache=st.booleans(),
    visits=VISITS,
    faults=st.sets(st.integers(0, 99), max_size=2),
)
def test_every_request_ends_and_no_step_is_idle(
    names: tuple[str, ...],
    rows: int,
    pages: int,
    token_budget: int,
    has_prefix_cache: bool,
    visits: list[Visit],
    faults: set[int],
) -> None:
    bundle = FakeBundle(names, page_size=PAGE_SIZE)
    sizes = {"rows": rows, "pages": pages, "token_budget": token_budget}
    engine = engine_of(bundle, has_prefix_cache=has_prefix_cache, **sizes)
    run = Run(engine, {str(number): visit for number, visit in enumerate(visits)})
    bundle.hooks.append(lambda states: lose_device(run, faults))
    due = due_at_each_step(visits)
    for now in range(max(due) + 1):
        for action, name in due[now]:
            getattr(run, action)(name)
        if engine.has_work:
            run.step()
    while engine.has_work:
        run.step()
    stats = engine.stats
    assert stats.pages_used == stats.num_running == stats.num_waiting == 0
    assert run.outputs.keys() == run.visits.keys()
    for name in run.visits:
        run.check_end(name, pages * PAGE_SIZE)


def lose_device(run: Run, faults: set[int]) -> None:
    if run.engine.stats.num_steps in faults:
        raise RuntimeError("device lost")


def due_at_each_step(visits: list[Visit]) -> dict[int, list[tuple[str, str]]]:
    """What `Run` does before a step, and with which request."""
    due, now = defaultdict(list), 0
    for number, visit in enumerate(visits):
        now += visit.gap
        due[now].append(("come", str(number)))
        if visit.patience is not None:
            due[now + visit.patience].append(("leave", str(number)))
    return due


@pytest.mark.parametrize("names", [PAGED, TAKING_TURNS], ids=["mixed", "turns"])
@pytest.mark.parametrize("num_lost", [2, 5])
def test_a_request_that_never_gets_its_pages_fails(names: tuple[str, ...], num_lost: int) -> None:
    """Pages that are lost, which no arrival or cancellation does, must not make it wait for ever."""
    engine = engine_of(FakeBundle(names), pages=6)
    lost = engine._pool.take(num_lost)
    engine.add(request("long", prompt_of(10), 12))
    engine.add(request("short", prompt_of(3), 1))
    outputs: dict[str, list[Output]] = {}
    for _ in range(30):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert not engine.has_work
    error = outputs["long"][-1].error
    assert isinstance(error, SessionError)
    pages = {2: "expected 5 pages that are free or will be, got 4 of 6", 5: "3 pages .* got 1 of 6"}
    with pytest.raises(SessionError, match=pages[num_lost]):
        raise error
    assert tokens_of(outputs["short"]) == greedy(prompt_of(3), 1)
    engine._pool.release(lost)
    engine.add(request("long", prompt_of(10), 12))
    assert tokens_of(finish(engine)["long"]) == greedy(prompt_of(10), 12)


def test_a_choice_that_raises_costs_the_requests_of_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(FakeBundle(), rows=1)
    for name in ("first", "second"):
        engine.add(request(name, prompt_of(4), 3))

    def choose_rows(*args: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("llama_runtime.engine.engine.choose_rows", choose_rows)
        (output,) = engine.step()
    assert (output.request_id, output.finish_reason) == ("first", "error")
    assert "MemoryError: no room" in str(output.error)
    assert tokens_of(finish(engine)["second"]) == greedy(prompt_of(4), 3)


def test_time_in_programs_is_part_of_the_time_of_steps() -> None:
    bundle = FakeBundle()
    engine = engine_of(bundle)
    assert engine.stats.program_s == 0
    bundle.hooks.append(lambda states: time.sleep(0.02))
    engine.add(request("a", prompt_of(4), 3))
    started = time.perf_counter()
    finish(engine)
    assert 0.06 <= engine.stats.program_s < time.perf_counter() - started
