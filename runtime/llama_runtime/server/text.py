"""The tokens of one choice become pieces of text, up to a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from llama_runtime.engine import Output
from llama_runtime.stop import StopTexts
from llama_runtime.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Token:
    """A token of the answer.

    Attributes:
        id: the token.
        offset: characters of the text before the token's first one.
        logprob: its log-probability, where asked for.
        top_logprobs: the likeliest tokens at its place, best first.
    """

    id: int
    offset: int
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """A part of a choice that can no longer change; the last one has the finish reason."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None


@dataclass
class Choice:
    """One answer in the making.

    Text is held back while it may be the beginning of a stop text or is half a character, and
    with it its tokens. A token of which a stop text left no character is dropped.

    Attributes:
        index: the choice's number in the answer.
        num_tokens: how many tokens were generated for it: those of its text, those that a stop
            string cut off, and the stop token.
        finish_reason: None before the end.
    """

    index: int
    tokenizer: Tokenizer | None
    stops: Sequence[str]
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    _pending: list[Token] = field(default_factory=list)
    _num_read: int = 0
    _num_sent: int = 0

    def __post_init__(self) -> None:
        self._matcher = StopTexts(self.stops)
        self._stream = None if self.tokenizer is None else self.tokenizer.stream()

    def push(self, output: Output) -> Piece | None:
        """Takes an output of the engine and returns what it completes.

        Raises:
            LlamaExportError: the engine could not go on.
        """
        if output.error is not None:
            raise output.error
        text = ""
        if output.finish_reason == "stop":
            self.num_tokens += 1
        elif output.token is not None:
            text = self._read(output, output.token)
        if self._matcher.matched is None and output.finish_reason is not None:
            text += self._finish()
        if self._matcher.matched is not None:
            self.finish_reason = "stop"
        elif output.finish_reason in ("stop", "length"):
            self.finish_reason = output.finish_reason
        return self._piece(text)

    def _read(self, output: Output, token: int) -> str:
        self.num_tokens += 1
        self._pending.append(Token(token, self._num_read, output.logprob, output.top_logprobs))
        if self._stream is None:
            return ""
        text = self._stream.push(token)
        self._num_read += len(text)
        return self._matcher.push(text)

    def _finish(self) -> str:
        if self._stream is None:
            return ""
        text = self._matcher.push(self._stream.finish())
        return text + self._matcher.finish()

    def _piece(self, text: str) -> Piece | None:
        self._num_sent += len(text)
        is_last = self.finish_reason is not None
        if not text and not is_last and self._stream is not None:
            return None
        tokens = tuple(self._pending)
        if self._matcher.matched is not None:
            tokens = tuple(token for token in tokens if token.offset < self._num_sent)
        self._pending.clear()
        return Piece(self.index, text, tokens, self.finish_reason)
