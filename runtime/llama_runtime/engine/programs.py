"""The paged programs of a bundle over one pool, and the sizes that they allow."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from llama_artifacts.errors import SessionError
from llama_artifacts.signature import Dim, Signature
from llama_runtime.engine import batch
from llama_runtime.engine.batch import Ranges
from llama_runtime.engine.blocks import SCRATCH
from llama_runtime.engine.request import checked_int
from llama_runtime.engine.scheduler import Plan

if TYPE_CHECKING:
    from llama_runtime.loader import LoadedBundle

POOL = "PoolPages"
"""The dimension of a pool's pages."""

PREFILL, DECODE, MIXED = "prefill_paged", "decode_paged", "step_paged"

_PAGE_AXIS, _PLACE_AXIS = 0, 2  # of a pool: pages, heads, places in the page, width
_MAX_DEFAULT_BYTES = 2 << 30


class Programs:
    """Runs plans. The pool has `num_pages` pages for texts and the scratch page.

    Attributes:
        seconds: time that calls of programs have taken, without making their inputs.

    Raises:
        SessionError: the bundle lacks an entry, or its entries keep different states.
        InputError: rows or pages are out of the programs' ranges.
    """

    def __init__(self, bundle: LoadedBundle, rows: int | None, pages: int | None) -> None:
        names = [name for name in (PREFILL, DECODE, MIXED) if name in bundle.manifest.entries()]
        _check_names(names, bundle)
        self._entries = {name: bundle.entry(name) for name in names}
        self._ranges = {
            name: _ranges(entry.signature, has_buckets=entry.device.type == "cuda")
            for name, entry in self._entries.items()
        }
        signatures = [entry.signature for entry in self._entries.values()]
        if any(signature.states != signatures[0].states for signature in signatures):
            raise SessionError(
                "the paged entries keep different states",
                where=bundle.folder,
                hint="load the bundle in one format",
            )
        self.seconds = 0.0
        self.vocab_size = bundle.manifest.model.vocab_size
        self.page_size = int(signatures[0].states[0].shape[_PLACE_AXIS])
        self.max_rows = self._max_rows(rows)
        self.num_pages = self._num_pages(signatures[0], pages)
        self._states = self._entries[DECODE].new_states(**{POOL: self.num_pages + 1})

    @property
    def can_mix(self) -> bool:
        """Whether one call takes prompts and steps."""
        return MIXED in self._entries

    @property
    def max_piece(self) -> int:
        """Most prompt tokens of a call."""
        return min(r.tokens.max for name, r in self._ranges.items() if name != DECODE)

    @property
    def max_positions(self) -> int:
        """Positions of one text, as far as programs and pool have them."""
        return min(self._max_text, self.num_pages * self.page_size)

    def run(self, plan: Plan) -> torch.Tensor:
        """Logits [N,V] of the pieces that `batch.asked` names, in the programs' dtype.

        Whatever is raised, only page 0 and places of the plan's own pieces may be written.
        """
        name = MIXED if plan.prompts and plan.steps else PREFILL if plan.prompts else DECODE
        sizes = self._ranges[name].fit(plan, self.page_size)
        inputs = batch.inputs(plan, sizes, self.page_size)
        started = time.perf_counter()
        logits = self._entries[name].run(self._states, inputs)[0]
        self.seconds += time.perf_counter() - started
        _, rows = batch.asked(plan, sizes)
        return logits if rows == list(range(len(logits))) else logits[rows]

    def clean(self, pages: Iterable[int]) -> None:
        """Zeroes pages and the scratch page: a NaN would reach whoever reads beside it."""
        self._states.clear_(_PAGE_AXIS, [SCRATCH, *pages])

    @property
    def _max_text(self) -> int:
        return min(
            min(r.pages.max * self.page_size for r in self._ranges.values()),
            min(_last_position(entry.signature) + 1 for entry in self._entries.values()),
        )

    def _max_rows(self, rows: int | None) -> int:
        most = min(ranges.rows.max for ranges in self._ranges.values())
        return most if rows is None else checked_int("rows", rows, 1, most)

    def _num_pages(self, signature: Signature, pages: int | None) -> int:
        dim = signature.dim(POOL)
        if pages is not None:
            return checked_int("pages", pages, max(dim.min - 1, 1), dim.max - 1)
        whole = -(-self._max_text // self.page_size)
        affordable = max(_MAX_DEFAULT_BYTES // signature.state_bytes, whole)
        return min(self.max_rows * whole, affordable, dim.max - 1)


def _check_names(names: list[str], bundle: LoadedBundle) -> None:
    missing = [name for name in (PREFILL, DECODE) if name not in names]
    if missing:
        raise SessionError(
            f"the engine needs the entries `{PREFILL}` and `{DECODE}`, "
            f"this bundle lacks `{missing[0]}`",
            where=bundle.folder,
            hint="build it with --entry serving",
        )


def _ranges(signature: Signature, *, has_buckets: bool) -> Ranges:
    shapes = {spec.name: spec.shape for spec in signature.inputs}
    rows, pages = (_range(signature, size) for size in shapes["table"])
    return Ranges(rows, pages, _range(signature, shapes["tokens"][0]), has_buckets)


def _range(signature: Signature, size: int | str) -> Dim:
    return Dim("fixed", size, size) if isinstance(size, int) else signature.dim(size)


def _last_position(signature: Signature) -> int:
    bounds = next(spec.values for spec in signature.inputs if spec.name == "positions")
    assert bounds is not None
    return bounds.max
