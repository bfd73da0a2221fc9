"""The answers of both kinds of completion, whole and as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from llama_runtime.server.jobs import Job, Served
from llama_runtime.server.schema import Sampling
from llama_runtime.server.text import Piece, Token
from llama_runtime.tokenizer import Tokenizer


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of a choice as one."""
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    text = "".join(piece.text for piece in pieces)
    return Piece(pieces[0].index, text, tokens, pieces[-1].finish_reason)


def usage(job: Job) -> dict[str, int]:
    """How many tokens went in and came out so far."""
    num_new = sum(choice.num_tokens for choice in job.choices)
    return {
        "prompt_tokens": job.num_prompt_tokens,
        "completion_tokens": num_new,
        "total_tokens": job.num_prompt_tokens + num_new,
    }


class Kind(Protocol):
    """What the two kinds of completion differ in."""

    @property
    def prefix(self) -> str: ...
    @property
    def object(self) -> str: ...
    @property
    def chunk_object(self) -> str: ...

    def first(self, index: int) -> dict[str, Any] | None:
        """The choice's opening chunk, where it has one."""

    def part(self, piece: Piece) -> dict[str, Any]:
        """A piece as a chunk's choice."""

    def whole(self, piece: Piece) -> dict[str, Any]:
        """A whole choice."""


@dataclass(frozen=True)
class Reply:
    """The frame of one answer: its id and time, and how its choices are written."""

    served: Served
    body: Sampling
    job: Job
    kind: Kind
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The whole answer; one piece a choice."""
        choices = [self._with_ids(self.kind.whole(piece), piece) for piece in pieces]
        return {**self._frame(self.kind.object), "choices": choices, "usage": usage(self.job)}

    def first(self, index: int) -> dict[str, Any] | None:
        """A stream's opening chunk of a choice, where its kind has one."""
        choice = self.kind.first(index)
        return None if choice is None else self._chunk([choice])

    def part(self, piece: Piece) -> dict[str, Any]:
        """A chunk of a stream."""
        return self._chunk([self._with_ids(self.kind.part(piece), piece)])

    def counts(self) -> dict[str, Any]:
        """The chunk after the last one, with the counts."""
        return {**self._chunk([]), "usage": usage(self.job)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._frame(self.kind.chunk_object), "choices": choices}
        return {**chunk, "usage": None} if self.body.has_usage_chunk else chunk

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.kind.prefix}-{self.key}",
            "object": kind,
            "created": self.created,
            "model": self.served.name,
        }

    def _with_ids(self, choice: dict[str, Any], piece: Piece) -> dict[str, Any]:
        """Without a tokenizer the ids are all there is to the answer."""
        if self.body.return_token_ids or self.served.tokenizer is None:
            choice["token_ids"] = [token.id for token in piece.tokens]
        return choice


@dataclass(frozen=True)
class CompletionKind:
    """The answers of `/v1/completions`."""

    tokenizer: Tokenizer | None
    has_logprobs: bool
    prefix: str = "cmpl"
    object: str = "text_completion"
    chunk_object: str = "text_completion"

    def first(self, index: int) -> None:
        """Text needs no opening."""

    def part(self, piece: Piece) -> dict[str, Any]:
        return self.whole(piece)

    def whole(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.tokens) if self.has_logprobs else None,
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "tokens": [token_text(self.tokenizer, token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {token_text(self.tokenizer, id): logprob for id, logprob in token.top_logprobs}
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }


@dataclass(frozen=True)
class ChatKind:
    """The answers of `/v1/chat/completions`."""

    tokenizer: Tokenizer | None
    has_logprobs: bool
    prefix: str = "chatcmpl"
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return self._choice(piece, "delta", delta)

    def whole(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._choice(piece, "message", message)

    def _choice(self, piece: Piece, name: str, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = [self._logprob(token) for token in piece.tokens]
        return {
            "index": piece.index,
            name: content,
            "logprobs": {"content": logprobs, "refusal": None} if self.has_logprobs else None,
            "finish_reason": piece.finish_reason,
        }

    def _logprob(self, token: Token) -> dict[str, Any]:
        tops = [self._entry(id, logprob) for id, logprob in token.top_logprobs]
        return {**self._entry(token.id, token.logprob), "top_logprobs": tops}

    def _entry(self, id: int, logprob: float | None) -> dict[str, Any]:
        text = token_text(self.tokenizer, id)
        # A token that is no whole character has bytes that its text does not tell.
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": known}


def token_text(tokenizer: Tokenizer | None, id: int) -> str:
    """A token as text; one without any, such as a special token, by its id."""
    text = "" if tokenizer is None else tokenizer.decode([id])
    return text or f"token_id:{id}"
