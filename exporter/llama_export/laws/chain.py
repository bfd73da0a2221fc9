"""`chain`: a prefill, then steps = steps alone = the whole sequence."""

from __future__ import annotations

from llama_artifacts.manifest import Program
from llama_export.laws.bench import Bench, limit_of, num_rows
from llama_export.laws.finding import Finding, close, worst
from llama_export.laws.spans import Call, Span, falling, stepped

STEP_ENTRIES = {
    "prefill": "decode",
    "prefill_slots": "decode_rows",
    "prefill_packed": "decode_rows",
    "prefill_paged": "decode_paged",
}
"""The entry that goes on after each entry that fills."""


def check(bench: Bench, program: Program) -> Finding | None:
    """The law on an entry that fills; None where the bundle lacks the one that goes on."""
    entry = STEP_ENTRIES[program.entry]
    step = bench.companion(program, entry)
    if step is None:
        return None
    num_tokens, rows = bench.sequences.num_tokens, num_rows(program)
    lengths = falling(rows, num_tokens * 2 // 3)
    if entry == "decode":
        lengths = [lengths[0]] * rows
    plan = stepped(lengths, [num_tokens] * rows)
    memory = bench.memory(program)
    prompt = Call(tuple(Span(row, 0, length) for row, length in enumerate(lengths)))
    bench.drive(program, (prompt,), memory=memory)
    driven = bench.drive(step, plan, memory=memory)
    alone = bench.drive(step).at(driven.places)
    whole = bench.oracle.expected(entry, plan, driven.places)
    limit = limit_of(program)
    found = worst([close(driven.values, other, limit, driven.places) for other in (alone, whole)])
    return Finding(found.figure, found.limit, f"then {entry}: {found.detail}")
