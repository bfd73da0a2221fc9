"""The engine over programs whose every answer is known: texts, ends, log-probabilities, calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from llama_artifacts.errors import InputError, SessionError
from llama_runtime.engine import Output
from llama_runtime.sampling import SamplingParams
from tests.runtime.engine.fakes import (
    TAKING_TURNS,
    VOCAB_SIZE,
    FakeBundle,
    alone,
    engine_of,
    finish,
    greedy,
    logits_after,
    prompt_of,
    request,
    tokens_of,
)

SAMPLED = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, seed=7),
    SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(presence_penalty=2.0, logit_bias={4: 1.5, 9: -100.0}),
)


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
