from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_artifacts.errors import InputError
from llama_runtime.sampling import Chooser, Sampler, SamplingParams

NEG_INF = float("-inf")


def draw(logits: torch.Tensor, num: int, **params: Any) -> list[int]:
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 0, **params}))
    return [token for _ in range(num) for token in sampler.sample(logits)]


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 1e-45])
def test_a_vanishing_temperature_is_greedy_with_the_first_of_ties(temperature: float) -> None:
    logits = torch.tensor([[0.0, 7.0, 7.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    sampler = Sampler(SamplingParams(temperature=temperature, seed=1))
    assert sampler.sample(logits) == [1, 0]


@pytest.mark.parametrize("filters", [{"top_p": 0.0}, {"top_p": 0}, {"top_k": 1}, {"min_p": 1.0}])
def test_a_filter_that_leaves_one_token_takes_the_best(filters: dict[str, float]) -> None:
    logits = random_logits(50)
    assert set(draw(logits, 20, temperature=5.0, **filters)) == {int(logits.argmax())}


def test_top_p_0_takes_the_first_of_ties() -> None:
    assert set(draw(torch.zeros(5), 20, top_p=0.0)) == {0}


@pytest.mark.parametrize("top_k", [0, 50, 1000])
def test_a_top_k_of_everything_changes_nothing(top_k: int) -> None:
    logits = random_logits(50)
    counts = torch.bincount(torch.tensor(draw(logits, 2000, top_k=top_k)), minlength=50)
    assert (counts / 2000 - logits.softmax(-1)).abs().max() < 0.03


def test_top_k_keeps_the_k_best_in_their_proportion() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    tokens = torch.tensor(draw(logits, 3000, top_k=2))
    counts = torch.bincount(tokens, minlength=4) / 3000
    assert torch.allclose(counts, torch.tensor([0.0, 4 / 7, 0.0, 3 / 7]), atol=0.04)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.35, {1}), (0.5, {1, 3}), (0.75, {1, 2, 3}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_best_until_their_sum_is_reached(top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert set(draw(logits, 300, top_p=top_p)) == kept


def test_top_p_counts_among_what_top_k_left() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()  # of two tokens the best has 4/7
    assert set(draw(logits, 200, top_k=2, top_p=0.55)) == {1}
    assert set(draw(logits, 200, top_k=2, top_p=0.6)) == {1, 3}


@pytest.mark.parametrize(("min_p", "kept"), [(0.6, {1, 3}), (0.3, {1, 2, 3}), (0.2, {0, 1, 2, 3})])
def test_min_p_is_a_share_of_the_best(min_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert set(draw(logits, 300, min_p=min_p)) == kept


def test_top_p_that_needs_more_than_the_likeliest_thousand() -> None:
    tokens = draw(torch.zeros(4000), 600, top_p=0.5)
    assert max(tokens) < 2000
    assert max(tokens) > 1100


def test_temperature_sharpens_and_flattens() -> None:
    logits = torch.tensor([2.0, 1.0])
    for temperature in (0.5, 1.0, 3.0):
        share = draw(logits, 2000, temperature=temperature).count(0) / 2000
        assert abs(share - float((logits / temperature).softmax(-1)[0])) < 0.04


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = random_logits(1000)
    assert draw(logits, 20, seed=7) == draw(logits, 20, seed=7)
    assert draw(logits, 20, seed=7) != draw(logits, 20, seed=8)
    assert draw(logits, 20, seed=None) != draw(logits, 20, seed=None)
    assert len(draw(logits, 3, seed=(1 << 64) - 1)) == 3


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.01}])
def test_a_row_draws_the_same_alone_and_in_a_batch(filters: dict[str, float]) -> None:
    steps = [random_logits(3, 300, seed=step) for step in range(10)]
    params = SamplingParams(temperature=1.0, seed=5, **filters)  # type: ignore[arg-type]
    alone, pair, batch = Sampler(params), Sampler(params), Sampler(params)
    for logits in steps:
        tokens = batch.sample(logits)
        assert alone.sample(logits[0]) == tokens[:1]
        assert pair.sample(logits[:2]) == tokens[:2]


def test_rows_of_a_batch_draw_differently() -> None:
    assert len(set(Sampler(SamplingParams(1.0, seed=3)).sample(torch.zeros(8, 10_000)))) == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_are_taken_to_float32(dtype: torch.dtype) -> None:
    logits = random_logits(200).to(dtype)
    assert draw(logits, 20, top_p=0.8) == draw(logits.float(), 20, top_p=0.8)


def test_the_logits_are_left_alone() -> None:
    logits = random_logits(2, 30)
    before = logits.clone()
    draw(logits, 3, top_k=5, top_p=0.5, min_p=0.1)
    assert torch.equal(logits, before)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([NEG_INF, -3e38, -50.0, 0.0, 1.0, 50.0, 3e38]), min_size=1),
    st.sampled_from([1e-5, 1e-3, 1.0, 1e30, 1e300]),
    st.sampled_from([0, 1, 2, 1000]),
    st.sampled_from([0.0, 1e-45, 0.5, 1.0]),
    st.sampled_from([0.0, 1e-45, 0.5, 1.0]),
)
def test_an_impossible_token_is_never_drawn(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.tensor([*values, 0.0])
    for token in draw(logits, 3, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p):
        assert logits[token] > NEG_INF


@pytest.mark.parametrize(
    "uniform", [torch.zeros(1), torch.tensor([1.0])], ids=["lowest", "rounded to the whole"]
)
def test_the_ends_of_the_draw_reach_no_impossible_token(
    uniform: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chooser, "_uniform", lambda self: uniform.double())
    logits = torch.tensor([NEG_INF, 0.0, 0.0, NEG_INF])
    assert draw(logits, 1) == [1 if uniform == 0 else 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad", [[float("nan"), 1.0], [float("inf"), 1.0], [NEG_INF, NEG_INF]], ids=str
)
def test_a_row_without_a_finite_maximum_is_refused_by_number(
    bad: list[float], temperature: float
) -> None:
    with pytest.raises(InputError, match="finite maximum") as caught:
        Sampler(SamplingParams(temperature)).sample(torch.tensor([[0.0, 1.0], bad]))
    assert caught.value.where == "logits[1]"


@pytest.mark.parametrize(
    "logits", [torch.zeros(()), torch.zeros(0), torch.zeros(1, 1, 4), torch.zeros(4).int()]
)
def test_other_shapes_and_types_of_logits_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(InputError, match="logits"):
        Sampler(SamplingParams()).sample(logits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), "1", None, True)),
        *(("top_k", value) for value in (-1, 1.5, "3", None, True)),
        *(("top_p", value) for value in (-0.1, 1.1, float("nan"), "1", None, False)),
        *(("min_p", value) for value in (-0.1, 1.1, float("nan"), "1", None)),
        *(("seed", value) for value in (-1, 1 << 64, 0.5, "7", True)),
    ],
)
def test_a_bad_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match=r"expected .* got") as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.where == field
    assert caught.value.hint


def test_the_parameters_need_no_torch() -> None:
    code = (
        "import sys, llama_runtime.sampling as s; s.SamplingParams(1.0); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Penalties and bias.


def last(logits: list[float], text: list[int], prompt: tuple[int, ...] = (), **params: Any) -> int:
    """What a greedy chooser takes after a prompt and a text."""
    chooser = Chooser(SamplingParams(**params), prompt)
    for token in text:
        chooser.add(token)
    return chooser.choose(torch.tensor(logits))


@pytest.mark.parametrize(
    ("logits", "text", "prompt", "params", "token"),
    [
        ([4.0, 3.0], [0], (), {"repetition_penalty": 1.5}, 1),
        ([4.0, 3.0], [], (0,), {"repetition_penalty": 1.5}, 1),
        ([4.0, 3.0], [0, 0, 0], (0,), {"repetition_penalty": 1.2}, 0),  # once, however often
        ([-2.0, -3.0], [0], (), {"repetition_penalty": 2.0}, 1),
        ([4.0, 3.0], [1], (), {"repetition_penalty": 0.5}, 1),
        ([4.0, 3.0], [0], (), {"presence_penalty": 1.5}, 1),
        ([4.0, 3.0], [], (0,), {"presence_penalty": 1.5}, 0),  # the prompt does not count
        ([4.0, 3.0], [0, 0, 0], (), {"presence_penalty": 0.9}, 0),
        ([4.0, 3.0], [0, 0, 0], (), {"frequency_penalty": 0.4}, 1),
        ([4.0, 3.0], [0, 0], (), {"frequency_penalty": 0.4}, 0),
        ([4.0, 3.0], [1, 1], (), {"frequency_penalty": -0.6}, 1),
        ([4.0, 3.0], [], (), {"logit_bias": {1: 1.5}}, 1),
        ([4.0, 3.0], [], (), {"logit_bias": {0: -100, 1: 0}}, 1),
    ],
)
def test_penalties_and_bias(
    logits: list[float], text: list[int], prompt: tuple[int, ...], params: Any, token: int
) -> None:
    assert last(logits, text, prompt, **params) == token


def test_a_sampler_counts_its_own_tokens_and_the_prompt() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=1.5), prompt=(1,))
    logits = torch.tensor([[4.0, 3.0, 2.6], [1.0, 3.0, 2.6]])
    assert [sampler.sample(logits) for _ in range(3)] == [[0, 1], [1, 2], [2, 1]]


def test_choosing_twice_draws_once() -> None:
    chooser, logits = Chooser(SamplingParams(temperature=1.0)), random_logits(1000)
    assert len({chooser.choose(logits) for _ in range(10)}) == 1


def test_a_bias_of_a_token_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="token ids below 2"):
        last([1.0, 2.0], [], logit_bias={2: 1.0})


def test_an_overflow_by_a_penalty_is_refused() -> None:
    with pytest.raises(InputError, match="finite maximum"):
        last([3e38, 1.0], [0], repetition_penalty=0.1)


def test_parameters_cannot_be_changed_through_their_bias() -> None:
    bias = {1: 5.0}
    params = SamplingParams(logit_bias=bias)
    bias[0] = 50.0
    assert params.logit_bias == {1: 5.0}
    assert hash(params) == hash(SamplingParams(logit_bias={2: 1.0}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("repetition_penalty", value) for value in (0, -1, 101, float("nan"), "1", True)),
        *(("presence_penalty", value) for value in (1e7, float("inf"), None)),
        *(("frequency_penalty", value) for value in (-1e7, float("nan"), None)),
        *(("logit_bias", v) for v in ([], {"1": 1.0}, {-1: 1.0}, {1: float("inf")}, {1: None})),
    ],
)
def test_a_bad_penalty_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match=r"expected .* got") as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.where == field
