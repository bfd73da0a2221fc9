"""The engine over programs whose every answer is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from llama_artifacts.errors import InputError, IntegrityError, SessionError
from llama_runtime.engine import Output, Request
from llama_runtime.sampling import SamplingParams
from tests.runtime.engine.fakes import (
    NAN_TOKEN,
    PAGED,
    TAKING_TURNS,
    VOCAB_SIZE,
    FakeBundle,
    check,
    engine_of,
    finish,
    greedy,
    logits_after,
    prompt_of,
    request,
    steps,
    tokens_of,
)

SAMPLED = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, seed=7),
    SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(presence_penalty=2.0, logit_bias={4: 1.5, 9: -100.0}),
)


@pytest.fixture(params=[PAGED, TAKING_TURNS], ids=["mixed", "turns"])
def bundle(request: pytest.FixtureRequest) -> FakeBundle:
    return FakeBundle(request.param)


def alone(bundle: Any, one: Request, **options: Any) -> list[Output]:
    engine = engine_of(bundle, **{"rows": 1, "has_prefix_cache": False, **options})
    engine.add(one)
    return finish(engine)[one.id]


@pytest.mark.parametrize("token_budget", [1, 3, 8, 512])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_many_together_get_what_each_gets_from_the_whole_text(
    bundle: FakeBundle, rows: int, token_budget: int
) -> None:
    engine = engine_of(bundle, rows=rows, pages=40, token_budget=token_budget)
    prompts = [prompt_of(length, seed=length) for length in range(1, 19)]
    for number, prompt in enumerate(prompts):
        engine.add(request(str(number), prompt, max_new=3 + number % 7))
    outputs = finish(engine)
    for number, prompt in enumerate(prompts):
        given = outputs[str(number)]
        assert tokens_of(given) == greedy(prompt, 3 + number % 7)
        assert given[-1].finish_reason == "length"


@pytest.mark.parametrize("params", SAMPLED, ids=repr)
def test_a_text_is_the_same_alone_and_in_any_batch(
    bundle: FakeBundle, params: SamplingParams
) -> None:
    one = request("one", prompt_of(9), max_new=20, params=params, num_logprobs=3)
    expected = alone(bundle, one)
    for seed, pages in ((1, 40), (2, 9)):  # with nine pages texts are sent back to wait
        engine = engine_of(bundle, pages=pages, token_budget=6)
        engine.add(request("before", prompt_of(11, seed), max_new=15, params=params))
        engine.add(one)
        engine.add(request("after", prompt_of(3, seed), max_new=20, params=SAMPLED[1]))
        assert finish(engine)["one"] == expected


def test_a_seed_gives_what_a_loop_with_that_seed_gives(bundle: FakeBundle) -> None:
    from llama_runtime.sampling import Sampler

    params, prompt = SamplingParams(temperature=1.0, seed=5), prompt_of(6)
    sampler, tokens = Sampler(params, prompt), list(prompt)
    for _ in range(10):
        tokens += sampler.sample(logits_after(tokens))
    assert tokens_of(alone(bundle, request("a", prompt, 10, params=params))) == tokens[6:]


def test_no_seed_gives_other_texts(bundle: FakeBundle) -> None:
    params = SamplingParams(temperature=1.0)
    texts = {
        tuple(tokens_of(alone(bundle, request("a", prompt_of(4), 12, params=params))))
        for _ in range(3)
    }
    assert len(texts) == 3


# Ends.


def test_a_stop_token_ends_the_text_and_is_not_given(bundle: FakeBundle) -> None:
    expected = greedy(prompt_of(5), 12)
    stop = expected[6]
    end = expected.index(stop)
    given = alone(bundle, request("a", prompt_of(5), 12, stop_tokens=frozenset({stop})))
    assert tokens_of(given) == expected[:end]
    assert given[-1] == Output("a", finish_reason="stop")


def test_a_stop_token_in_the_last_place_is_a_stop_and_no_cut(bundle: FakeBundle) -> None:
    expected = greedy(prompt_of(5), 12)
    end = next(i for i, token in enumerate(expected) if i > 1 and token not in expected[:i])
    stops = frozenset({expected[end]})
    given = alone(bundle, request("a", prompt_of(5), end + 1, stop_tokens=stops))
    assert tokens_of(given) == expected[:end]
    assert given[-1].finish_reason == "stop"
    cut = alone(bundle, request("a", prompt_of(5), end, stop_tokens=stops))
    assert tokens_of(cut) == expected[:end]
    assert cut[-1].finish_reason == "length"


def test_a_stop_token_of_the_prompt_ends_nothing(bundle: FakeBundle) -> None:
    prompt, expected = (3, 4, 5), greedy((3, 4, 5), 4)
    stops = frozenset(set(prompt) - set(expected))
    assert stops
    assert tokens_of(alone(bundle, request("a", prompt, 4, stop_tokens=stops))) == expected


def test_the_last_of_max_new_may_be_the_only_one(bundle: FakeBundle) -> None:
    given = alone(bundle, request("a", prompt_of(5), 1))
    assert [o.token for o in given] == greedy(prompt_of(5), 1)
    assert given[-1].finish_reason == "length"


@pytest.mark.parametrize("length", [1, 40, 63, 64])
def test_a_text_ends_where_the_programs_have_no_position_left(
    bundle: FakeBundle, length: int
) -> None:
    """The last token needs no position of its own."""
    given = alone(bundle, request("a", prompt_of(length), 1000))
    assert tokens_of(given) == greedy(prompt_of(length), 64 - length + 1)
    assert given[-1].finish_reason == "length"


@pytest.mark.parametrize("length", [1, 11, 12])
def test_a_text_ends_where_the_pool_has_no_page_left_for_it_alone(
    bundle: FakeBundle, length: int
) -> None:
    given = alone(bundle, request("a", prompt_of(length), 1000), pages=3)
    assert tokens_of(given) == greedy(prompt_of(length), 12 - length + 1)
    assert given[-1].finish_reason == "length"


# Log-probabilities.


def test_log_probabilities_are_those_of_the_model_itself(bundle: FakeBundle) -> None:
    prompt = prompt_of(7)
    params = SamplingParams(temperature=2.0, seed=1, logit_bias={3: 5.0}, top_k=5)
    given = alone(bundle, request("a", prompt, 8, params=params, num_logprobs=4))
    tokens = list(prompt)
    for output in given:
        log_probs = logits_after(tokens).log_softmax(-1)
        assert output.token is not None
        assert output.logprob == pytest.approx(float(log_probs[output.token]))
        best = log_probs.topk(4)
        assert [token for token, _ in output.top_logprobs] == best.indices.tolist()
        assert [value for _, value in output.top_logprobs] == pytest.approx(best.values.tolist())
        tokens.append(output.token)


def test_log_probabilities_come_where_they_are_asked_for(bundle: FakeBundle) -> None:
    engine = engine_of(bundle)
    for name, num in (("none", None), ("own", 0), ("all", VOCAB_SIZE)):
        engine.add(request(name, prompt_of(4), 2, num_logprobs=num))
    outputs = finish(engine)
    assert all((o.logprob, o.top_logprobs) == (None, ()) for o in outputs["none"])
    assert all(o.logprob is not None and o.top_logprobs == () for o in outputs["own"])
    assert all(len(o.top_logprobs) == VOCAB_SIZE for o in outputs["all"])


# What is refused.


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        *(({"id": value}, "id") for value in ("", 7)),
        *(({"prompt": value}, "prompt") for value in ((), [1], (VOCAB_SIZE,), (-1,), (True,))),
        *(({"prompt": (1,) * num}, "prompt") for num in (33, 65, 640)),
        *(({"max_new": value}, "max_new") for value in (0, -1, 1.5, True, None)),
        *(({"stop_tokens": value}, "stop_tokens") for value in ({2}, frozenset({VOCAB_SIZE}))),
        *(({"num_logprobs": value}, "num_logprobs") for value in (-1, VOCAB_SIZE + 1, True)),
        ({"params": None}, "params"),
        ({"params": SamplingParams(logit_bias={VOCAB_SIZE: 1.0})}, "logit_bias"),
    ],
)
def test_what_could_never_run_is_refused_and_changes_nothing(
    bundle: FakeBundle, fields: dict[str, Any], where: str
) -> None:
    engine = engine_of(bundle, pages=8)
    before = engine.stats
    with pytest.raises(InputError) as caught:
        engine.add(dataclasses.replace(request("a", (1, 2)), **fields))
    assert caught.value.where == where
    assert (engine.stats, engine.has_work, engine.step()) == (before, False, [])


def test_a_prompt_that_the_pool_cannot_hold_is_refused_with_both_numbers() -> None:
    engine = engine_of(FakeBundle(max_seq=256, page_size=16), pages=8)
    with pytest.raises(InputError, match="needs 13 pages, the pool has 8"):
        engine.add(request("a", prompt_of(200)))


def test_a_prompt_longer_than_the_programs_is_refused_with_both_numbers() -> None:
    engine = engine_of(FakeBundle())
    with pytest.raises(InputError, match="at most 64 tokens, got 65"):
        engine.add(request("a", prompt_of(65)))


def test_something_else_than_a_request_is_refused(bundle: FakeBundle) -> None:
    with pytest.raises(InputError, match="expected a Request, got a str"):
        engine_of(bundle).add("a")  # type: ignore[arg-type]


def test_an_id_is_in_use_until_its_last_output_came(bundle: FakeBundle) -> None:
    engine = engine_of(bundle)
    engine.add(request("a", (1, 2)))
    with pytest.raises(InputError, match="in use"):
        engine.add(request("a", (3,)))
    engine.cancel("a")
    with pytest.raises(InputError, match="in use"):
        engine.add(request("a", (3,)))
    engine.step()
    engine.add(request("a", (3,)))
    assert tokens_of(finish(engine)["a"]) == greedy((3,), 5)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        *(({"rows": value}, "rows") for value in (0, 9, -1, 1.5, True)),
        *(({"pages": value}, "pages") for value in (0, 1 << 18, "1")),
        *(({"token_budget": value}, "token_budget") for value in (0, 2.5)),
    ],
)
def test_sizes_out_of_range_are_refused(options: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as caught:
        engine_of(FakeBundle(), **options)
    assert caught.value.where == where


@pytest.mark.parametrize("names", [("decode_paged",), ("prefill_paged", "step_paged"), ("decode",)])
def test_a_bundle_without_the_entries_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(SessionError, match="the engine needs the entries"):
        engine_of(FakeBundle(names))


def test_sizes_that_nobody_chose_fill_every_row() -> None:
    stats = engine_of(FakeBundle()).stats
    assert stats.pages_total == 8 * 16


# Pages.


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


# Calls.


def test_prompts_and_steps_share_a_call_where_an_entry_takes_both() -> None:
    bundle = FakeBundle()
    engine = engine_of(bundle, token_budget=8)
    engine.add(request("a", prompt_of(4), 6))
    engine.step()
    engine.add(request("b", prompt_of(13), 6))
    finish(engine)
    assert [name for name, _ in bundle.calls][:4] == [
        "prefill_paged",
        "step_paged",
        "step_paged",
        "decode_paged",
    ]
    assert [sizes["P"] for name, sizes in bundle.calls if name == "step_paged"] == [7, 6]


def test_prompts_and_steps_take_turns_where_none_does() -> None:
    bundle = FakeBundle(TAKING_TURNS)
    engine = engine_of(bundle, token_budget=8)
    engine.add(request("a", prompt_of(4), 6))
    engine.step()
    engine.add(request("b", prompt_of(20), 6))
    finish(engine)
    assert [name.partition("_")[0] for name, _ in bundle.calls][:7] == [
        "prefill",
        "decode",
        "prefill",
        "decode",
        "prefill",
        "decode",
        "prefill",
    ]


def test_sizes_in_powers_of_two_change_no_token(bundle: FakeBundle) -> None:
    engine = engine_of(bundle, pages=20, token_budget=7)
    ranges = engine._programs._ranges
    ranges |= {name: dataclasses.replace(r, has_buckets=True) for name, r in ranges.items()}
    for number in range(7):
        engine.add(request(str(number), prompt_of(2 * number + 1), 6))
    outputs = finish(engine)
    for number in range(7):
        assert tokens_of(outputs[str(number)]) == greedy(prompt_of(2 * number + 1), 6)
    used = {size for _, sizes in bundle.calls for size in sizes.values()} - {21}  # of the pool
    assert used <= {1, 2, 4, 8}


def test_the_same_requests_make_the_same_calls(bundle: FakeBundle) -> None:
    records = []
    for _ in range(2):
        bundle.calls.clear()
        engine = engine_of(bundle, pages=9, token_budget=7)
        for number in range(9):
            engine.add(request(str(number), prompt_of(number + 1), 8, params=SAMPLED[number % 5]))
        records.append((finish(engine), list(bundle.calls), engine.stats))
    assert records[0] == records[1]
