"""One of several processes: runs every program of a bundle in parts and whole, and compares.

Run by `torchrun`: `WHOLE PARTS`, two bundles (or one twice), the first of which has pt2 programs for
one process. Prints, as rank 0, one JSON object: by program of the second, the largest difference of
an output, or of a process's heads in a state, over all processes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import llama_runtime
from llama_runtime import shards, vectors
from llama_runtime.entry import Entry

Results = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Outputs of all calls, those rows that somebody reads, then the states after them."""


def main(whole: Path, parts: Path) -> None:
    """Runs and compares."""
    torch.set_num_threads(1)
    with shards.joined(timeout=120) as group:
        bundle = llama_runtime.load(parts, group=group)
        single = llama_runtime.load(whole, format="pt2") if group.rank == 0 else None
        found = {}
        for program in bundle.programs:
            if program.variant:  # of sizes that the calls do not have
                continue
            calls = vectors.read(whole, program.entry)
            expected = single and _results(single.entry(program.entry), calls)
            actual = _results(bundle.open(program), calls)
            found[f"{program.label} {program.format}"] = _difference(
                actual, _shared(expected), group
            )
        worst = torch.tensor(list(found.values()), dtype=torch.float64)
        distributed.all_reduce(worst, distributed.ReduceOp.MAX)
        if group.rank == 0:
            sys.stdout.write(json.dumps(dict(zip(found, worst.tolist(), strict=True))))


def _results(entry: Entry, calls: vectors.Vectors) -> Results:
    states = entry.new_states(**calls.sizes) if entry.signature.states else None
    outputs = []
    for call in calls.calls:
        found = entry.run(states, {name: t.clone() for name, t in call.inputs.items()})
        for spec, output in zip(entry.signature.outputs, found, strict=True):
            if spec.name in call.rows:  # what idle rows give depends on the format
                width = call.outputs[spec.name].shape[1]
                outputs.append(output.reshape(-1, width)[call.rows[spec.name].long()])
    return outputs, [] if states is None else states.tensors()


def _shared(results: Results | None) -> Results:
    """What rank 0 has, in every rank."""
    box: list[Any] = [results]
    distributed.broadcast_object_list(box)
    found: Results = box[0]
    return found


def _difference(actual: Results, expected: Results, group: shards.Group) -> float:
    own = [state.chunk(group.size, dim=1)[group.rank] for state in expected[1]]
    pairs = zip([*actual[0], *actual[1]], [*expected[0], *own], strict=True)
    return max(_largest(*pair) for pair in pairs)


def _largest(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest value where that is more than 1."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    wide = expected.double()
    return float((actual.double() - wide).abs().max() / wide.abs().max().clamp(min=1))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
