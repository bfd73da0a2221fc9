"""Runs a plan of calls on an entry and keeps what it answered and where it wrote."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llama_export.laws.calls import Sequences, prepare
from llama_export.laws.memory import Memory
from llama_export.laws.spans import Plan
from llama_runtime.entry import Entry


@dataclass(frozen=True)
class Driven:
    """What an entry gave in a plan.

    Attributes:
        values: one answer each, float32 on the CPU, [answers, width], or [answers] of numbers.
        places: the row and the position of each answer.
        cells: the positions of each row in each state at the end, see `Memory.cells`.
        num_stray: elements of the states that a call wrote and did not name.
        stray: where the first of them was.
    """

    values: torch.Tensor
    places: tuple[tuple[int, int], ...]
    cells: tuple[torch.Tensor, ...]
    num_stray: int
    stray: str

    def at(self, places: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """The answers after these rows and positions."""
        index = {place: i for i, place in enumerate(self.places)}
        return self.values[[index[place] for place in places]]


def drive(entry: Entry, plan: Plan, sequences: Sequences, memory: Memory) -> Driven:
    """Runs the plan from its first call to its last."""
    watch = Watch(memory, sequences.num_tokens)
    values, places = [], []
    for call in plan:
        prepared = prepare(entry.name, call, sequences, memory)
        output = entry.run(memory.states, prepared.inputs)[0]
        watch.note(memory.mask(call.spans(), sequences.num_tokens))
        flat = _flat(output.float().cpu(), num_inner=len(_inner(entry)))
        for index, row, position in prepared.answers:
            values.append(flat[index])
            places.append((row, position))
    cells = tuple(watch.cells)
    watch.end()
    return Driven(torch.stack(values), tuple(places), cells, watch.num_stray, watch.stray)


def _inner(entry: Entry) -> tuple[int | str, ...]:
    """The axes of one answer: the vocabulary or the hidden width, none for numbers."""
    shape = entry.signature.outputs[0].shape
    return shape[-1:] if shape and isinstance(shape[-1], int) and len(shape) > 1 else ()


def _flat(output: torch.Tensor, *, num_inner: int) -> torch.Tensor:
    inner = output.shape[output.ndim - num_inner :]
    return output.reshape(-1, *inner)


class Watch:
    """Compares the states before and after each call."""

    def __init__(self, memory: Memory, num_tokens: int) -> None:
        self._memory = memory
        self._num_tokens = min(num_tokens, memory.capacity)
        self.cells = memory.cells(self._num_tokens)
        self.num_stray = 0
        self.stray = ""

    def note(self, named: torch.Tensor) -> None:
        """Counts what changed at positions that the call did not name, bool [rows, positions]."""
        before, self.cells = self.cells, self._memory.cells(self._num_tokens)
        for number, (old, new) in enumerate(zip(before, self.cells, strict=True)):
            allowed = named[:, : self._num_tokens].to(new.device)[:, None, :, None]
            changed = (old != new) & ~allowed
            self._count(int(changed.sum()), changed.nonzero(), number)

    def end(self) -> None:
        """Counts what was written beyond every position that was fed, scratch aside."""
        if self._memory.states is not None:
            beyond = self._memory.num_touched(self._num_tokens)
            self.num_stray += beyond
            if beyond and not self.stray:
                self.stray = "beyond the positions fed"

    def _count(self, num: int, places: torch.Tensor, number: int) -> None:
        self.num_stray += num
        if num and not self.stray:
            row, head, position, _ = (int(i) for i in places[0])
            self.stray = f"state {number} at row {row}, head {head}, position {position}"
