"""The API over an engine that says what it was told, through real sockets."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from llama_artifacts.errors import InputError, LlamaExportError
from llama_runtime.engine import Request
from llama_runtime.tokenizer import Tokenizer
from tests.runtime.server.fakes import Answer, FakeEngine
from tests.runtime.server.serving import KEY, MODEL, Running, serve_fake, wait_for

SAID = "Hello, world 😀!"
TALK: Any = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Script:
    """What the engine answers, whoever asks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.said: Answer = [*tokenizer.encode(SAID, add_special_tokens=False), None]

    def __call__(self, request: Request) -> Answer:
        return self.said


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[tuple[Running, FakeEngine, Script]]:
    """One server for all tests that leave it as it was."""
    script = Script(tokenizer)
    engine = FakeEngine(script)
    with serve_fake(engine, tokenizer) as server:
        yield server, engine, script


@pytest.fixture
def api(shared: tuple[Running, FakeEngine, Script]) -> Running:
    server, engine, script = shared
    wait_for(lambda: not engine.has_work)
    engine.requests.clear()
    script.said = Script(script.tokenizer).said
    return server


@pytest.fixture
def engine(shared: tuple[Running, FakeEngine, Script]) -> FakeEngine:
    return shared[1]


@pytest.fixture
def script(shared: tuple[Running, FakeEngine, Script]) -> Script:
    return shared[2]


@pytest.fixture
def own_engine(tokenizer: Tokenizer) -> FakeEngine:
    """An engine for a server of the test's own."""
    return FakeEngine(Script(tokenizer))


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


def curl(*words: str) -> str:
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", "20", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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


def test_curl_without_a_content_type_is_refused(api: Running) -> None:
    error = json.loads(curl(api.url + TEXT, "-d", "{}"))["error"]
    assert error["message"] == (
        "expected content of type application/json, got `application/x-www-form-urlencoded`"
    )


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


@pytest.mark.parametrize(
    ("path", "fields", "param", "part"),
    [
        (TEXT, {"max_tokens": "many"}, "max_tokens", "integer"),
        (TEXT, {"temperature": -1}, "temperature", "expected a finite number from 0"),
        (TEXT, {"top_p": 1.5}, "top_p", "from 0 to 1"),
        (TEXT, {"min_p": 2}, "min_p", "from 0 to 1"),
        (TEXT, {"repetition_penalty": 0}, "repetition_penalty", "got 0"),
        (TEXT, {"logit_bias": {"300": 1}}, "logit_bias", "from 0 to 299, got 300"),
        (TEXT, {"stop_token_ids": [300]}, "stop_token_ids", "from 0 to 299, got 300"),
        (TEXT, {"prompt": [5, 300]}, "prompt", "from 0 to 299, got 300"),
        (TEXT, {"prompt": [5, -1]}, "prompt", "from 0 to 299, got -1"),
        (TEXT, {"prompt": ["a"] * 60, "n": 2}, "n", "at most 104 choices, of all prompts"),
        (TEXT, {"unknown": 1}, "unknown", "`unknown` is not supported"),
        (CHAT, {"tools": [{}]}, "tools", "not supported"),
        (CHAT, {"stream": True, "top_logprobs": 99}, "top_logprobs", "20"),
    ],
)
def test_what_is_wrong_is_refused(
    api: Running, engine: FakeEngine, path: str, fields: Any, param: str, part: str
) -> None:
    body = {"model": MODEL, **({"prompt": "a"} if path == TEXT else {"messages": TALK}), **fields}
    status, _, answer = api.post(path, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert part in answer["error"]["message"]
    assert engine.requests == []


def test_the_client_raises_its_own_error(api: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="`nope` is not supported") as caught:
        api.client.completions.create(model=MODEL, prompt="a", extra_body={"nope": 1})
    assert caught.value.param == "nope"


@pytest.mark.parametrize("num_tokens", [256, 257, 2560])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prompt_that_is_too_long(api: Running, num_tokens: int, is_stream: bool) -> None:
    body = {"model": MODEL, "prompt": [5] * num_tokens, "stream": is_stream}
    status, _, answer = api.post(TEXT, body)
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "255 tokens" in answer["error"]["message"]
    assert f"got {num_tokens}" in answer["error"]["message"]


def test_an_answer_is_cut_to_the_room_there_is(api: Running, engine: FakeEngine) -> None:
    answer = api.client.completions.create(model=MODEL, prompt=[5] * 253, max_tokens=999)
    assert engine.requests[0].max_new == 3
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text == SAID[:3]


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_engine_refuses_is_told_before_a_stream_begins(
    api: Running, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    def refuse(request: Request) -> None:
        raise InputError("a prompt of 40 tokens needs 3 pages, the pool has 2", where="prompt")

    monkeypatch.setattr(engine, "add", refuse)
    status, _, answer = api.post(TEXT, {"model": MODEL, "prompt": "a", "stream": is_stream})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert "needs 3 pages, the pool has 2" in answer["error"]["message"]


def test_another_model_is_not_found(api: Running) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        api.client.chat.completions.create(model="gpt", messages=TALK)
    assert caught.value.code == "model_not_found"


def test_models(api: Running) -> None:
    assert [model.id for model in api.client.models.list()] == [MODEL]
    assert api.client.models.retrieve(MODEL).owned_by == "llama-export"
    with pytest.raises(openai.NotFoundError):
        api.client.models.retrieve("other")


@pytest.mark.parametrize(
    ("path", "status"), [("/nothing", 404), ("/v1/embeddings", 404), ("/v1/models", 405)]
)
def test_other_paths_and_methods_have_the_same_shape(api: Running, path: str, status: int) -> None:
    found, _, answer = api.post(path, {})
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_a_body_over_the_cap(api: Running, engine: FakeEngine) -> None:
    status, _, answer = api.post(TEXT, {"model": MODEL, "prompt": "a" * 100_000})
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert engine.requests == []
    assert api.client.completions.create(model=MODEL, prompt="a").choices[0].text


def test_a_key_is_asked_for_under_v1_alone(own_engine: FakeEngine, tokenizer: Tokenizer) -> None:
    with serve_fake(own_engine, tokenizer, api_key=KEY) as api:
        assert api.client.completions.create(model=MODEL, prompt="a").choices[0].text
        for given in ({}, {"Authorization": "Bearer other"}, {"Authorization": KEY}):
            status, headers, answer = api.post(TEXT, {"model": MODEL, "prompt": "a"}, **given)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert headers["WWW-Authenticate"] == "Bearer"
        assert json.loads(api.get("/health")) == {"status": "ok"}
        assert api.metric("rows") == 4
    assert len(own_engine.requests) == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_failure_of_one_request(api: Running, script: Script, is_stream: bool) -> None:
    script.said = [*script.said[:2], LlamaExportError("the logits are not finite")]
    if is_stream:
        stream = api.client.completions.create(model=MODEL, prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="not finite"):
            list(stream)
    else:
        with pytest.raises(openai.InternalServerError, match="not finite"):
            api.client.completions.create(model=MODEL, prompt="a")
    script.said = [*script.tokenizer.encode("ok", add_special_tokens=False), None]
    assert api.client.completions.create(model=MODEL, prompt="a").choices[0].text == "ok"


def test_a_failed_stream_ends_with_the_error_and_is_not_done(api: Running, script: Script) -> None:
    script.said = [*script.said[:2], LlamaExportError("broken")]
    body = json.dumps({"model": MODEL, "messages": TALK, "stream": True})
    text = curl(api.url + CHAT, "-H", "Content-Type: application/json", "-d", body)
    *_, last, nothing = text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "broken"
    assert nothing == ""


def test_no_chat_without_a_template(own_engine: FakeEngine, tokenizer: Tokenizer) -> None:
    plain = Tokenizer(tokenizer._backend)
    with serve_fake(own_engine, plain) as api:
        with pytest.raises(openai.BadRequestError, match="no chat template; use /v1/completions"):
            api.client.chat.completions.create(model=MODEL, messages=TALK)
        assert api.client.completions.create(model=MODEL, prompt="a").choices[0].text


def test_messages_that_the_template_refuses(own_engine: FakeEngine, tokenizer: Tokenizer) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    strict = Tokenizer(tokenizer._backend, chat_template=template, where="/secret/place")
    with serve_fake(own_engine, strict) as api:
        status, _, answer = api.post(CHAT, {"model": MODEL, "messages": TALK})
    assert status == 400
    assert "roles must alternate" in answer["error"]["message"]
    assert "secret" not in answer["error"]["message"]


def test_a_template_cannot_leave_its_sandbox(own_engine: FakeEngine, tokenizer: Tokenizer) -> None:
    hostile = Tokenizer(tokenizer._backend, chat_template="{{ ''.__class__.__mro__ }}")
    with serve_fake(own_engine, hostile) as api:
        status, _, _ = api.post(CHAT, {"model": MODEL, "messages": TALK})
    assert status == 400


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
