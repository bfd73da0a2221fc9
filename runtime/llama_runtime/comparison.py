"""What a program gave against what it must give."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

LIMITS = {"f32": 1e-4, "f16": 2e-2, "bf16": 1e-1}
"""Largest difference allowed, as a share of the largest expected value, by compute dtype."""


def compare(
    actual: torch.Tensor,
    expected: torch.Tensor,
    limit: float,
    places: Sequence[tuple[int, ...]] | None = None,
) -> tuple[float, str]:
    """The largest difference as a share of the largest expected value, and where it is.

    Args:
        actual: of any float dtype, on any device.
        expected: of the same shape, on the CPU.
        limit: the largest share allowed; shown in the text as an absolute tolerance.
        places: what the text calls each index of the first axis; None: the index.

    Returns:
        The figure, NaN where any difference is, and a text such as
        `max diff 3.1 at (0, 7, 42), atol 0.0021`.
    """
    if actual.shape != expected.shape:
        return math.nan, f"expected shape {list(expected.shape)}, got {list(actual.shape)}"
    difference = (actual.detach().cpu().float() - expected.float()).abs()
    largest = float(difference.max())  # NaN if any is
    scale = float(expected.abs().max())
    worst = difference.isnan() if math.isnan(largest) else difference == largest
    place = tuple(int(i) for i in torch.nonzero(worst)[0])
    figure = largest / scale if scale else largest
    if places is not None:
        place = (*places[place[0]], *place[1:])
    return figure, f"max diff {largest:.3g} at {place}, atol {limit * scale:.3g}"
