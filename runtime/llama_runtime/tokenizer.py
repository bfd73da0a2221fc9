"""Text to token ids and back, all at once or as the tokens come.

`Tokenizer` is a bundle's `tokenizer.json` with its special tokens and chat template;
`DetokenizeStream` is its `decode` for tokens that arrive one by one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_artifacts.errors import InputError, TokenizerError
from llama_runtime.detokenize import decoder_stages, run_stages

if TYPE_CHECKING:
    import tokenizers

_LOG = logging.getLogger(__name__)

_NO_TOKENIZER_HINT = "give token ids instead of text (--tokens)"
_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MAX_ID = (1 << 32) - 1


class Tokenizer:
    """Encodes and decodes text; immutable, and safe to share between threads.

    Attributes:
        special_tokens: the tokens that `tokenizer_config.json` names, such as `bos_token`.
        chat_template: the Jinja text, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        where: object = None,
    ) -> None:
        # A file may ask for a fixed length; a prompt must come out whole.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._where = where
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads `tokenizer.json` and, where they are, `tokenizer_config.json` and the template.

        Raises:
            TokenizerError: a file is missing or malformed.
        """
        config_path = folder / "tokenizer_config.json"
        config = _read_config(config_path)
        return cls(
            _load_backend(folder / "tokenizer.json"),
            special_tokens=_special_tokens(config, config_path),
            chat_template=_find_template(folder, config, config_path),
            where=folder,
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id: the rows that a model's embedding needs."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of the text, with the special tokens that the tokenizer itself adds.

        Raises:
            InputError: `text` is not a string of valid Unicode.
        """
        if not isinstance(text, str):
            raise InputError(f"expected a string, got {type(text).__name__}", where="text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"expected valid Unicode, got a lone surrogate at character {error.start}",
                where="text",
                hint="decode the bytes of the text as UTF-8",
            ) from error
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids without special tokens; spaces are left as they are.

        Ids that the vocabulary lacks have no text.
        """
        return self._backend.decode([_checked_id(id) for id in ids], skip_special_tokens=True)

    def stream(self) -> DetokenizeStream:
        """Returns a new incremental `decode`."""
        return DetokenizeStream(self)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Renders the messages with the chat template.

        Raises:
            InputError: the messages are not a list of objects of plain data.
            TokenizerError: there is no template, or it fails or refuses the messages.
        """
        if self.chat_template is None:
            raise TokenizerError(
                "expected a chat template, found none",
                where=self._where,
                hint="give a prompt without one (--no-chat)",
            )
        from llama_runtime.chat_template import render_chat_template

        return render_chat_template(
            self.chat_template,
            messages,
            special_tokens=self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            where=self._where,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the ids of the rendered messages, which end where the answer begins.

        The template writes the special tokens, so the tokenizer adds none.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def _text_of(self, id: int) -> str | None:
        """The raw token, before the decoder, or None where `decode` skips it."""
        token = self._backend.id_to_token(_checked_id(id))
        return None if token in self._special_texts else token

    @cached_property
    def _special_texts(self) -> frozenset[str]:
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def _decoder(self) -> dict[str, Any] | None:
        """The declaration of the decoder, as `tokenizer.json` has it."""
        decoder = self._backend.decoder
        if decoder is None:
            return None
        declared: dict[str, Any] = json.loads(decoder.__getstate__())
        return declared


class DetokenizeStream:
    """`Tokenizer.decode` for tokens that come one by one.

    The pieces of `push` and the one of `finish`, joined, equal `decode` of all the ids. A piece is
    final: text is held back only while a later token can change it, such as half a character, or a
    run of byte-fallback tokens, which one bad byte turns into U+FFFD as a whole. Each token costs
    the same, however long the text is.

    A decoder that this class does not know is decoded at `finish`, in one piece.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stages = decoder_stages(tokenizer._decoder)
        self._undecoded: list[int] = []
        if self._stages is None:
            _LOG.warning("this tokenizer's decoder cannot stream; text will come at the end")

    def push(self, id: int) -> str:
        """Takes the next id and returns the text that has become final, often none."""
        token = self._tokenizer._text_of(id)
        if token is None:
            return ""
        if self._stages is None:
            self._undecoded.append(id)
            return ""
        return "".join(run_stages([token], self._stages))

    def finish(self) -> str:
        """Returns the text still held back; to be called once, after the last id."""
        if self._stages is None:
            return self._tokenizer.decode(self._undecoded)
        pieces: list[str] = []
        for stage in self._stages:
            pieces = [out for piece in pieces for out in stage.push(piece)] + stage.finish()
        return "".join(pieces)


def _checked_id(id: Any) -> int:
    if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id <= _MAX_ID:
        raise InputError(f"expected a token id from 0 to {_MAX_ID}, got {id!r}", where="ids")
    return id


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    if not path.is_file():
        has_model = (path.parent / "tokenizer.model").is_file()
        found = "only `tokenizer.model`" if has_model else "none"
        convert = "convert it to tokenizer.json with `transformers`, or " if has_model else ""
        raise TokenizerError(
            f"expected a `{path.name}`, found {found}",
            where=path.parent,
            hint=convert + _NO_TOKENIZER_HINT,
        )
    text = _read_text(path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library has no exception type of its own
        raise TokenizerError(
            f"expected a tokenizer, got: {str(error)[:200]}",
            where=path,
            hint=f"fetch the file again, or {_NO_TOKENIZER_HINT}",
        ) from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"expected UTF-8 text, got a bad byte at {error.start}",
            where=path,
            hint="fetch the file again",
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(
            f"expected JSON, got: {error}", where=path, hint="fetch the file again"
        ) from error
    if not isinstance(config, dict):
        raise _config_error(path, "", "an object", config)
    return config


def _special_tokens(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if content is None and token is None:
            continue
        if not isinstance(content, str):
            raise _config_error(path, name, "text or an object with `content`", token)
        tokens[name] = content
    return tokens


def _find_template(folder: Path, config: Mapping[str, Any], config_path: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):  # several of them, by name
        named = {item.get("name"): item for item in template if isinstance(item, dict)}
        template = named.get("default", {}).get("template", template)
    if template is not None and not isinstance(template, str):
        raise _config_error(config_path, "chat_template", "text, or one named `default`", template)
    return template


def _config_error(path: Path, key: str, expected: str, got: object) -> TokenizerError:
    return TokenizerError(
        f"expected {expected}, got {type(got).__name__}",
        where=f"{path}#{key}" if key else path,
        hint="compare the file with the model's own repository",
    )
