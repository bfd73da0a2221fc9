"""One of several processes: runs every program of a bundle in parts and whole, and compares.

Run by `torchrun`: `BUNDLE [FORMAT]`. Prints, as rank 0, one JSON object: by program the largest
difference of an output or of this process's heads in a state, over all processes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import distributed

import llama_runtime
from llama_artifacts.manifest import Program
from llama_runtime import shards, vectors
from llama_runtime.entry import Entry
from llama_runtime.states import States


def main(folder: Path, format: str | None = None) -> None:
    torch.manual_seed(0)
    with shards.joined(timeout=60) as group:
        whole, part = llama_runtime.load(folder), llama_runtime.load(folder, group=group)
        found = {}
        for program in part.programs:
            if format in (None, program.format):
                single = next(p for p in whole.programs if _is_alike(p, program))
                entries = whole.open(single), part.open(program)
                found[f"{program.label} {program.format}"] = _difference(folder, *entries, group)
        worst = torch.tensor(list(found.values()), dtype=torch.float64)
        distributed.all_reduce(worst, distributed.ReduceOp.MAX)
        if group.rank == 0:
            sys.stdout.write(json.dumps(dict(zip(found, worst.tolist(), strict=True))))


def _is_alike(whole: Program, part: Program) -> bool:
    return (whole.entry, whole.format, whole.variant) == (part.entry, part.format, part.variant)


def _difference(folder: Path, whole: Entry, part: Entry, group: shards.Group) -> float:
    calls = vectors.read(folder, whole.name)
    states = [_states(entry, calls) for entry in (whole, part)]
    worst = 0.0
    for call in calls.calls:
        both = [
            entry.run(own, {name: tensor.clone() for name, tensor in call.inputs.items()})
            for entry, own in zip((whole, part), states, strict=True)
        ]
        for expected, actual in zip(*both, strict=True):
            worst = max(worst, _largest(actual, expected))
    for name in states[1] or ():
        own = states[0][name].chunk(group.size, dim=1)[group.rank]
        worst = max(worst, _largest(states[1][name], own))
    return worst


def _states(entry: Entry, calls: vectors.Vectors) -> States | None:
    return entry.new_states(**calls.sizes) if entry.signature.states else None


def _largest(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual.double() - expected.double()).abs().max())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
