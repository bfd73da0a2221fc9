"""What the check of a law found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llama_runtime.comparison import compare


@dataclass(frozen=True)
class Finding:
    """A figure, the most it may be, and where it was found.

    A figure that is NaN is more than any limit.
    """

    figure: float
    limit: float
    detail: str

    @property
    def passed(self) -> bool:
        """Whether the law holds."""
        return self.figure <= self.limit


def close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    limit: float,
    places: Sequence[tuple[int, ...]],
) -> Finding:
    """Whether answers [answers, ...] are those expected; told by row and position."""
    figure, detail = compare(actual, expected, limit, places)
    return Finding(figure, limit, detail)


def exact(num_different: int, what: str, first: str) -> Finding:
    """Whether nothing differs at all."""
    detail = f"{num_different} {what}, the first: {first}" if num_different else f"0 {what}"
    return Finding(num_different, 0, detail)


def worst(findings: Sequence[Finding]) -> Finding:
    """The finding that is furthest beyond its limit, or nearest to it; what is exact comes first."""
    return max(
        findings, key=lambda f: (not f.passed, f.limit == 0 < f.figure, f.figure / (f.limit or 1))
    )
