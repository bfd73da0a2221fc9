"""A request of the API becomes requests of the engine: prompts as tokens, parameters checked."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llama_runtime.engine import Request
from llama_runtime.sampling import SamplingParams
from llama_runtime.server.errors import ApiError
from llama_runtime.server.schema import ChatRequest, CompletionRequest, Sampling
from llama_runtime.server.text import Choice
from llama_runtime.tokenizer import Tokenizer

_DEFAULT_MAX_NEW = 16  # of a completion, in OpenAI's API; a chat goes on to its end
_SEED_RANGE = 1 << 64
_SEED_STRIDE = 0x9E3779B97F4A7C15  # spreads the seeds of the choices over the whole range


@dataclass(frozen=True)
class Served:
    """What is served.

    Attributes:
        name: the model's name in the API.
        tokenizer: None where the bundle has none.
        vocab_size: token ids are below it.
        stop_tokens: ids that end an answer.
        capacity: positions of one request, prompt and answer together.
        created: when the server was started, in seconds since 1970.
    """

    name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    stop_tokens: frozenset[int]
    capacity: int
    created: int


@dataclass(frozen=True)
class Job:
    """The engine's requests of one HTTP request and, in the same order, the choices they fill."""

    requests: tuple[Request, ...]
    choices: tuple[Choice, ...]
    num_prompt_tokens: int


def completion_job(served: Served, body: CompletionRequest) -> Job:
    """The work of `/v1/completions`; slow where a prompt is long text.

    Raises:
        ApiError: a prompt is too long, or needs a tokenizer that is not there.
        InputError: a parameter is out of range.
    """
    prompts = [_prompt_ids(served, prompt) for prompt in body.prompt]
    return _job(served, body, prompts, body.max_tokens or _DEFAULT_MAX_NEW, body.logprobs)


def chat_job(served: Served, body: ChatRequest) -> Job:
    """The work of `/v1/chat/completions`; slow where the messages are long.

    Raises:
        ApiError: the messages are too long, or need a template that is not there.
        InputError: a parameter is out of range.
        TokenizerError: the template refuses the messages.
    """
    if served.tokenizer is None or not served.tokenizer.has_chat_template:
        message = f"`{served.name}` has no chat template; use /v1/completions"
        raise ApiError(400, message, param="messages")
    prompt = served.tokenizer.encode_chat([message.to_dict() for message in body.messages])
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_new = body.max_completion_tokens or body.max_tokens or served.capacity
    return _job(served, body, [prompt], max_new, num_logprobs, param="messages")


def _prompt_ids(served: Served, prompt: str | tuple[int, ...]) -> Sequence[int]:
    if isinstance(prompt, str):
        return _tokenizer(served, "prompt").encode(prompt)
    bad = next((id for id in prompt if not 0 <= id < served.vocab_size), None)
    if bad is not None:
        message = f"expected token ids from 0 to {served.vocab_size - 1}, got {bad}"
        raise ApiError(400, message, param="prompt")
    return prompt


def _tokenizer(served: Served, param: str) -> Tokenizer:
    if served.tokenizer is None:
        message = f"`{served.name}` has no tokenizer: give the prompt as token ids, and no text"
        raise ApiError(400, message, param=param)
    return served.tokenizer


def _job(
    served: Served,
    body: Sampling,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    num_logprobs: int | None,
    *,
    param: str = "prompt",
) -> Job:
    if body.stop:
        _tokenizer(served, "stop")
    for prompt in prompts:
        _check_len(served, len(prompt), param)
    stop_tokens = _stop_tokens(served, body)
    requests = tuple(
        Request(
            id=uuid.uuid4().hex,
            prompt=tuple(prompt),
            params=params,
            max_new=min(max_new, served.capacity - len(prompt)),
            stop_tokens=stop_tokens,
            num_logprobs=num_logprobs,
        )
        for prompt in prompts
        for params in _params(served, body)
    )
    choices = tuple(
        Choice(index, served.tokenizer, body.stop or ()) for index in range(len(requests))
    )
    return Job(requests, choices, sum(map(len, prompts)))


def _check_len(served: Served, num_tokens: int, param: str) -> None:
    if num_tokens >= served.capacity:
        message = (
            f"expected a prompt of at most {served.capacity - 1} tokens, so that one of the"
            f" {served.capacity} positions is left for the answer, got {num_tokens}"
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    if num_tokens == 0:
        raise ApiError(400, "expected a prompt of at least one token, got none", param=param)


def _params(served: Served, body: Sampling) -> Iterator[SamplingParams]:
    """How each choice of a prompt is drawn: with a seed, each has its own, made from that one."""
    biases = dict(body.logit_bias or ())
    bad = next((id for id in biases if id >= served.vocab_size), None)
    if bad is not None:
        message = f"expected token ids from 0 to {served.vocab_size - 1}, got {bad}"
        raise ApiError(400, message, param="logit_bias")
    for number in range(body.num_choices):
        seed = None if body.seed is None else (body.seed + number * _SEED_STRIDE) % _SEED_RANGE
        yield SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=body.top_k or 0,
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            seed=seed,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=biases,
        )


def _stop_tokens(served: Served, body: Sampling) -> frozenset[int]:
    ids = body.stop_token_ids or ()
    bad = next((id for id in ids if not 0 <= id < served.vocab_size), None)
    if bad is not None:
        message = f"expected token ids from 0 to {served.vocab_size - 1}, got {bad}"
        raise ApiError(400, message, param="stop_token_ids")
    return frozenset(ids) | (frozenset() if body.ignore_eos else served.stop_tokens)
