"""`rows`: another row's content changes nothing here, bit for bit, in calls of the same shapes."""

from __future__ import annotations

import torch

from llama_artifacts.manifest import Program
from llama_export.laws.bench import Bench, is_generating, num_rows
from llama_export.laws.changed import same, with_tokens
from llama_export.laws.finding import Finding, exact, worst
from llama_export.laws.generation import go_on
from llama_export.laws.oracle import Oracle


def check(bench: Bench, program: Program) -> Finding | None:
    """The law on one program: the first row is changed, then the last; None for one row."""
    rows = num_rows(program)
    if rows == 1:
        return None
    return worst([_changing(bench, program, row) for row in (0, rows - 1)])


def _changing(bench: Bench, program: Program, changed_row: int) -> Finding:
    sequences = bench.sequences
    of_row = torch.zeros(sequences.tokens.shape, dtype=torch.bool)
    of_row[changed_row] = True
    changed = with_tokens(sequences, of_row, bench.manifest.model.vocab_size)
    if is_generating(program):
        first = bench.generate(program)[0]
        oracle = Oracle(bench.oracle.model, changed)
        second = go_on(bench.entry(program), oracle, eos=int(first.inputs.get("eos", 0)))
        others = [row for row in range(num_rows(program)) if row != changed_row]
        different = (first.tokens != second.tokens)[others]
        return exact(int(different.sum()), "tokens differ", f"row {changed_row} was changed")
    return same(
        bench.drive(program),
        bench.drive(program, sequences=changed),
        lambda row, position: row != changed_row,
        ~of_row,
    )
