"""Text to token ids and back, all at once or as the tokens come.

`Tokenizer` is a bundle's `tokenizer.json` with its special tokens and chat template;
`DetokenizeStream` is its `decode` for tokens that arrive one by one.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llama_artifacts.errors import InputError, TokenizerError

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
        self._stages = _stages(tokenizer._decoder)
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
        return "".join(_run([token], self._stages))

    def finish(self) -> str:
        """Returns the text still held back; to be called once, after the last id."""
        if self._stages is None:
            return self._tokenizer.decode(self._undecoded)
        pieces: list[str] = []
        for stage in self._stages:
            pieces = [out for piece in pieces for out in stage.push(piece)] + stage.finish()
        return "".join(pieces)


class _Stage(Protocol):
    """One step of a decoder, from pieces of text to pieces of text."""

    def push(self, piece: str) -> list[str]: ...

    def finish(self) -> list[str]: ...


def _run(pieces: list[str], stages: Sequence[_Stage]) -> list[str]:
    for stage in stages:
        pieces = [out for piece in pieces for out in stage.push(piece)]
    return pieces


def _stages(decoder: Mapping[str, Any] | None) -> list[_Stage] | None:
    """The stages of a declared decoder, or None when one of them is unknown."""
    if decoder is None:
        return [_Join()]
    declared = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    stages: list[_Stage] = []
    is_fused = False  # from then on a piece is a part of one text, no longer a token
    for step in declared:
        stage = _stage(step, is_fused)
        if stage is None:
            return None
        stages.append(stage)
        is_fused = is_fused or step["type"] in ("Fuse", "ByteLevel")
    return stages


def _stage(step: Mapping[str, Any], is_fused: bool) -> _Stage | None:
    kind = step["type"]
    if kind == "Fuse":
        return _Same()
    if kind == "Strip" and step["stop"] == 0:
        return _StripText(step) if is_fused else _StripToken(step)
    if is_fused:
        return None
    if kind == "Replace" and "String" in step["pattern"]:
        return _Replace(step)
    if kind == "Metaspace":
        return _Metaspace(step)
    if kind == "ByteLevel":
        return _ByteLevel()
    return _ByteFallback() if kind == "ByteFallback" else None


class _Same:
    """Passes pieces on."""

    def push(self, piece: str) -> list[str]:
        return [piece]

    def finish(self) -> list[str]:
        return []


class _Join(_Same):
    """No decoder: a space between tokens."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, piece: str) -> list[str]:
        separator, self._separator = self._separator, " "
        return [separator + piece]


class _Replace(_Same):
    """Replaces a string within each token."""

    def __init__(self, step: Mapping[str, Any]) -> None:
        self._old: str = step["pattern"]["String"]
        self._new: str = step["content"]

    def push(self, piece: str) -> list[str]:
        return [piece.replace(self._old, self._new)]


class _StripToken(_Same):
    """Removes up to `start` leading characters of each token."""

    def __init__(self, step: Mapping[str, Any]) -> None:
        self._char: str = step["content"]
        self._start: int = step["start"]

    def push(self, piece: str) -> list[str]:
        return [piece[_num_leading(piece, self._char, self._start) :]]


class _StripText(_Same):
    """Removes up to `start` leading characters of the whole text."""

    def __init__(self, step: Mapping[str, Any]) -> None:
        self._char: str = step["content"]
        self._left: int = step["start"]

    def push(self, piece: str) -> list[str]:
        cut = _num_leading(piece, self._char, self._left)
        self._left = self._left - cut if cut == len(piece) else 0
        return [piece[cut:]]


def _num_leading(text: str, char: str, limit: int) -> int:
    head = text[:limit]
    return len(head) - len(head.lstrip(char))


class _Metaspace(_Same):
    """Turns the mark of a space into one; the first token loses it, where encoding put it."""

    def __init__(self, step: Mapping[str, Any]) -> None:
        self._mark: str = step["replacement"]
        self._space = " " if step["prepend_scheme"] == "never" else ""

    def push(self, piece: str) -> list[str]:
        space, self._space = self._space, " "
        return [piece.replace(self._mark, space)]


class _ByteLevel:
    """Joins the bytes that the characters of the tokens stand for and reads them as UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, piece: str) -> list[str]:
        try:
            data = bytes(_BYTE_OF_CHAR[char] for char in piece)
        except KeyError:  # an added token, which is plain text
            data = piece.encode("utf-8")
        return [self._utf8.decode(data)]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


class _ByteFallback:
    """Reads each run of tokens such as <0xE2> as UTF-8, or as one U+FFFD for every byte of it."""

    _BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

    def __init__(self) -> None:
        self._start_run()

    def push(self, piece: str) -> list[str]:
        match = self._BYTE_TOKEN.fullmatch(piece)
        if match is None:
            return [*self.finish(), piece]
        if self._is_bad_run:
            return ["\ufffd"]
        return self._extend_run(bytes.fromhex(match[1]))

    def finish(self) -> list[str]:
        text, num_bytes, is_cut = self._text, self._num_bytes, self._utf8.getstate()[0] != b""
        self._start_run()
        return ["\ufffd"] * num_bytes if is_cut else [text] if text else []

    def _start_run(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._num_bytes = 0
        self._is_bad_run = False

    def _extend_run(self, byte: bytes) -> list[str]:
        self._num_bytes += 1
        try:
            self._text += self._utf8.decode(byte)
        except UnicodeDecodeError:
            num_bytes = self._num_bytes
            self._start_run()
            self._is_bad_run = True
            return ["\ufffd"] * num_bytes
        return []


def _byte_of_char() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable ones as themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()


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
