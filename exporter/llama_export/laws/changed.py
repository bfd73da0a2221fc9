"""Two runs of one plan whose tokens differ in part: what may not depend on that part is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from llama_export.laws.calls import Sequences
from llama_export.laws.drive import Driven
from llama_export.laws.finding import Finding, exact


def with_tokens(sequences: Sequences, where: torch.Tensor, vocab_size: int) -> Sequences:
    """The sequences with another token wherever the mask [rows, n] says."""
    other = (sequences.tokens + 1 + torch.arange(sequences.num_tokens)) % vocab_size
    other = torch.where(other == sequences.tokens, (other + 1) % vocab_size, other)
    return replace(sequences, tokens=torch.where(where, other, sequences.tokens).int())


def same(
    first: Driven, second: Driven, is_kept: Callable[[int, int], bool], kept: torch.Tensor
) -> Finding:
    """Whether answers and states agree, bit for bit, where they must.

    Args:
        first: one run.
        second: the other.
        is_kept: whether the answer after a row and a position must be the same.
        kept: which positions of which rows of the states must be, bool [rows, n].
    """
    num, place = 0, ""
    for i, (row, position) in enumerate(first.places):
        if is_kept(row, position) and not torch.equal(first.values[i], second.values[i]):
            num += int((first.values[i] != second.values[i]).sum())
            place = place or f"after row {row}, position {position}"
    for number, (one, other) in enumerate(zip(first.cells, second.cells, strict=True)):
        changed = (one != other).cpu() & kept[: one.shape[0], None, : one.shape[2], None]
        if changed.any():
            num += int(changed.sum())
            row, head, position, _ = (int(i) for i in changed.nonzero()[0])
            place = place or f"state {number} at row {row}, head {head}, position {position}"
    return exact(num, "elements differ", place)
