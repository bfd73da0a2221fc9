"""What the API refuses, and how failures are told."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from llama_artifacts.errors import InputError, LlamaExportError
from llama_runtime.engine import Request
from llama_runtime.tokenizer import Tokenizer
from tests.runtime.server.fakes import FakeEngine
from tests.runtime.server.serving import (
    CHAT,
    KEY,
    MODEL,
    TALK,
    TEXT,
    Running,
    Script,
    curl,
    serve_fake,
)


def test_curl_without_a_content_type_is_refused(api: Running) -> None:
    error = json.loads(curl(api.url + TEXT, "-d", "{}"))["error"]
    assert error["message"] == (
        "expected content of type application/json, got `application/x-www-form-urlencoded`"
    )


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
