"""`parity`: a program gives what the eager float32 model gives over the whole sequence."""

from __future__ import annotations

from llama_artifacts.manifest import Program
from llama_export.laws import generation
from llama_export.laws.bench import Bench, is_generating, limit_of
from llama_export.laws.finding import Finding, close
from llama_export.laws.oracle import Oracle


def check(bench: Bench, program: Program) -> Finding | None:
    """The law on one program."""
    return against(bench, program, bench.oracle)


def against(bench: Bench, program: Program, oracle: Oracle) -> Finding:
    """What a program gave, against an oracle on the bench's sequences."""
    limit = limit_of(program)
    if is_generating(program):
        return generation.parity(bench.generate(program), oracle, limit)
    driven = bench.drive(program)
    expected = oracle.expected(program.entry, bench.usual(program), driven.places)
    return close(driven.values, expected, limit, driven.places)
