"""`layout`: the weights are the network's parameters, and some program binds each of them."""

from __future__ import annotations

import math

from llama_artifacts.per_rank import stored_name
from llama_export.checkpoint.layout import HEAD, expected_tensors
from llama_export.laws.bench import Bench
from llama_export.laws.finding import Finding, exact
from llama_export.laws.oracle import coded, model_config
from llama_export.lower.backend import MAX_INLINED


def check(bench: Bench) -> Finding | None:
    """The law on the bundle."""
    manifest = bench.manifest
    shapes = {name: tensor.shape for name, tensor in bench.weights.items()}
    config = model_config(manifest)
    plain, expected = expected_tensors(config), expected_tensors(config, coded(bench.weights))
    faults = [f"`{name}` is missing" for name in expected if name not in shapes]
    faults += [
        f"`{name}` has shape {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != tuple(shape)
    ]
    num_parameters = sum(math.prod(shape) for name, shape in plain.items() if name in shapes)
    if num_parameters != manifest.model.num_parameters:
        faults.append(f"{num_parameters} parameters, expected {manifest.model.num_parameters}")
    bound = {
        stored_name(manifest, program, name)
        for program in manifest.programs
        for name in program.constants
    }
    if {program.entry for program in manifest.programs} == {"hidden_packed"}:
        bound.add(HEAD)  # what gives no logits needs none
    if any(program.format == "aoti" for program in manifest.programs):
        bound |= {name for name, shape in shapes.items() if math.prod(shape) <= MAX_INLINED}
    faults += [f"no program binds `{name}`" for name in shapes if name not in bound]
    faults += [
        f"{program.file} binds `{name}`, which the weights lack"
        for program in manifest.programs
        for name in program.constants
        if stored_name(manifest, program, name) not in shapes
    ]
    return exact(len(faults), "faults", faults[0] if faults else "")
