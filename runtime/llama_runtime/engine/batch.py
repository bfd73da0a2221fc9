"""A plan as the inputs of one program. R rows, P prompt tokens, Q pages of a row, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from llama_artifacts.signature import Dim
from llama_runtime.engine.blocks import SCRATCH
from llama_runtime.engine.scheduler import Piece, Plan

IDLE = -1
"""The position of a row that takes no step."""

Array = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a call, padding included: rows R, pages of a row Q, prompt tokens P."""

    num_rows: int
    num_pages: int
    num_tokens: int


@dataclass(frozen=True)
class Ranges:
    """The sizes that a program over pages takes.

    Attributes:
        rows: R.
        pages: Q.
        tokens: P.
        has_buckets: sizes are powers of two, as far as the ranges allow, so that few shapes
            occur; for devices that record a program for each of them.
    """

    rows: Dim
    pages: Dim
    tokens: Dim
    has_buckets: bool

    def fit(self, plan: Plan, page_size: int) -> Sizes:
        """The smallest sizes that hold the plan."""
        num_pages = max(_num_pages(piece, page_size) for piece in plan.pieces)
        num_tokens = sum(piece.end - piece.start for piece in plan.prompts)
        return Sizes(
            self._padded(len(plan.pieces), self.rows),
            self._padded(num_pages, self.pages),
            self._padded(num_tokens, self.tokens),
        )

    def _padded(self, size: int, dim: Dim) -> int:
        if self.has_buckets and size > 1:
            size = 1 << (size - 1).bit_length()
        return min(max(size, dim.min), dim.max)


def inputs(plan: Plan, sizes: Sizes, page_size: int) -> dict[str, torch.Tensor]:
    """The inputs, int32, of the entry for what the plan has: prompts, steps or both.

    Row r of the table belongs to piece r of the plan. Padding is written into the scratch page,
    and rows without a piece have no page but that one.
    """
    arrays = {"table": _table(plan.pieces, sizes, page_size)}
    if plan.prompts:
        arrays |= _prompts(plan.prompts, sizes, page_size)
    if plan.steps:
        tokens, positions = _steps(plan.steps, len(plan.prompts), sizes)
        prefix = "step_" if plan.prompts else ""
        arrays |= {f"{prefix}tokens": tokens, f"{prefix}positions": positions}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def asked(plan: Plan, sizes: Sizes) -> tuple[list[Piece], list[int]]:
    """The pieces after which a token comes, and the rows of the call's logits that say which.

    The logits are [R,V], of the prompts or the steps; or [2*R,V], those of the prompts first.
    """
    # Of a plan with both, the steps' rows come after all rows of the prompts.
    shift = sizes.num_rows if plan.prompts else 0
    rows = [row + (shift if row >= len(plan.prompts) else 0) for row in range(len(plan.pieces))]
    pairs = [(p, row) for p, row in zip(plan.pieces, rows, strict=True) if p.is_last]
    return [piece for piece, _ in pairs], [row for _, row in pairs]


def _table(pieces: Sequence[Piece], sizes: Sizes, page_size: int) -> Array:
    """The pages [R,Q] of each piece's job, as far as they are read."""
    table = np.full((sizes.num_rows, sizes.num_pages), SCRATCH, np.int32)
    for row, piece in enumerate(pieces):
        num_pages = _num_pages(piece, page_size)
        table[row, :num_pages] = piece.job.pages[:num_pages]
    return table


def _prompts(pieces: Sequence[Piece], sizes: Sizes, page_size: int) -> dict[str, Array]:
    """Tokens, positions, rows and slots [P], and last [R]."""
    names = ("tokens", "positions", "rows", "slots")
    result = {name: np.zeros(sizes.num_tokens, np.int32) for name in names}
    last = np.zeros(sizes.num_rows, np.int32)
    at = 0
    for row, piece in enumerate(pieces):
        place = slice(at, at + piece.end - piece.start)
        positions = np.arange(piece.start, piece.end, dtype=np.int32)
        pages = np.array(piece.job.pages, np.int32)
        result["tokens"][place] = piece.job.tokens[piece.start : piece.end]
        result["positions"][place] = positions
        result["rows"][place] = row
        result["slots"][place] = pages[positions // page_size] * page_size + positions % page_size
        at = place.stop
        last[row] = at - 1
    return {**result, "last": last}


def _steps(pieces: Sequence[Piece], first_row: int, sizes: Sizes) -> tuple[Array, Array]:
    """Tokens [R,1] and positions [R] of the steps, whose rows come after those of the prompts."""
    tokens = np.zeros((sizes.num_rows, 1), np.int32)
    positions = np.full(sizes.num_rows, IDLE, np.int32)
    rows = slice(first_row, first_row + len(pieces))
    tokens[rows, 0] = [piece.job.tokens[piece.start] for piece in pieces]
    positions[rows] = [piece.start for piece in pieces]
    return tokens, positions


def _num_pages(piece: Piece, page_size: int) -> int:
    return -(-piece.end // page_size)
