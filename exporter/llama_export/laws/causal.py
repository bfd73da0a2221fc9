"""`causal`: another token changes nothing before it, neither answers nor states, bit for bit."""

from __future__ import annotations

import torch

from llama_artifacts.manifest import Program
from llama_export.laws.bench import Bench
from llama_export.laws.changed import same, with_tokens
from llama_export.laws.finding import Finding


def check(bench: Bench, program: Program) -> Finding | None:
    """The law on one program: all tokens from three quarters of every row on are changed."""
    sequences = bench.sequences
    change, order = sequences.change, torch.arange(sequences.num_tokens)
    later = (order >= change).expand(len(sequences.tokens), -1)
    changed = with_tokens(sequences, later, bench.manifest.model.vocab_size)
    return same(
        bench.drive(program),
        bench.drive(program, sequences=changed),
        lambda row, position: position < change,
        ~later,
    )
