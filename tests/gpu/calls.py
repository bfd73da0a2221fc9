"""Twenty calls of every entry that can be captured: random tokens, growing positions, odd sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

Inputs = dict[str, torch.Tensor]
BATCH, PAGED_ROWS, PAGES = 4, 3, 3
ENTRIES = (
    "decode",
    "decode_rows",
    "prefill_slots",
    "prefill_packed",
    "step_packed",
    "decode_paged",
    "prefill_paged",
    "step_paged",
)


# Rows of the results that belong to idle rows.
_IDLE: dict[str, tuple[int, ...]] = {
    "decode_rows": (-1,),
    "step_packed": (4, 5, 7),
    "decode_paged": (2,),
    "step_paged": (3, 4),
}


def meant(entry: str, output: torch.Tensor) -> torch.Tensor:
    """The rows of an output that are not idle; those that are see scratch, which may hold anything."""
    idle = {row % len(output) for row in _IDLE.get(entry, ())}
    return output[[row for row in range(len(output)) if row not in idle]]


@dataclass(frozen=True)
class Sizes:
    """Of the programs that are called; `page_size` positions a page."""

    max_seq: int
    page_size: int
    vocab_size: int

    @property
    def pool_pages(self) -> int:
        return PAGED_ROWS * PAGES + 1


class Calls:
    """Makes the calls of one entry; the same ones for the same sizes."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._generator = torch.Generator().manual_seed(7)
        pages = torch.arange(1, sizes.pool_pages, dtype=torch.int32)
        self._table = pages.reshape(PAGED_ROWS, PAGES)

    def of(self, entry: str, num_steps: int) -> Iterator[Inputs]:
        for step in range(num_steps):
            yield getattr(self, f"_{entry}")(step)

    def _tokens(self, *shape: int) -> torch.Tensor:
        high = self._sizes.vocab_size
        return torch.randint(high, shape, generator=self._generator, dtype=torch.int32)

    def _decode(self, step: int) -> Inputs:
        return {"tokens": self._tokens(BATCH, 1), "pos": _ints(step)}

    def _decode_rows(self, step: int) -> Inputs:
        positions = step + torch.arange(BATCH, dtype=torch.int32)
        positions[-1] = self._sizes.max_seq - 1  # idle
        return {"tokens": self._tokens(BATCH, 1), "positions": positions}

    def _prefill_slots(self, step: int) -> Inputs:
        num = min(3, BATCH)
        lengths = _ints([step + 1 + m for m in range(num)])
        slots = _ints(list(range(num)))
        return {"tokens": self._tokens(num, step + 3), "slots": slots, "lengths": lengths}

    def _prefill_packed(self, step: int) -> Inputs:
        first, second = step + 1, 4
        last = [first - 1, first + second - 1] + [0] * (BATCH - 2)
        return {
            "tokens": self._tokens(first + second),
            "rows": _ints([0] * first + [1] * second),
            "positions": _ints([*range(first), *range(second)]),
            "segments": _ints([0] * first + [1] * second),
            "last": _ints(last),
        }

    def _step_packed(self, step: int) -> Inputs:
        own = self._decode_rows(step + 30)
        own["positions"][:2] = self._sizes.max_seq - 1  # their prompts are in this call
        steps = {f"step_{name}": tensor for name, tensor in own.items()}
        return {**self._prefill_packed(step), **steps}

    def _decode_paged(self, step: int) -> Inputs:
        positions = _ints([step, step + 5, -1])
        return {"tokens": self._tokens(PAGED_ROWS, 1), "positions": positions, "table": self._table}

    def _prefill_paged(self, step: int) -> Inputs:
        first, second, size = step + 1, 4, self._sizes.page_size
        rows, positions = [0] * first + [1] * second, [*range(first), *range(second)]
        places = zip(rows, positions, strict=True)
        slots = [int(self._table[r, p // size]) * size + p % size for r, p in places]
        return {
            "tokens": self._tokens(first + second),
            "positions": _ints(positions),
            "rows": _ints(rows),
            "slots": _ints(slots),
            "last": _ints([first - 1, first + second - 1, 0]),
            "table": self._table,
        }

    def _step_paged(self, step: int) -> Inputs:
        own = self._decode_paged(step)
        own["positions"] = _ints([-1, -1, step])
        steps = {f"step_{name}": own[name] for name in ("tokens", "positions")}
        return {**self._prefill_paged(step), **steps}


def _ints(values: int | list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
