"""`scratch`: a call writes the positions it names, padding and idle rows only scratch."""

from __future__ import annotations

from llama_artifacts.manifest import Program
from llama_export.laws.bench import Bench, is_generating
from llama_export.laws.finding import Finding, exact, worst


def check(bench: Bench, program: Program) -> Finding | None:
    """The law on one program, in the run whose results parity compares."""
    runs = bench.generate(program) if is_generating(program) else (bench.drive(program),)
    return worst([exact(run.num_stray, "elements written elsewhere", run.stray) for run in runs])
