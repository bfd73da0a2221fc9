"""Requests that are cancelled, and calls that fail."""

from __future__ import annotations

import pytest
import torch

from llama_artifacts.errors import IntegrityError
from llama_runtime.engine import Output
from llama_runtime.sampling import SamplingParams
from tests.runtime.engine.fakes import (
    NAN_TOKEN,
    FakeBundle,
    alone,
    check,
    engine_of,
    finish,
    greedy,
    prompt_of,
    request,
    steps,
    tokens_of,
)

# Cancellation.


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("victim", ["first", "long", "queued"])
def test_a_cancelled_request_leaves_whatever_it_does(
    bundle: FakeBundle, victim: str, num_steps: int
) -> None:
    engine = engine_of(bundle, rows=2, pages=20, token_budget=8)
    prompts = {"first": prompt_of(5), "long": prompt_of(30), "queued": prompt_of(9)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 20))
    for _ in range(num_steps):
        engine.step()
    used = engine.stats.pages_used
    assert engine.cancel(victim)
    assert not engine.cancel(victim)
    check(engine)
    assert engine.stats.pages_used <= used
    outputs = engine.step()
    assert outputs[0] == Output(victim, finish_reason="cancelled")
    assert victim not in {output.request_id for output in outputs[1:]}
    rest = finish(engine)
    assert victim not in rest
    for name in prompts.keys() - {victim}:
        expected = greedy(prompts[name], 20)
        assert tokens_of(rest[name]) == expected[-len(tokens_of(rest[name])) :]


def test_a_request_that_was_sent_back_can_be_cancelled(bundle: FakeBundle) -> None:
    engine = engine_of(bundle, pages=5, rows=2)
    engine.add(request("a", prompt_of(6), 13))
    engine.add(request("b", prompt_of(6, 1), 13))
    next(step for step in steps(engine) if engine.stats.num_preemptions)
    assert engine.cancel("b")
    assert "a" in finish(engine)


def test_cancelling_the_last_request_is_work_until_it_is_told(bundle: FakeBundle) -> None:
    engine = engine_of(bundle)
    engine.add(request("a", (1, 2)))
    engine.cancel("a")
    assert engine.has_work
    assert engine.step() == [Output("a", finish_reason="cancelled")]
    assert not engine.has_work
    assert engine.stats.num_steps == 0


def test_what_is_not_there_cannot_be_cancelled(bundle: FakeBundle) -> None:
    engine = engine_of(bundle)
    engine.add(request("a", (1, 2), 1))
    finish(engine)
    assert [engine.cancel(name) for name in ("a", "b")] == [False, False]


# Faults.


def fail_once(bundle: FakeBundle, error: BaseException) -> None:
    def hook(states: list[torch.Tensor]) -> None:
        bundle.hooks.remove(hook)
        raise error

    bundle.hooks.append(hook)


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("error", [RuntimeError("device lost"), IntegrityError("odd output")])
def test_a_program_that_fails_costs_the_requests_of_its_call(
    bundle: FakeBundle, error: Exception, num_steps: int
) -> None:
    engine = engine_of(bundle, rows=2, pages=20, token_budget=8)
    for number in range(4):
        engine.add(request(str(number), prompt_of(5 + number), 6))
    for _ in range(num_steps):
        engine.step()
    fail_once(bundle, error)
    outputs = engine.step()
    check(engine)
    failed = {output.request_id for output in outputs if output.finish_reason == "error"}
    assert failed
    for output in outputs:
        if output.finish_reason == "error":
            assert output.error is error or output.error.__cause__ is error  # type: ignore[union-attr]
            assert str(error) in str(output.error)
    rest = finish(engine)
    for name, given in rest.items():
        assert name not in failed
        assert tokens_of(given) == greedy(prompt_of(5 + int(name)), 6)[-len(given) :]


def test_an_interrupted_step_is_done_again(bundle: FakeBundle) -> None:
    params = SamplingParams(temperature=1.0, seed=4)
    one = request("a", prompt_of(10), 8, params=params)
    expected = alone(bundle, one)
    engine = engine_of(bundle, token_budget=4)
    engine.add(one)
    given: list[Output] = []
    for number in range(100):
        if number % 2 == 0 and engine.has_work:
            fail_once(bundle, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            check(engine)
        given += engine.step()
    assert given == expected
    assert not engine.has_work


def test_logits_that_are_no_numbers_fail_their_request_alone(bundle: FakeBundle) -> None:
    """Nor do others read what it left in its pages, the scratch page or the prefix cache."""
    engine = engine_of(bundle, pages=6, rows=2, token_budget=8)
    bad = (*prompt_of(4), NAN_TOKEN, 1, 2, 3, 4, 5)
    engine.add(request("good", prompt_of(5), 6))
    engine.add(request("bad", bad, 6))
    outputs = finish(engine)
    assert tokens_of(outputs["good"]) == greedy(prompt_of(5), 6)
    (output,) = outputs["bad"]
    assert output.finish_reason == "error"
    assert "finite maximum" in str(output.error)
    for number in range(3):
        engine.add(request(str(number), prompt_of(9, number), 6))
    rest = finish(engine)
    for number in range(3):
        assert tokens_of(rest[str(number)]) == greedy(prompt_of(9, number), 6)
    assert engine.stats.prefix_hit_tokens == 0
