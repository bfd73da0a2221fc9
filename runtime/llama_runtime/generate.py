"""From a prompt to a stream of tokens, and from tokens to a stream of text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch

from llama_artifacts.errors import InputError
from llama_runtime.sampling import Sampler, SamplingParams
from llama_runtime.session import Session
from llama_runtime.stop import StopTexts
from llama_runtime.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]
Message = Mapping[str, str]


class TokenStream:
    """Iterates over new tokens, one step of the model each.

    Attributes:
        prompt_tokens: the ids that were fed first.
        tokens: the new ids so far; a stop token ends the stream and is not among them.
        finish_reason: `stop` (a stop token) or `length` (`max_new` tokens, or no position left:
            the last token needs none, so a prompt of n leaves room for capacity - n + 1); None
            before the end.
    """

    def __init__(
        self,
        session: Session,
        prompt: Sequence[int],
        *,
        max_new: int,
        params: SamplingParams,
        stop_tokens: Sequence[int],
    ) -> None:
        if isinstance(max_new, bool) or not isinstance(max_new, int) or max_new < 1:
            raise InputError(f"expected at least 1 new token, got {max_new!r}", where="max_new")
        self.prompt_tokens: list[int] = session.checked(prompt)[0].tolist()
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._session = session
        self._rest = self.prompt_tokens
        sampler = Sampler(params, self.prompt_tokens)
        self._steps = self._generate(session, max_new, sampler, frozenset(stop_tokens))

    def __iter__(self) -> Iterator[int]:
        return self._steps

    def __next__(self) -> int:
        return next(self._steps)

    def resume(self, path: str | os.PathLike[str]) -> int:
        """Takes the beginning of the prompt from a file that `Session.save` wrote.

        To be called before the first token. As many tokens are taken as the prompt and the saved
        conversation have in common; at least the prompt's last one is fed.

        Returns:
            How many were taken.

        Raises:
            IntegrityError, CompatibilityError: as `Session.restore`.
        """
        self._session.restore(path)
        saved, last = self._session.tokens, len(self.prompt_tokens) - 1
        prompt = torch.tensor(self.prompt_tokens)
        length = min(saved.shape[1], last)
        is_same = (saved[:, :length] == prompt[:length]).all(0)
        num_taken = int(is_same.cumprod(0).sum())
        self._session.rewind(num_taken)
        self._rest = self.prompt_tokens[num_taken:]
        return num_taken

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the conversation so far, prompt and new tokens, as `Session.save`.

        The last new token, which no step has read yet, is not in it.
        """
        self._session.save(path)

    def _generate(
        self, session: Session, max_new: int, sampler: Sampler, stops: frozenset[int]
    ) -> Iterator[int]:
        logits = session.prefill(self._rest)
        while True:
            token = sampler.sample(logits[:1])[0]
            if token in stops:
                self.finish_reason = "stop"
                return
            self.tokens.append(token)
            yield token
            if len(self.tokens) == max_new or session.position == session.capacity:
                self.finish_reason = "length"
                return
            logits = session.decode(token)


class Generation:
    """Iterates over pieces of new text; their concatenation is the whole text.

    Attributes:
        prompt_tokens, tokens: as of `TokenStream`.
        finish_reason: as of `TokenStream`; `stop` also for a stop text, which is not in the
            text.
    """

    def __init__(self, stream: TokenStream, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._stream = stream
        self._stops = StopTexts(stop)
        self._text = tokenizer.stream()
        self._pieces = self._generate()
        self._is_stopped = False

    @property
    def prompt_tokens(self) -> list[int]:
        return self._stream.prompt_tokens

    @property
    def tokens(self) -> list[int]:
        return self._stream.tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return "stop" if self._is_stopped else self._stream.finish_reason

    def resume(self, path: str | os.PathLike[str]) -> int:
        """As of `TokenStream`."""
        return self._stream.resume(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """As of `TokenStream`."""
        self._stream.save(path)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def _generate(self) -> Iterator[str]:
        for token in self._stream:
            piece = self._stops.push(self._text.push(token))
            if piece:
                yield piece
            if self._stops.matched is not None:
                self._is_stopped = True
                return
        rest = self._stops.push(self._text.finish())
        self._is_stopped = self._stops.matched is not None
        rest += self._stops.finish()
        if rest:
            yield rest


def prompt_ids(
    prompt: str | Sequence[int] | Sequence[Message],
    tokenizer: Callable[[], Tokenizer],
    *,
    chat: bool | None,
    system: str | None,
) -> list[int]:
    """The token ids of a prompt; see `LoadedBundle.generate`, whose arguments they are.

    Raises:
        TokenizerError: no tokenizer, where one is needed, or the template refuses the messages.
        InputError: arguments that contradict each other.
    """
    if isinstance(prompt, str):
        is_chat = tokenizer().has_chat_template if chat is None else chat
        if not is_chat:
            if system is not None:
                raise InputError("a system message needs a chat", where="system")
            return tokenizer().encode(prompt)
        prompt = [{"role": "user", "content": prompt}]
    elif len(prompt) == 0 or not isinstance(prompt[0], Mapping):
        if chat or system is not None:
            raise InputError("token ids are no chat", where="chat" if chat else "system")
        return list(prompt)  # type: ignore[arg-type]
    elif chat is False:
        raise InputError("messages are a chat", where="chat")
    messages = [dict(message) for message in prompt]  # type: ignore[arg-type]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer().encode_chat(messages)
