"""The bodies that the API accepts. What is not here is refused, never ignored.

Types are strict: `"5"` is no number and `true` no count. Null stands for the default, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from llama_runtime.server.errors import ApiError

MAX_CHOICES, MAX_PROMPTS, MAX_STOPS, MAX_STOP_LEN = 128, 1024, 16, 1000
MAX_LOGPROBS = 20
_MAX_ID = (1 << 31) - 1
_SHOWN_LEN = 60

Body = TypeVar("Body", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def _stops(value: Any) -> Any:
    """One stop text or several, as a tuple."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"expected a string or a list of strings, got {_kind(value)}")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"expected at most {MAX_STOPS} stop texts, got {len(stops)}")
    if not all(0 < len(stop) <= MAX_STOP_LEN for stop in stops):
        raise ValueError(f"expected stop texts of 1 to {MAX_STOP_LEN} characters")
    return tuple(stops)


def _biases(value: Any) -> Any:
    """Biases by token id; JSON has only text as keys."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object of token ids and biases, got {_kind(value)}")  # noqa: TRY004
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError(f"expected token ids as keys, got `{_short(key)}`")
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not is_number or not -100 <= bias <= 100:
            raise ValueError(f"expected a bias from -100 to 100 for token {key}, got {_kind(bias)}")
    return tuple((int(key), float(bias)) for key, bias in value.items())


def _prompts(value: Any) -> Any:
    """A prompt or several, each of text or of token ids, as a tuple."""
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    expected = "expected text, token ids, or a list of either"
    if not isinstance(value, list) or not value:
        raise ValueError(f"{expected}, got {_kind(value)}")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"expected at most {MAX_PROMPTS} prompts, got {len(value)}")
    if not all(isinstance(item, str) for item in value) and not all(map(_is_ids, value)):
        raise ValueError(f"{expected}, got a list of something else")
    return tuple(item if isinstance(item, str) else tuple(item) for item in value)


def _is_ids(value: Any) -> bool:
    """Whether it is a list of at least one token id."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _content(value: Any) -> Any:
    """A message's text, also where it comes in parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected text or a list of text parts, got {_kind(value)}")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise ValueError(f"expected parts of type `text`, got `{_short(kind)}`")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError("expected a part to have `type` and `text` alone")
    return "".join(part["text"] for part in value)


def _nullable(check: Callable[[Any], Any]) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value is None else check(value))


class StreamOptions(_Strict):
    include_usage: bool | None = None


class Sampling(_Strict):
    """What both kinds of completion take; defaults are OpenAI's, so temperature 1."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[tuple[str, ...] | None, _nullable(_stops)] = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...] | None, _nullable(_biases)] = None
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_ID)] | None = None
    user: str | None = None
    # Beyond OpenAI's API, under the names that other servers use.
    top_k: Annotated[int, Field(ge=0, le=_MAX_ID)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` needs `stream: true`")
        return self

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk of the counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(Sampling):
    """The body of `/v1/completions`."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], BeforeValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class Message(_Strict):
    """A message; the fields that must be null are those of answers, which clients send back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def to_dict(self) -> dict[str, str]:
        """For the chat template, which knows the developer by the older name."""
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }


class TextFormat(_Strict):
    type: Literal["text"]


class ChatRequest(Sampling):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MAX_ID)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: TextFormat | None = None
    tools: None = None
    tool_choice: Literal["none"] | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs: true`")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ValueError("`max_tokens` and `max_completion_tokens` differ; give one of them")
        return self


def parse(kind: type[Body], body: bytes) -> Body:
    """The body as a request.

    Raises:
        ApiError: 400; it is no JSON, or a field is unknown, missing, of the wrong type or out of
            range. The first such field is named.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as cause:
        first = cause.errors(include_url=False, include_context=False)[0]
        param = _path(first["loc"])
        raise ApiError(400, _message(first, param), param=param or None) from None


def _message(error: Any, param: str) -> str:
    kind, message = error["type"], error["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return f"`{param}` is not supported"
    if kind == "none_required":
        return f"`{param}` is not supported: expected null, got {_kind(error['input'])}"
    if kind == "missing":
        return f"expected `{param}`, got none"
    if kind == "json_invalid":
        return f"expected JSON, got: {message}"
    return f"{param}: {message}" if param else message


def _path(loc: tuple[int | str, ...]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{_short(part)}" for part in loc)
    return path.removeprefix(".")


def _kind(value: Any) -> str:
    """A value of a body in a message: numbers as they are, else what it is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return _short(value)
    if isinstance(value, str):
        return "text"
    return "an object" if isinstance(value, dict) else "a list" if value else "an empty list"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_LEN else f"{text[:_SHOWN_LEN]}..."
