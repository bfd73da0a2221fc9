from __future__ import annotations

import json
from typing import Any

import pytest

from llama_runtime.server.errors import ApiError
from llama_runtime.server.schema import ChatRequest, CompletionRequest, parse

TALK = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionRequest:
    body = {"model": "m", "prompt": "hi", **fields}
    return parse(CompletionRequest, json.dumps(body).encode())


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"model": "m", "messages": TALK, **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"prompt": 5}, "prompt", "expected text, token ids, or a list of either, got 5"),
        ({"prompt": []}, "prompt", "got an empty list"),
        ({"prompt": None}, "prompt", "got null"),
        ({"prompt": [1, "a"]}, "prompt", "a list of something else"),
        ({"prompt": [[1], []]}, "prompt", "a list of something else"),
        ({"prompt": [True]}, "prompt", "a list of something else"),
        ({"prompt": [1.0]}, "prompt", "a list of something else"),
        ({"model": 3}, "model", "string"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": 10**30}, "max_tokens", ""),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 1000}, "n", "less than or equal to 128"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
        ({"stop": ""}, "stop", "1 to 1000 characters"),
        ({"stop": ["a", ""]}, "stop", "1 to 1000 characters"),
        ({"stop": [1]}, "stop", "expected a string or a list of strings, got a list"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"logit_bias": [1]}, "logit_bias", "got a list"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "got `x`"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "got `-1`"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"5": "1"}}, "logit_bias", "from -100 to 100"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, None, "needs `stream: true`"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not supported"),
        ({"echo": True}, "echo", "False"),
        ({"best_of": 2}, "best_of", "1"),
        ({"suffix": "end"}, "suffix", "not supported: expected null, got text"),
        ({"guided_regex": "a+"}, "guided_regex", "`guided_regex` is not supported"),
        ({"messages": TALK}, "messages", "not supported"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "integer"),
    ],
)
def test_a_completion_that_is_refused(fields: Any, param: str | None, part: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert part in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "array"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "got none"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "got null"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user'"),
        ({"messages": [{**TALK[0], "name": "Eve"}]}, "messages[0].name", "not supported"),
        ({"messages": [{**TALK[0], "tool_calls": []}]}, "messages[0].tool_calls", "got an empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            "expected parts of type `text`, got `image_url`",
        ),
        ({"tools": []}, "tools", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"tool_choice": "auto"}, "tool_choice", "'none'"),
        ({"functions": []}, "functions", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "'text'"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"top_logprobs": 3}, None, "needs `logprobs: true`"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, None, "differ"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ],
)
def test_a_chat_that_is_refused(fields: Any, param: str | None, part: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert part in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "a", "temperature": NaN}',
        b'{"model": "m", "prompt": "a", "temperature": 1e999}',
        b'{"model": "m", "prompt": ' + b"[" * 100_000,
    ],
    ids=["empty", "cut", "list", "null", "bytes", "surrogate", "nan", "infinite", "deep"],
)
def test_what_is_no_body_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(CompletionRequest, body)
    assert caught.value.status == 400
    assert caught.value.message


def test_null_is_the_default() -> None:
    names = set(CompletionRequest.model_fields) - {"model", "prompt"}
    assert completion(**dict.fromkeys(names)) == completion()


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("hi", ("hi",)),
        (["hi", "ho"], ("hi", "ho")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ("", ("",)),
    ],
)
def test_a_prompt_in_each_form(prompt: Any, found: Any) -> None:
    assert completion(prompt=prompt).prompt == found


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = chat(messages=[{"role": "developer", "content": parts}]).messages[0]
    assert message.to_dict() == {"role": "system", "content": "ab"}


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None}
    assert chat(messages=[*TALK, answer]).messages[1].content == "a"


def test_a_long_name_is_cut_in_the_message() -> None:
    with pytest.raises(ApiError) as caught:
        completion(**{"x" * 10_000: 1})
    assert len(caught.value.message) < 200
