"""Whatever comes in whatever order: pages are conserved, every request ends, no step is idle."""

from __future__ import annotations

import time
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

PAGE_LEN = 4

ADD = st.tuples(
    st.just("add"),
    st.integers(1, 24),  # tokens of the prompt; cut to what the pool holds
    st.integers(0, 2),  # its seed: prompts of one seed begin alike
    st.integers(1, 20),  # new tokens
)
EVENTS = st.lists(
    st.one_of(
        ADD,
        ADD,
        ADD,
        st.tuples(st.just("step"), st.integers(1, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("break")),
    ),
    min_size=10,
    max_size=40,
)


@dataclass
class Client:
    """Sends requests to an engine and counts its steps.

    Attributes:
        added: of each request its prompt and its new tokens.
        lengths: after each step the first of those in the engine, and how far it is.
    """

    engine: Engine
    bundle: FakeBundle
    max_prompt: int
    added: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    lengths: list[tuple[str, int]] = field(default_factory=list)

    def add(self, length: int, seed: int, max_new: int) -> None:
        # `prompt_of` seeds with the length too, so a shared beginning is cut from one long text.
        prompt = prompt_of(40, seed)[: min(length, self.max_prompt)]
        name = str(len(self.added))
        self.engine.add(request(name, prompt, max_new))
        self.added[name] = (prompt, max_new)

    def cancel(self, number: int) -> None:
        name = str(number)
        if self.engine.cancel(name):
            self.cancelled.add(name)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if not self.engine.has_work:
                return
            before = self.engine.stats.num_steps
            outputs = self.engine.step()
            check(self.engine)
            assert outputs or self.engine.stats.num_steps > before
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            self._check_first()

    def _check_first(self) -> None:
        """Of two steps one at least takes the first of those in the engine further."""
        job = self.engine._scheduler.first
        if job is not None:
            self.lengths.append((job.request.id, job.num_computed))
            for name, length in self.lengths[-3:-2]:
                assert name != job.request.id or length < job.num_computed

    def fail_next(self) -> None:
        def hook(states: object) -> None:
            self.bundle.hooks.clear()
            raise RuntimeError("device lost")

        self.bundle.hooks[:] = [hook]


@settings(max_examples=150, deadline=None)
@given(
    names=st.sampled_from([PAGED, TAKING_TURNS]),
    rows=st.integers(1, 4),
    pages=st.integers(2, 10),
    token_budget=st.integers(1, 24),
    has_prefix_cache=st.booleans(),
    events=EVENTS,
)
def test_every_request_ends_and_no_step_is_idle(
    names: tuple[str, ...],
    rows: int,
    pages: int,
    token_budget: int,
    has_prefix_cache: bool,
    events: list[tuple[object, ...]],
) -> None:
    bundle = FakeBundle(names, page_len=PAGE_LEN)
    engine = engine_of(
        bundle,
        rows=rows,
        pages=pages,
        token_budget=token_budget,
        has_prefix_cache=has_prefix_cache,
    )
    client = Client(engine, bundle, max_prompt=pages * PAGE_LEN)
    calls = {"add": client.add, "step": client.step, "cancel": client.cancel}
    calls["break"] = client.fail_next
    for name, *values in events:
        calls[str(name)](*values)  # type: ignore[arg-type]
    while engine.has_work:
        client.step()
    assert engine.stats.pages_used == engine.stats.num_running == engine.stats.num_waiting == 0
    assert client.outputs.keys() == client.added.keys()
    for request_id, given_outputs in client.outputs.items():
        _check_end(client, request_id, given_outputs, pages * PAGE_LEN)


def _check_end(client: Client, name: str, outputs: list[Output], max_positions: int) -> None:
    """One end, the last output, for the right reason, after the right tokens."""
    assert [o.finish_reason is None for o in outputs] == [True] * (len(outputs) - 1) + [False]
    prompt, max_new = client.added[name]
    expected = greedy(prompt, min(max_new, max_positions - len(prompt) + 1))
    end = outputs[-1]
    if end.finish_reason == "length":
        assert tokens_of(outputs) == expected
    elif end.finish_reason == "cancelled":
        assert name in client.cancelled
        assert tokens_of(outputs) == expected[: len(outputs) - 1]
    else:
        assert "device lost" in str(end.error)
        assert tokens_of(outputs) == expected[: len(outputs) - 1]


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
