"""Where the sequences of a run are kept: rows of a cache, or pages scattered over a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from llama_artifacts.signature import Signature, resolve
from llama_export.entries.registry import POOL_PAGES
from llama_export.laws.spans import Span
from llama_runtime.entry import Entry
from llama_runtime.states import States

POISON = 1e4
NUM_SPARE = 2
"""Pages of a pool that no table names."""

NUM_FREE_ROWS = 3
"""Sequences of a call where the build does not fix their number."""

Order = Literal["scattered", "reversed"]


@dataclass(frozen=True)
class Memory:
    """The states of a run and the way from a row and a position to a place in them.

    Attributes:
        states: None where the entry keeps nothing.
        num_rows: sequences that a call takes.
        capacity: positions of a row that can be filled.
        table: the pages of each row of a pool, int32 [rows, pages]; None for rows of a cache.
        page_size: positions of a page; 0 for rows of a cache.
    """

    states: States | None
    num_rows: int
    capacity: int
    table: torch.Tensor | None = None
    page_size: int = 0

    @property
    def scratch(self) -> int:
        """The position of padding and of idle rows in prompts: scratch, or anything in a pool."""
        return self.capacity if self.states is not None and self.table is None else 0

    def places(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices into the first and the third axis of the states, one for each position."""
        positions = torch.arange(span.start, span.stop)
        if self.table is None:
            return torch.full_like(positions, span.row), positions
        return self.table[span.row].long()[positions // self.page_size], positions % self.page_size

    def cells(self, num_tokens: int) -> list[torch.Tensor]:
        """A copy of each state by row and position, [rows, heads, num_tokens, width]."""
        return [self._by_row(tensor)[:, :, :num_tokens].clone() for tensor in self._tensors()]

    def num_touched(self, start: int, stop: int | None = None) -> int:
        """How many elements were written at positions from `start` to `stop` of any row.

        Pages that no table names count, whatever the positions. Scratch does not.
        """
        end = self.capacity if stop is None else stop
        return sum(self._num_touched(tensor, start, end) for tensor in self._tensors())

    def mask(self, spans: Sequence[Span], num_tokens: int) -> torch.Tensor:
        """Which of the first `num_tokens` positions of each row the spans name, bool."""
        named = torch.zeros(self.num_rows, num_tokens, dtype=torch.bool)
        for span in spans:
            named[span.row, span.start : span.stop] = True
        return named

    def _tensors(self) -> list[torch.Tensor]:
        return [] if self.states is None else self.states.tensors()

    def _by_row(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            return tensor
        pages = tensor[self.table.long().to(tensor.device)]  # [rows, pages, heads, page, width]
        return pages.transpose(1, 2).flatten(2, 3)

    def _num_touched(self, tensor: torch.Tensor, start: int, stop: int) -> int:
        poison = torch.tensor(POISON, dtype=tensor.dtype, device=tensor.device)
        touched = int((self._by_row(tensor)[:, :, start:stop] != poison).sum())
        if self.table is not None:
            named = {0, *self.table.flatten().tolist()}
            spare = [page for page in range(tensor.shape[0]) if page not in named]
            touched += int((tensor[spare] != poison).sum())
        return touched


def new_memory(
    entry: Entry, num_tokens: int, *, order: Order = "scattered", num_wider: int = 0
) -> Memory:
    """Poisoned states for an entry, with room for `num_tokens` positions in a pool's rows.

    Args:
        entry: whose states.
        num_tokens: positions that each row of a pool has pages for; rows of a cache have theirs.
        order: how the rows lie over the pool's pages.
        num_wider: further columns of the table, all page 0, which nobody reads.
    """
    states = entry.signature.states
    num_rows = rows_of(entry.signature)
    if not states:
        return Memory(None, num_rows, num_tokens)
    shape = resolve(states[0].shape, {POOL_PAGES: 0})
    if POOL_PAGES not in states[0].shape:
        return Memory(poisoned(entry), num_rows, shape[2] - 1)
    page_size = shape[2]
    num_pages = -(-num_tokens // page_size)
    num_used = num_rows * num_pages
    pages = torch.arange(num_used + NUM_SPARE, dtype=torch.int32) + 1
    if order == "scattered":
        pages = pages[torch.randperm(len(pages), generator=torch.Generator().manual_seed(1))]
    else:
        pages = pages.flip(0)
    table = pages[:num_used].reshape(num_rows, num_pages)
    table = torch.cat((table, table.new_zeros(num_rows, num_wider)), dim=1)
    sizes = {POOL_PAGES: num_used + NUM_SPARE + 1}
    return Memory(poisoned(entry, **sizes), num_rows, num_pages * page_size, table, page_size)


def rows_of(signature: Signature) -> int:
    """Sequences of a call: what states or a variant fix, else what is chosen here."""
    rows = [state.shape[0] for state in signature.states if POOL_PAGES not in state.shape]
    rows += [spec.shape[0] for spec in signature.inputs if len(spec.shape) == 2]
    if not rows:
        return NUM_FREE_ROWS
    return rows[0] if isinstance(rows[0], int) else min(NUM_FREE_ROWS, signature.dim(rows[0]).max)


def capacity_of(signature: Signature) -> int | None:
    """Positions that the pages of a row can hold; None where there are no pages."""
    for spec in signature.inputs:
        if spec.name == "table":
            num_pages, page_size = spec.shape[1], signature.states[0].shape[2]
            most = num_pages if isinstance(num_pages, int) else signature.dim(num_pages).max
            assert isinstance(page_size, int)
            return most * page_size
    return None


def poisoned(entry: Entry, **sizes: int) -> States:
    """New states that hold `POISON` everywhere."""
    states = entry.new_states(**sizes)
    for tensor in states.values():
        tensor.fill_(POISON)
    return states
