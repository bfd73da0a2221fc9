"""Which tokens go into which call: plans that feed the same sequences in different ways.

A sequence of tokens belongs to a row. A span is a piece of it, a call takes spans, a plan is a
series of calls on the same states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EARLY_LEN = 5
"""Tokens of each prompt that come in the first of two chunks."""


@dataclass(frozen=True)
class Span:
    """Positions `start` to `stop - 1` of the sequence of one row."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class Call:
    """Spans of prompts and single tokens that rows step; most entries take one of the two."""

    prompts: tuple[Span, ...] = ()
    steps: tuple[Span, ...] = ()

    def spans(self) -> tuple[Span, ...]:
        """Every piece of a sequence that the call keeps."""
        return (*self.prompts, *self.steps)


Plan = tuple[Call, ...]

STEPPING = ("decode", "decode_rows", "decode_paged")
MIXED = ("step_packed", "step_paged")
WHOLE = ("forward", "next_token", "prefill")
"""Entries whose call takes the same positions of every row."""
TRAINING = ("loss_packed", "log_probs_packed", "hidden_packed")


def usual(entry: str, num_rows: int, num_tokens: int) -> Plan:
    """The plan by which an entry's parity is found: every position, every way of a row to idle."""
    rows, lengths = range(num_rows), falling(num_rows, num_tokens)
    if entry in ("forward", "next_token"):
        return (Call(tuple(Span(row, 0, num_tokens) for row in rows)),)
    if entry == "prefill":
        cut = num_tokens * 2 // 3
        return chunked(entry, [num_tokens] * num_rows, (cut, num_tokens - 1))
    if entry == "decode":
        return stepped([0] * num_rows, [num_tokens] * num_rows)
    if entry in STEPPING:
        return _staggered(num_rows, num_tokens)
    if entry in MIXED:
        return _mixed(falling(num_rows, num_tokens - 2))  # two steps follow
    if entry == "prefill_paged":
        return chunked(entry, lengths, (EARLY_LEN,))
    return together(lengths)


def falling(num_rows: int, num_tokens: int) -> list[int]:
    """A length for each row, the first the longest."""
    return [max(1, num_tokens - 3 * row) for row in range(num_rows)]


def chunked(entry: str, lengths: Sequence[int], cuts: Sequence[int]) -> Plan:
    """Prompts of these lengths in chunks that end at the cuts, or whole without any."""
    calls, start = [], 0
    for stop in (*cuts, max(lengths)):
        spans = [
            Span(row, start, min(stop, length))
            for row, length in enumerate(lengths)
            if min(stop, length) > start
        ]
        if spans:
            calls.append(Call(tuple(spans if entry in WHOLE else spans[::-1])))
        start = max(start, stop)
    return tuple(calls)


def together(lengths: Sequence[int]) -> Plan:
    """All prompts in one call, the last row first."""
    return (Call(_backwards(lengths)),)


def alone(lengths: Sequence[int]) -> Plan:
    """Each prompt in a call of its own."""
    return tuple(Call((span,)) for span in _backwards(lengths))


def stepped(starts: Sequence[int], stops: Sequence[int]) -> Plan:
    """Every row steps from its start to its stop, one token a call."""
    calls = []
    for step in range(max(stop - start for start, stop in zip(starts, stops, strict=True))):
        spans = tuple(
            Span(row, start + step, start + step + 1)
            for row, (start, stop) in enumerate(zip(starts, stops, strict=True))
            if start + step < stop
        )
        calls.append(Call(steps=spans))
    return tuple(calls)


def _backwards(lengths: Sequence[int]) -> tuple[Span, ...]:
    return tuple(Span(row, 0, length) for row, length in enumerate(lengths))[::-1]


def _staggered(num_rows: int, num_tokens: int) -> Plan:
    """Row r starts r steps late; until then, and after its end, it is idle."""
    calls = []
    for step in range(num_tokens + num_rows - 1):
        places = [(row, step - row) for row in range(num_rows)]
        live = [Span(row, at, at + 1) for row, at in places if 0 <= at < num_tokens]
        calls.append(Call(steps=tuple(live)))
    return tuple(calls)


def _mixed(lengths: Sequence[int]) -> Plan:
    """Prompts while rows idle, a prompt while the others step, steps without any prompt."""
    spans = _backwards(lengths)
    joins, others = spans[:1], spans[1:]
    steps = tuple(Span(s.row, s.stop, s.stop + 1) for s in others)
    further = tuple(Span(s.row, s.stop, s.stop + 1) for s in (*joins, *steps))
    if not others:
        return (Call(joins), Call(steps=further))
    return (Call(others), Call(joins, steps), Call(steps=further))
