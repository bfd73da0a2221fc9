"""What is asked of the engine, what it answers, and a request on its way."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Literal

from llama_artifacts.errors import InputError, LlamaExportError
from llama_runtime.engine.blocks import Prefix
from llama_runtime.sampling import Chooser, SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Request:
    """A prompt to go on from; `Engine.add` checks it.

    Attributes:
        id: distinct among the requests that the engine has.
        prompt: token ids, at least one.
        params: how to choose tokens.
        max_new: most tokens to give, at least 1.
        stop_tokens: token ids that end the text and are not given; such as the bundle's
            `manifest.stop_tokens`.
        num_logprobs: None: no log-probabilities; else that of each token, and so many of the
            likeliest, of the model's own distribution (before penalties, bias and filters).
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    max_new: int
    stop_tokens: frozenset[int] = frozenset()
    num_logprobs: int | None = None


@dataclass(frozen=True)
class Output:
    """What one step gave one request.

    Attributes:
        request_id: of the request.
        token: the new token; None where the text ended without one: at a stop token, by a
            cancellation or an error.
        logprob: its natural log-probability, where asked for.
        top_logprobs: the likeliest tokens with theirs, likeliest first, where asked for.
        finish_reason: None: more will come. Else the last output of its request: `stop` (a stop
            token came), `length` (`max_new` tokens, or no position is left: the last token needs
            none), `cancelled`, or `error`.
        error: why, for `error`.
    """

    request_id: str
    token: int | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    error: LlamaExportError | None = None


@dataclass(frozen=True)
class Limits:
    """What a request can have at most.

    Attributes:
        vocab_size: V.
        max_positions: positions of one text that the programs and the pool have.
        page_size: positions of a page.
        num_pages: pages of the pool.
    """

    vocab_size: int
    max_positions: int
    page_size: int
    num_pages: int


class Status(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Job:
    """A request on its way.

    Of its `tokens` (the prompt and the new ones) the first `num_computed` have keys and values in
    its `pages`; full pages of these are known to the prefix cache up to `prefix`. It always holds:

        prefix <= num_computed < len(tokens);  num_computed <= len(pages) * page_size
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.chooser = Chooser(request.params, request.prompt)
        self.tokens = list(request.prompt)
        self.status = Status.WAITING
        self.pages: list[int] = []
        self.num_computed = 0
        self.prefix: Prefix | None = None
        self.was_admitted = False

    @property
    def num_new(self) -> int:
        """Tokens given so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_pending(self) -> int:
        """Tokens that the model has still to see; the next token comes after the last of them."""
        return len(self.tokens) - self.num_computed

    def check(self, page_size: int) -> None:
        """Asserts the order of the lengths."""
        num_known = 0 if self.prefix is None else self.prefix.num_pages * page_size
        assert num_known <= self.num_computed < len(self.tokens)
        assert self.num_computed <= len(self.pages) * page_size
        assert self.num_new <= self.request.max_new


def check_request(request: Request, limits: Limits) -> None:
    """Refuses a request that could never run.

    Raises:
        InputError: a field has the wrong type or is out of its range.
    """
    if not isinstance(request, Request):
        raise InputError(f"expected a Request, got a {type(request).__name__}", where="request")
    if not isinstance(request.id, str) or not request.id:
        raise _refused("id", "a text", request.id)
    if not isinstance(request.params, SamplingParams):
        raise _refused("params", "SamplingParams", request.params)
    checked_int("max_new", request.max_new, 1, None)
    if request.num_logprobs is not None:
        checked_int("num_logprobs", request.num_logprobs, 0, limits.vocab_size)
    for name in ("prompt", "stop_tokens"):
        _check_tokens(name, getattr(request, name), limits.vocab_size)
    _check_tokens("logit_bias", tuple(request.params.logit_bias), limits.vocab_size)
    _check_len(len(request.prompt), limits)


def _check_len(num_tokens: int, limits: Limits) -> None:
    if num_tokens == 0:
        raise InputError("expected at least 1 token, got none", where="prompt")
    num_pages = -(-num_tokens // limits.page_size)
    if num_pages > limits.num_pages:
        raise InputError(
            f"a prompt of {num_tokens} tokens needs {num_pages} pages, "
            f"the pool has {limits.num_pages}",
            where="prompt",
            hint="shorten the prompt, or give the engine more pages",
        )
    if num_tokens > limits.max_positions:
        raise InputError(
            f"expected at most {limits.max_positions} tokens, got {num_tokens}",
            where="prompt",
            hint="shorten the prompt, or build with a larger --max-seq",
        )


def _check_tokens(name: str, tokens: Any, vocab_size: int) -> None:
    if not isinstance(tokens, (tuple, frozenset)):
        kind = "frozenset" if name == "stop_tokens" else "tuple"
        raise _refused(name, f"a {kind} of token ids", tokens)
    for token in tokens:
        checked_int(name, token, 0, vocab_size - 1)


def checked_int(name: str, value: object, low: int, high: int | None) -> int:
    """The value, a whole number in its range.

    Raises:
        InputError: it is not.
    """
    expected = f"a whole number from {low}" + ("" if high is None else f" to {high}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refused(name, expected, value)
    if value < low or (high is not None and value > high):
        raise _refused(name, expected, value)
    return value


def _refused(name: str, expected: str, got: object) -> InputError:
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    hint = "help(llama_runtime.engine) tells what each field is"
    return InputError(f"expected {expected}, got {shown}", where=name, hint=hint)
