"""ExportedPrograms, run by torch's own operators."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._export.serde import schema
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from llama_artifacts.errors import IntegrityError
from llama_runtime.programs.base import Loading
from llama_runtime.programs.pt2_archive import read_archive


class Pt2Program:
    """See `Program`."""

    def __init__(self, loading: Loading) -> None:
        self._module = load_module(loading)

    def run(
        self, inputs: list[torch.Tensor], states: list[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[torch.Tensor]:
        arguments: list[Any] = list(inputs)
        if states:
            arguments.append(list(zip(states[::2], states[1::2], strict=True)))
        with torch.no_grad():
            output = self._module(*arguments)
        return list(output) if isinstance(output, (tuple, list)) else [output]


def load_module(loading: Loading, *, is_trainable: bool = False) -> torch.fx.GraphModule:
    """The checked program as a module that holds the weights under their own names.

    Args:
        loading: what to load, with which weights.
        is_trainable: parameters are copies that ask for gradients, not uses of the weights.

    Raises:
        IntegrityError: the file is not what its record in the manifest says.
    """
    weights = loading.constants()
    program = _load(loading, weights)
    if loading.device.type != "cpu":
        program = move_to_device_pass(program, str(loading.device))
    for name, tensor in weights.items():
        own = tensor.clone() if is_trainable else tensor
        if isinstance(program.state_dict[name], torch.nn.Parameter):
            own = torch.nn.Parameter(own, requires_grad=is_trainable)
        program.state_dict[name] = own
    return program.module(check_guards=False)


def _load(loading: Loading, weights: Mapping[str, torch.Tensor]) -> ExportedProgram:
    archive = read_archive(loading.path, is_sharded=loading.program.shards > 1)
    try:
        with _hints_once():
            program = torch.export.load(archive)
    except Exception as cause:  # whatever a malformed graph makes of torch's deserializer
        raise IntegrityError(
            f"torch cannot read it: {type(cause).__name__}",
            where=loading.path,
            hint="build the bundle again",
        ) from cause
    loading.check_constants(program.state_dict)
    _check_weights(program, weights, loading.path)
    return program


@contextlib.contextmanager
def _hints_once() -> Iterator[None]:
    """Resolves the annotations of each class of torch's schema once, not for every value of it.

    They take a third of the time of a load. The caller sees to it that no other load runs.
    """
    resolve, names = typing.get_type_hints, vars(schema)
    known: dict[Any, dict[str, Any]] = {}

    def get_type_hints(obj: Any, globalns: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if globalns is not names or args or kwargs:
            return resolve(obj, globalns, *args, **kwargs)
        if obj not in known:
            known[obj] = resolve(obj, globalns)
        return known[obj]

    typing.get_type_hints = get_type_hints
    try:
        yield
    finally:
        typing.get_type_hints = resolve


def _check_weights(
    program: ExportedProgram, weights: Mapping[str, torch.Tensor], path: Path
) -> None:
    """The graph was traced for weights of these shapes; others would compute something else."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in names:
            continue
        name, traced = names[node.name], node.meta["val"]
        weight = weights[name]
        if tuple(traced.shape) != tuple(weight.shape) or traced.dtype != weight.dtype:
            raise IntegrityError(
                f"expects `{name}` as {list(traced.shape)} of {traced.dtype}, "
                f"the weights hold {list(weight.shape)} of {weight.dtype}",
                where=path,
            )
