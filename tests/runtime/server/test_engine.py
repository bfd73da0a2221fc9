"""The API over the real engine and a real, tiny model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

import llama_runtime
from llama_runtime.engine import Engine
from llama_runtime.server.app import Limits
from llama_runtime.server.run import make_app, open_app
from tests.runtime.server.serving import Running, running, wait_for

NUM_ROWS, NUM_PAGES, MAX_SEQ = 8, 64, 256
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "sleeps")


@pytest.fixture(scope="module")
def bundle(tiny_packed_bundle: Path) -> llama_runtime.LoadedBundle:
    return llama_runtime.load(tiny_packed_bundle, threads=1)


@pytest.fixture(scope="module")
def api(bundle: llama_runtime.LoadedBundle) -> Iterator[Running]:
    engine = Engine(bundle, rows=NUM_ROWS, pages=NUM_PAGES)
    app, worker = make_app(bundle, engine, Limits(NUM_ROWS, 256, 1 << 20))
    with running(app, worker) as server:
        yield server
    assert engine.stats.pages_used == 0


@pytest.fixture(autouse=True)
def leaves_no_pages(api: Running) -> Iterator[None]:
    yield
    wait_for(api.is_idle)
    assert api.worker.stats.pages_used == 0


def name(api: Running) -> str:
    return next(iter(api.client.models.list())).id


def complete(api: Running, **fields: Any) -> Any:
    settings = {"model": name(api), "temperature": 0, "max_tokens": 12, **fields}
    return api.client.completions.create(**settings)


def test_other_servers_open_the_application_by_folder(
    tiny_packed_bundle: Path, api: Running
) -> None:
    app = open_app(str(tiny_packed_bundle), threads=1, rows=2, pages=32, hosts=["TestServer"])
    body = {"model": name(api), "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    with TestClient(app) as client:
        answer = client.post("/v1/completions", json=body)
        other = client.post("/v1/completions", json=body, headers={"host": "evil.example"})
    assert (answer.status_code, other.status_code) == (200, 400)
    expected = complete(api, prompt=[5, 6, 7], max_tokens=4).choices[0].text
    assert answer.json()["choices"][0]["text"] == expected


def test_a_greedy_completion_takes_the_likeliest_tokens(
    api: Running, bundle: llama_runtime.LoadedBundle
) -> None:
    answer = complete(api, prompt="The sky is", logprobs=2, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert choice.text == bundle.tokenizer.decode(choice.token_ids)
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(choice.token_ids)
    for own, tops in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert own == max(tops.values())
        assert len(tops) == 2


def test_the_same_seed_gives_the_same_text_alone_and_in_a_batch(api: Running) -> None:
    settings: Any = {"prompt": "Once", "temperature": 1.0, "seed": 7, "max_tokens": 20}
    alone = complete(api, **settings).choices[0].text
    many = complete(api, **{**settings, "prompt": ["other", "Once", "third"]})
    assert many.choices[1].text == alone
    choices = complete(api, **settings, n=3).choices
    assert choices[0].text == alone
    assert len({choice.text for choice in choices}) == 3


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-45])
def test_almost_no_temperature_is_greedy(api: Running, temperature: float) -> None:
    assert (
        complete(api, prompt="abc", temperature=temperature).choices[0].text
        == complete(api, prompt="abc", temperature=1.0, extra_body={"top_k": 1}).choices[0].text
    )


@pytest.mark.parametrize(
    "fields", [{"top_p": 0}, {"top_p": 1}, {"extra_body": {"top_k": 1000}}, {"logit_bias": {}}]
)
def test_limits_of_sampling_give_text(api: Running, fields: Any) -> None:
    assert complete(api, prompt="abc", temperature=1.0, **fields).choices[0].finish_reason


def test_a_bias_forbids_and_forces_a_token(api: Running) -> None:
    fields = {"prompt": "abc", "max_tokens": 4, "extra_body": {"return_token_ids": True}}
    first = complete(api, **fields).choices[0].token_ids[0]
    without = complete(api, **fields, logit_bias={str(first): -100}).choices[0].token_ids
    assert first not in without
    forced = complete(api, **fields, logit_bias={"40": 100}).choices[0].token_ids
    assert forced == [40] * 4


@pytest.mark.parametrize(("num_tokens", "is_long"), [(255, False), (256, True), (2560, True)])
def test_prompts_around_the_capacity(api: Running, num_tokens: int, is_long: bool) -> None:
    body = {"model": name(api), "prompt": [5] * num_tokens, "max_tokens": 50, "temperature": 0}
    status, _, answer = api.post("/v1/completions", body)
    assert status == (400 if is_long else 200)
    if not is_long:
        assert answer["usage"] == {
            "prompt_tokens": 255,
            "completion_tokens": 1,
            "total_tokens": MAX_SEQ,
        }
        assert answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_chat_goes_on_to_its_end(api: Running) -> None:
    talk: Any = [{"role": "user", "content": "Hello"}]
    answer = api.client.chat.completions.create(model=name(api), messages=talk, temperature=0)
    stream = api.client.chat.completions.create(
        model=name(api), messages=talk, temperature=0, stream=True
    )
    parts = list(stream)
    assert answer.choices[0].message.content == "".join(
        part.choices[0].delta.content or "" for part in parts
    )
    assert answer.choices[0].finish_reason == parts[-1].choices[0].finish_reason
    assert answer.usage is not None
    assert answer.usage.total_tokens == MAX_SEQ or answer.choices[0].finish_reason == "stop"


def test_a_cancellation_in_the_middle_frees_pages(api: Running) -> None:
    stream = complete(api, prompt="go on", max_tokens=240, stream=True)
    for number, _ in enumerate(stream):
        if number == 3:
            break
    assert api.worker.stats.pages_used > 0
    steps = api.worker.stats.num_steps
    stream.close()
    wait_for(api.is_idle)
    assert api.worker.stats.num_steps - steps < 200
    assert api.metric("pages_used") == 0


def mixed(number: int) -> dict[str, Any]:
    """A request of some kind: long and short, texts and ids, choices, stops, streams."""
    draw = random.Random(number)
    text = " ".join(draw.choices(WORDS, k=draw.randint(1, 30)))
    fields: dict[str, Any] = {"prompt": text, "max_tokens": draw.randint(1, 24)}
    if draw.random() < 0.3:
        fields["prompt"] = [draw.randrange(5, 100) for _ in range(draw.randint(1, 150))]
    if draw.random() < 0.2:
        fields["n"] = 2
    if draw.random() < 0.3:
        fields["stop"] = [draw.choice("abcdefgh"), "zz"]
    if draw.random() < 0.4:
        fields["stream"] = True
    if draw.random() < 0.3:
        fields["seed"], fields["temperature"] = number, 0.9
    return fields


def texts(api: Running, model: str, number: int) -> dict[int, str]:
    found: dict[int, str] = {}
    fields = {"model": model, "temperature": 0, **mixed(number)}
    answer = api.client.completions.create(**fields)
    for part in answer if fields.get("stream") else [answer]:
        for choice in part.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
    return found


@pytest.mark.slow
def test_two_hundred_mixed_requests_at_once_are_as_one_at_a_time(api: Running) -> None:
    model = name(api)
    alone = [texts(api, model, number) for number in range(200)]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda number: texts(api, model, number), range(200)))
    assert together == alone
    assert sum(map(len, alone)) > 200


def test_a_pool_that_is_too_small_for_a_prompt(bundle: llama_runtime.LoadedBundle) -> None:
    engine = Engine(bundle, rows=2, pages=2)
    app, worker = make_app(bundle, engine, Limits(2, 8, 1 << 20))
    with running(app, worker) as small:
        with pytest.raises(openai.BadRequestError, match="pages"):
            complete(small, prompt=[5] * 40)
        answer = complete(small, prompt=[5] * 20, max_tokens=100).choices[0]
        assert answer.finish_reason in ("length", "stop")
