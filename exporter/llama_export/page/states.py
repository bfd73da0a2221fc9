"""The memory of one set of states, for any batch and length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llama_artifacts.dtypes import from_name
from llama_artifacts.manifest import Manifest
from llama_artifacts.signature import StateSpec
from llama_artifacts.summary import interfaces, show_bytes

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


@dataclass(frozen=True)
class StateMemory:
    """States that several entries share.

    Attributes:
        entries: whose states they are.
        layout: `rows` (a row of positions for each sequence) or `pool` (pages for all).
        num_states, dtypes: of the tensors.
        position_bytes: of one position of one row, in all layers.
        page_size: positions of a page; 1 for rows.
        batch, length: rows and positions that the programs were built for; of a pool the largest
            number of pages, and the positions of one.
    """

    entries: tuple[str, ...]
    layout: str
    num_states: int
    dtypes: tuple[str, ...]
    position_bytes: int
    page_size: int
    batch: int
    length: int

    def num_bytes(self, batch: int, length: int) -> int:
        """Bytes for so many rows of so many positions; a pool rounds them up to pages."""
        positions = -(-length // self.page_size) * self.page_size
        return batch * positions * self.position_bytes

    def table(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """A row for each batch: its name and the sizes for `LENGTHS`."""
        return tuple(
            (f"{batch}", tuple(show_bytes(self.num_bytes(batch, n)) for n in _LENGTHS))
            for batch in _BATCHES
        )


LENGTHS = tuple(f"{length:,}" for length in _LENGTHS)
"""The columns of the table."""


def state_memory(manifest: Manifest) -> tuple[StateMemory, ...]:
    """The kinds of states of a bundle, each once, key and value caches of all layers together."""
    groups: dict[tuple[StateSpec, ...], list[str]] = {}
    for interface in interfaces(manifest):
        states = interface.signature.states
        if states and interface.entry not in groups.setdefault(states, []):
            groups[states].append(interface.entry)
    return tuple(_memory(states, entries, manifest) for states, entries in groups.items())


def _memory(states: tuple[StateSpec, ...], entries: list[str], manifest: Manifest) -> StateMemory:
    """States are [Batch, KvHeads, MaxSeq, HeadDim] or [PoolPages, KvHeads, PageSize, HeadDim]."""
    batch, _, length, _ = states[0].shape
    is_pool = isinstance(batch, str)
    rows = 1 if isinstance(batch, str) else batch
    positions = int(length)
    total = sum(_fixed_bytes(state) for state in states)
    return StateMemory(
        entries=tuple(entries),
        layout="pool" if is_pool else "rows",
        num_states=len(states),
        dtypes=tuple(dict.fromkeys(state.dtype for state in states)),
        position_bytes=total // (rows * positions),
        page_size=positions if is_pool else 1,
        batch=manifest.batch if is_pool else rows,
        length=manifest.max_seq,
    )


def _fixed_bytes(state: StateSpec) -> int:
    sizes = [size for size in state.shape if isinstance(size, int)]
    return math.prod(sizes) * from_name(state.dtype).num_bytes
