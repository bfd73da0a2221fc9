"""`gqa`: query head j * g + i reads key/value head j, as if each head had a copy of its own."""

from __future__ import annotations

from llama_artifacts.manifest import Program
from llama_export.laws import parity
from llama_export.laws.bench import Bench
from llama_export.laws.finding import Finding


def check(bench: Bench, program: Program) -> Finding | None:
    """The law on one program; None where no heads share keys and values."""
    model = bench.manifest.model
    if model.num_heads == model.num_kv_heads:
        return None
    return parity.against(bench, program, bench.ungrouped)
