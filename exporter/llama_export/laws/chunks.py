"""`chunks`: a prompt in chunks gives what the prompt gives whole."""

from __future__ import annotations

from llama_artifacts.manifest import Program
from llama_export.laws.bench import Bench, limit_of, num_rows
from llama_export.laws.finding import Finding, close
from llama_export.laws.spans import chunked, falling


def check(bench: Bench, program: Program) -> Finding | None:
    """The law on one program: three chunks, the last of one token in the longest prompt."""
    num_tokens, rows = bench.sequences.num_tokens, num_rows(program)
    lengths = [num_tokens] * rows if program.entry == "prefill" else falling(rows, num_tokens)
    cuts = (max(1, num_tokens // 3), num_tokens - 1)
    parts = bench.drive(program, chunked(program.entry, lengths, cuts))
    whole = bench.drive(program, chunked(program.entry, lengths, ()))
    expected = whole.values
    return close(parts.at(whole.places), expected, limit_of(program), whole.places)
