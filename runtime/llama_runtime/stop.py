"""Stop texts: ends a text at the first of them, and never shows a part of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_artifacts.errors import InputError


class StopTexts:
    """Passes streamed text on until one of the stop texts is complete.

    The match that *ends* first wins, and of two that end together the longer one, so the result
    depends on the text alone and not on the pieces it came in. Text is held back only while it is
    the beginning of a stop text. After a match every call returns the empty string.

    Attributes:
        matched: the stop text that was found, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        # Longest first: of two that end together the longer one is met first.
        ordered = sorted(dict.fromkeys(_checked(stops)), key=len, reverse=True)
        self._matchers = [_Matcher(stop) for stop in ordered]
        self._held = ""

    def push(self, text: str) -> str:
        """Takes the next piece and returns the text that can no longer be part of a stop text."""
        if self.matched is not None:
            return ""
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(char)
            if stop is not None:
                self.matched, self._held = stop, ""
                return pending[: end - len(stop)]
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        cut = len(pending) - num_held
        self._held = pending[cut:]
        return pending[:cut]

    def finish(self) -> str:
        """Returns the text still held back; to be called when no more text comes."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.num_matched = 0
        return held

    def _advance(self, char: str) -> str | None:
        complete = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
        return complete[0] if complete else None


class _Matcher:
    """How much of one stop text the text ends with (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def advance(self, char: str) -> bool:
        """Takes one character; true when the stop text is complete."""
        while self.num_matched and self.stop[self.num_matched] != char:
            self.num_matched = self._borders[self.num_matched - 1]
        if self.stop[self.num_matched] == char:
            self.num_matched += 1
        return self.num_matched == len(self.stop)


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    border = 0
    for index in range(1, len(text)):
        while border and text[border] != text[index]:
            border = borders[border - 1]
        if text[border] == text[index]:
            border += 1
        borders[index] = border
    return borders


def _checked(stops: Any) -> list[str]:
    if isinstance(stops, str) or not isinstance(stops, Sequence):
        raise InputError(
            f"expected a list of strings, got {type(stops).__name__}",
            where="stop",
            hint='write one stop text as ["..."]',
        )
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            got = "an empty one" if stop == "" else type(stop).__name__
            raise InputError(
                f"expected a string of at least one character, got {got}",
                where=f"stop[{index}]",
                hint="leave it out if nothing should stop the text",
            )
    return list(stops)
