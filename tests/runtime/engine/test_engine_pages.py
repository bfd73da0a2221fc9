"""Texts that share a pool, and beginnings that are kept."""

from __future__ import annotations

import pytest

from tests.runtime.engine.fakes import (
    FakeBundle,
    engine_of,
    finish,
    greedy,
    prompt_of,
    request,
    tokens_of,
)


@pytest.mark.parametrize("length", range(15, 34))
def test_lengths_around_pages_of_16_on_a_pool_that_was_used(length: int) -> None:
    engine = engine_of(FakeBundle(max_seq=64, page_size=16), pages=4, has_prefix_cache=False)
    engine.add(request("before", prompt_of(50, seed=1), 10))
    finish(engine)
    engine.add(request("a", prompt_of(length), 4))
    engine.step()
    assert engine.stats.pages_used == -(-length // 16)
    assert tokens_of(finish(engine)["a"])[0:] == greedy(prompt_of(length), 4)[1:]


def test_four_texts_that_outgrow_the_pool_end_as_if_alone(bundle: FakeBundle) -> None:
    engine = engine_of(bundle, pages=8, rows=4)
    prompts = [prompt_of(6, seed) for seed in range(4)]
    for number, prompt in enumerate(prompts):
        engine.add(request(str(number), prompt, 14))
    outputs = finish(engine)
    assert engine.stats.num_preemptions > 0
    for number, prompt in enumerate(prompts):
        assert tokens_of(outputs[str(number)]) == greedy(prompt, 14)


def test_the_first_of_a_crowd_is_never_sent_back(bundle: FakeBundle) -> None:
    engine = engine_of(bundle, pages=5, token_budget=4)
    for number in range(6):
        engine.add(request(str(number), prompt_of(4, number), 12))
    ends = [o.request_id for outputs in finish(engine).values() for o in outputs[-1:]]
    assert sorted(ends) == sorted(map(str, range(6)))


def test_requests_begin_in_the_order_in_which_they_came(bundle: FakeBundle) -> None:
    engine = engine_of(bundle, rows=2, pages=12)
    for number in range(7):
        engine.add(request(str(number), prompt_of(20 if number == 2 else 3, number), 3))
    assert list(finish(engine)) == list(map(str, range(7)))


def test_the_beginning_of_a_prompt_is_computed_once(bundle: FakeBundle) -> None:
    engine = engine_of(bundle, pages=30)
    shared = prompt_of(12)
    engine.add(request("first", (*shared, 1), 4))
    finish(engine)
    assert engine.stats.prefix_hit_tokens == 0
    for number in range(3):
        engine.add(request(str(number), (*shared, 5 + number), 4))
    outputs = finish(engine)
    assert engine.stats.prefix_hit_tokens == 36
    assert engine.stats.prompt_tokens == 4 * 13
    for number in range(3):
        assert tokens_of(outputs[str(number)]) == greedy((*shared, 5 + number), 4)


def test_of_a_known_prompt_one_token_at_least_is_computed(bundle: FakeBundle) -> None:
    engine = engine_of(bundle, pages=30)
    for name in ("first", "second"):
        engine.add(request(name, prompt_of(12), 4))
        assert tokens_of(finish(engine)[name]) == greedy(prompt_of(12), 4)
    assert engine.stats.prefix_hit_tokens == 8


def test_a_conversation_goes_on_from_its_answer(bundle: FakeBundle) -> None:
    engine = engine_of(bundle, pages=30)
    engine.add(request("first", prompt_of(6), 7))
    text = [*prompt_of(6), *tokens_of(finish(engine)["first"])]
    engine.add(request("second", (*text, 3, 4), 4))
    assert tokens_of(finish(engine)["second"]) == greedy((*text, 3, 4), 4)
    assert engine.stats.prefix_hit_tokens == 12


def test_without_a_cache_nothing_is_found(bundle: FakeBundle) -> None:
    engine = engine_of(bundle, pages=30, has_prefix_cache=False)
    for name in ("first", "second"):
        engine.add(request(name, prompt_of(12), 4))
        finish(engine)
    assert (engine.stats.prefix_hit_tokens, engine.stats.pages_cached) == (0, 0)
