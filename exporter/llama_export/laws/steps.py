"""`steps`: a program that generates = `decode` and argmax, step by step, states included.

Each token that the program gave is fed to `decode`, so that one tie does not hide what follows it: a
token is wrong unless `decode` puts it within rounding noise of the best.
"""

from __future__ import annotations

import torch

from llama_artifacts.manifest import Program
from llama_export.laws.bench import Bench, limit_of
from llama_export.laws.finding import Finding, close, worst
from llama_export.laws.generation import Generated, fill, regret
from llama_export.laws.memory import new_memory
from llama_runtime.entry import Entry


def check(bench: Bench, program: Program) -> Finding | None:
    """The law on one program; None where the bundle lacks `decode` in its format."""
    companion = bench.companion(program, "decode")
    if companion is None:
        return None
    entry, limit = bench.entry(companion), limit_of(program)
    return worst([_call(bench, entry, generated, limit) for generated in bench.generate(program)])


def _call(bench: Bench, decode: Entry, generated: Generated, limit: float) -> Finding:
    memory = new_memory(decode, 0)
    start, num_steps = generated.start, generated.tokens.shape[1]
    fill(memory, bench.oracle, start)
    token, logits = generated.inputs["token"], []
    for step in range(num_steps):
        inputs = {"tokens": token.contiguous(), "pos": start + step}
        logits.append(decode.run(memory.states, inputs)[0].float().cpu())
        token = generated.tokens[:, step : step + 1].int()
    found = [regret(generated, torch.stack(logits, 1), limit)]
    # What decode computed after a row's end has no counterpart.
    stops = start + int(generated.count.min())
    for one, other in zip(generated.cells, memory.cells(stops), strict=True):
        kept = one[:, :, :stops].float().cpu().flatten(0, -2), other.float().cpu().flatten(0, -2)
        places = [
            (row, head, position)
            for row in range(one.shape[0])
            for head in range(one.shape[1])
            for position in range(stops)
        ]
        found.append(close(kept[0], kept[1], limit, places))
    return worst(found)
