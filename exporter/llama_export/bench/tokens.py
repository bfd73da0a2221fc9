"""Whether two methods say the same, up to what rounding can decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MARGINS = {"f32": 0.005, "f16": 0.05, "bf16": 0.25}
"""Largest distance of two logits, by the bundle's dtype, that another order of summation may turn
round: bf16 keeps 8 bits, so logits around 16 are told apart by 1/16, and layers add up."""


@dataclass(frozen=True)
class Agreement:
    """How far the tokens of a method are those of the first one.

    Attributes:
        num_equal: tokens up to the first that differs.
        num_tokens: tokens compared.
        margin: at the first difference, how much lower the first method puts the other's token
            than its own; None where all are equal.
        limit: the largest margin that counts as a tie.
    """

    num_equal: int
    num_tokens: int
    margin: float | None
    limit: float

    @property
    def is_good(self) -> bool:
        """Whether nothing but a tie separates them."""
        return self.margin is None or self.margin <= self.limit

    def __str__(self) -> str:
        if self.margin is None:
            return f"{self.num_equal} of {self.num_tokens}"
        word = "then a tie" if self.is_good else "then another"
        return f"{self.num_equal} of {self.num_tokens}, {word} ({self.margin:.3g})"


def agreement(
    expected: Sequence[int],
    actual: Sequence[int],
    limit: float,
    margin: Callable[[int, int], float],
) -> Agreement:
    """Compares two continuations of one prompt.

    After the first difference the texts go on from different tokens, so only that one is weighed.

    Args:
        expected: of the first method.
        actual: of the other.
        limit: the largest margin that counts as a tie.
        margin: of (how many tokens are equal, the other's next token): how much lower its logit
            is than the largest, in the first method. Called where they differ only.
    """
    num_tokens = len(expected)
    for index, token in enumerate(expected):
        if index >= len(actual):
            return Agreement(index, num_tokens, float("inf"), limit)
        if actual[index] != token:
            return Agreement(index, num_tokens, margin(index, actual[index]), limit)
    return Agreement(num_tokens, num_tokens, None, limit)
