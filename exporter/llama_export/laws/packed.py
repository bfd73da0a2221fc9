"""`packed`: a prompt among others in one call gives what it gives alone."""

from __future__ import annotations

from llama_artifacts.manifest import Program
from llama_export.laws.bench import Bench, limit_of, num_rows
from llama_export.laws.finding import Finding, close
from llama_export.laws.spans import alone, falling, together


def check(bench: Bench, program: Program) -> Finding | None:
    """The law on one program; None where a call takes one prompt."""
    rows = num_rows(program)
    if rows == 1:
        return None
    lengths = falling(rows, bench.sequences.num_tokens)
    packed = bench.drive(program, together(lengths))
    single = bench.drive(program, alone(lengths))
    if program.entry == "loss_packed":
        total = single.values.sum(0, keepdim=True)
        return close(packed.values, total, limit_of(program), packed.places)
    expected = single.at(packed.places)
    return close(packed.values, expected, limit_of(program), packed.places)
