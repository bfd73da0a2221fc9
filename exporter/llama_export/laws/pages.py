"""`pages`: where a row's pages lie in the pool, and how many a table has, changes nothing."""

from __future__ import annotations

from llama_artifacts.manifest import Program
from llama_export.laws.bench import Bench, limit_of
from llama_export.laws.finding import Finding, close, worst

MAX_WIDER = 3
"""Further columns of the table in the last run, where the entry takes so many."""


def check(bench: Bench, program: Program) -> Finding | None:
    """The law on one program: pages in another order, then behind a wider table too."""
    usual = bench.drive(program)
    others = [bench.memory(program, order="reversed")]
    table = others[0].table
    assert table is not None
    num_wider = min(MAX_WIDER, program.signature.dim("Pages").max - table.shape[1])
    others.append(bench.memory(program, order="reversed", num_wider=num_wider))
    found = []
    for memory in others:
        driven = bench.drive(program, memory=memory)
        found.append(close(driven.values, usual.values, limit_of(program), usual.places))
    return worst(found)
