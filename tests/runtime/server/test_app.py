"""The API over an engine that says what it was told, through real sockets."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from llama_runtime.tokenizer import Tokenizer
from tests.runtime.server.fakes import FakeEngine
from tests.runtime.server.serving import (
    CHAT,
    MODEL,
    SAID,
    TALK,
    TEXT,
    Running,
    Script,
    curl,
    serve_fake,
    wait_for,
)


def test_chat(api: Running, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    answer = api.client.chat.completions.create(model=MODEL, messages=TALK)
    assert answer.choices[0].message.content == SAID
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    num_new = len(tokenizer.encode(SAID, add_special_tokens=False)) + 1
    prompt = tokenizer.encode_chat(TALK)
    assert answer.usage is not None
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
        "prompt_tokens": len(prompt),
        "completion_tokens": num_new,
    }
    assert engine.requests[0].prompt == tuple(prompt)
    assert prompt.count(1) == 1  # one token begins the text
    assert engine.requests[0].max_new == 256 - len(prompt)
    assert engine.requests[0].stop_tokens == {2}


def test_completion(api: Running, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    answer = api.client.completions.create(model=MODEL, prompt="Say", max_tokens=5)
    assert answer.choices[0].text == SAID[:5]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert engine.requests[0].prompt == tuple(tokenizer.encode("Say"))
    assert engine.requests[0].prompt.count(1) == 1


def test_a_completion_has_sixteen_tokens_unless_told(api: Running, engine: FakeEngine) -> None:
    api.client.completions.create(model=MODEL, prompt="Say")
    assert engine.requests[0].max_new == 16


def test_parameters_reach_the_engine(api: Running, engine: FakeEngine) -> None:
    api.client.completions.create(
        model=MODEL,
        prompt=[5, 6, 7],
        n=2,
        temperature=0.5,
        top_p=0.25,
        seed=-1,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"7": -100},
        user="someone",
        extra_body={
            "top_k": 3,
            "min_p": 0.125,
            "repetition_penalty": 2,
            "stop_token_ids": [9],
            "ignore_eos": True,
        },
    )
    first, second = engine.requests
    assert first.prompt == second.prompt == (5, 6, 7)
    assert first.stop_tokens == {9}
    assert vars(first.params) == {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": (1 << 64) - 1,
        "repetition_penalty": 2,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {7: -100},
    }
    assert second.params.seed not in (None, first.params.seed)


def test_temperature_is_one_unless_given(api: Running, engine: FakeEngine) -> None:
    api.client.completions.create(model=MODEL, prompt="a")
    api.client.completions.create(model=MODEL, prompt="a", temperature=0)
    assert [request.params.temperature for request in engine.requests] == [1.0, 0.0]
    assert [request.params.seed for request in engine.requests] == [None, None]


def test_a_streamed_chat_is_the_same_text(api: Running) -> None:
    chunks = list(
        api.client.chat.completions.create(
            model=MODEL, messages=TALK, stream=True, stream_options={"include_usage": True}
        )
    )
    *parts, counts = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == SAID
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].choices[0].finish_reason == "stop"
    assert {part.usage for part in parts} == {None}
    assert counts.choices == []
    assert counts.usage is not None
    assert counts.usage.completion_tokens == len(SAID.encode()) + 1
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_streamed_completion_is_the_same_text(api: Running) -> None:
    chunks = list(
        api.client.completions.create(model=MODEL, prompt="a", max_tokens=50, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == SAID
    assert len(chunks) > 5
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is None


def test_curl_gets_events_that_end_with_done(api: Running) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3, "stream": True}
    kind = "Content-Type: application/json"
    text = curl("--include", api.url + TEXT, "-H", kind, "-d", json.dumps(body))
    head, _, rest = text.replace("\r\n", "\n").partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert "content-type: text/event-stream" in head
    *events, done, nothing = rest.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    found = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in found) == SAID[:3]
    assert found[-1]["finish_reason"] == "length"


def test_stop_texts_across_tokens(api: Running, engine: FakeEngine) -> None:
    settings: Any = {"model": MODEL, "prompt": "or not", "max_tokens": 50, "stop": ["orl", "😀"]}
    whole = api.client.completions.create(**settings).choices[0]
    chunks = list(api.client.completions.create(**settings, stream=True))
    assert whole.text == "".join(chunk.choices[0].text for chunk in chunks) == "Hello, w"
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    wait_for(lambda: not engine.has_work)


def test_several_choices_of_several_prompts(api: Running, script: Script) -> None:
    answer = api.client.completions.create(model=MODEL, prompt=["a", "bc"], n=3, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert {choice.text for choice in answer.choices} == {SAID[:4]}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2 + 3, 24)


def test_streamed_choices_come_side_by_side(api: Running) -> None:
    texts = {0: "", 1: ""}
    stream = api.client.chat.completions.create(model=MODEL, messages=TALK, n=2, stream=True)
    order = []
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            order.append(choice.index)
    assert texts == {0: SAID, 1: SAID}
    assert order != sorted(order)


def test_logprobs_of_a_chat(api: Running, tokenizer: Tokenizer) -> None:
    settings: Any = {"model": MODEL, "messages": TALK, "logprobs": True, "top_logprobs": 2}
    whole = api.client.chat.completions.create(**settings).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert len(whole.content) == len(SAID.encode())
    first = whole.content[0]
    assert (first.token, first.logprob, first.bytes) == ("H", -0.5, [72])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("H", -0.5), ("I", -1.5)]
    assert whole.content[-2].bytes is None  # a part of a character
    streamed = [
        token
        for chunk in api.client.chat.completions.create(**settings, stream=True)
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed == whole.content


def test_logprobs_of_a_completion(api: Running) -> None:
    answer = api.client.completions.create(model=MODEL, prompt="a", max_tokens=3, logprobs=1)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens == ["H", "e", "l"]
    assert found.token_logprobs == [-0.5] * 3
    assert found.top_logprobs == [{"H": -0.5}, {"e": -0.5}, {"l": -0.5}]
    assert found.text_offset == [0, 1, 2]


def test_token_ids_of_the_answer(api: Running, script: Script) -> None:
    body = {"model": MODEL, "prompt": "a", "return_token_ids": True}
    _, _, answer = api.post(TEXT, {**body, "max_tokens": 3})
    assert answer["choices"][0]["token_ids"] == list(script.said[:3])


def test_an_answer_is_cut_to_the_room_there_is(api: Running, engine: FakeEngine) -> None:
    answer = api.client.completions.create(model=MODEL, prompt=[5] * 253, max_tokens=999)
    assert engine.requests[0].max_new == 3
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text == SAID[:3]


def test_models(api: Running) -> None:
    assert [model.id for model in api.client.models.list()] == [MODEL]
    assert api.client.models.retrieve(MODEL).owned_by == "llama-export"
    with pytest.raises(openai.NotFoundError):
        api.client.models.retrieve("other")


def test_without_a_tokenizer_ids_go_in_and_out(
    own_engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    said = Script(tokenizer).said
    with serve_fake(own_engine, None) as api:
        body: Any = {"model": MODEL, "prompt": [5, 6], "max_tokens": 3, "logprobs": 0}
        status, _, answer = api.post(TEXT, body)
        assert status == 200
        assert answer["choices"][0]["text"] == ""
        assert answer["choices"][0]["token_ids"] == list(said[:3])
        assert answer["choices"][0]["logprobs"]["tokens"][0] == f"token_id:{said[0]}"
        for fields in ({"prompt": "text"}, {"stop": "x"}):
            status, _, answer = api.post(TEXT, {**body, **fields})
            assert status == 400
            assert "no tokenizer" in answer["error"]["message"]
        assert api.post(CHAT, {"model": MODEL, "messages": TALK})[0] == 400


def test_metrics(own_engine: FakeEngine, tokenizer: Tokenizer) -> None:
    with serve_fake(own_engine, tokenizer) as api:
        api.client.completions.create(model=MODEL, prompt="a", max_tokens=4)
        api.post(TEXT, {})
        api.post("/no/such/path", {})
        assert api.metric("generated_tokens_total") == 4
        assert api.metric("prompt_tokens_total") == 2
        assert api.metric("pages") == 64
        assert api.metric("pages_used") == api.metric("requests_running") == 0
        assert api.metric("time_to_first_token_seconds_count") == 1
        assert api.metric("inter_token_latency_seconds_count") == 3
        text = api.get("/metrics")
        assert 'http_requests_total{path="/v1/completions",status="200"} 1.0' in text
        assert 'http_requests_total{path="/v1/completions",status="400"} 1.0' in text
        assert 'http_requests_total{path="other",status="404"} 1.0' in text
