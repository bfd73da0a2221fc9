"""The decoders that a `tokenizer.json` declares, as stages that work on a stream of tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Stage(Protocol):
    """One step of a decoder, from pieces of text to pieces of text."""

    def push(self, piece: str) -> list[str]: ...

    def finish(self) -> list[str]: ...


def run_stages(pieces: list[str], stages: Sequence[Stage]) -> list[str]:
    for stage in stages:
        pieces = [out for piece in pieces for out in stage.push(piece)]
    return pieces


def decoder_stages(decoder: Mapping[str, Any] | None) -> list[Stage] | None:
    """The stages of a declared decoder, or None when one of them is unknown."""
    if decoder is None:
        return [_Join()]
    declared = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    stages: list[Stage] = []
    is_fused = False  # from then on a piece is a part of one text, no longer a token
    for step in declared:
        stage = _stage(step, is_fused)
        if stage is None:
            return None
        stages.append(stage)
        is_fused = is_fused or step["type"] in ("Fuse", "ByteLevel")
    return stages


def _stage(step: Mapping[str, Any], is_fused: bool) -> Stage | None:
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
