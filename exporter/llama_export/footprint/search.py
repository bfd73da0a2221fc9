"""The largest batch or context that fits into a device's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from llama_artifacts.errors import BuildError
from llama_artifacts.summary import show_bytes
from llama_export.footprint.call import Asked
from llama_export.footprint.figures import Forecast
from llama_export.footprint.forecast import MIN_LENGTH, Subject, forecast

Maximize = Literal["batch", "context"]
_OPTIONS = {"batch": "--batch", "context": "--seq-len"}
_FIRST = 8
"""Where the search begins: most that fit hold more, and the forms of fewer rows differ."""


@dataclass(frozen=True)
class Fit:
    """What was found.

    Attributes:
        value: the largest batch or context.
        forecast: what it needs.
        limit: why one more is too much.
    """

    value: int
    forecast: Forecast
    limit: str


def largest_fit(subject: Subject, asked: Asked, maximize: Maximize, budget: int) -> Fit:
    """The largest batch, or context, whose figures sum to no more than the budget.

    What is needed grows with either, so the search doubles, then halves.

    Args:
        subject: whose memory.
        asked: the other size; that of `maximize` is ignored.
        maximize: which one.
        budget: bytes.

    Raises:
        BuildError: not even the smallest fits; names what is short. Or a build fixed the size.
    """
    if subject.fixed is not None:
        raise BuildError(
            f"expected a size that can vary, but the build fixed {_OPTIONS[maximize]}",
            where=subject.spec.name,
            hint="give the model instead of the bundle",
        )
    tried = _Tried(subject, asked, maximize, budget)
    longest = max(subject.spec.counts.values(), default=1)
    smallest = 1 if maximize == "batch" else max(MIN_LENGTH, longest + 1)
    first = max(_FIRST, smallest)
    if not (tried.fits(first) or tried.fits(smallest)):
        raise tried.refusal(smallest)
    value = _last(tried.fits, first if tried.fits(first) else smallest)
    found = tried.forecast(value)
    assert isinstance(found, Forecast)
    return Fit(value, found, tried.reason(value + 1))


def _last(fits: Callable[[int], bool], low: int) -> int:
    """The last number that fits, of which `low` is one; beyond it none does."""
    high = 2 * low
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _Tried:
    """Forecasts by number, each made once."""

    def __init__(self, subject: Subject, asked: Asked, maximize: Maximize, budget: int) -> None:
        self._subject = subject
        self._asked = asked
        self._maximize = maximize
        self._budget = budget
        self._found: dict[int, Forecast | BuildError] = {}

    def forecast(self, number: int) -> Forecast | BuildError:
        """What a number needs, or why the program does not take it."""
        if number not in self._found:
            field = "batch" if self._maximize == "batch" else "seq_len"
            asked = replace(self._asked, **{field: number})
            try:
                self._subject.call(asked)
            except BuildError as refusal:
                self._found[number] = refusal
            else:
                self._found[number] = forecast(self._subject, asked)
        return self._found[number]

    def fits(self, number: int) -> bool:
        """Whether the program takes it, and the budget suffices."""
        found = self.forecast(number)
        return isinstance(found, Forecast) and found.num_bytes <= self._budget

    def reason(self, number: int) -> str:
        """Why a number does not fit."""
        found = self.forecast(number)
        if isinstance(found, BuildError):
            return found.message
        return f"{self._maximize} {number:,} needs {show_bytes(found.num_bytes)}"

    def refusal(self, smallest: int) -> BuildError:
        """The error where nothing fits: what is needed, part by part."""
        found = self.forecast(smallest)
        if isinstance(found, BuildError):
            return found
        parts = ", ".join(
            f"{figure.name} {show_bytes(figure.bytes)}" for figure in found.figures if figure.bytes
        )
        return BuildError(
            f"expected at most {show_bytes(self._budget)}, got {show_bytes(found.num_bytes)} for "
            f"{self._maximize} {smallest}: {parts}",
            where=found.entry,
            hint="take a smaller model or dtype, more --shards, or a smaller batch or length",
        )
