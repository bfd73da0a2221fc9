"""What every format offers to a build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.export import ExportedProgram

from llama_artifacts.errors import BuildError
from llama_artifacts.manifest import CAPABILITY, FORMATS, Format, Numerics, Target
from llama_export.model.formulation import Formulation
from llama_export.pack import Extent
from llama_export.trace import Job

FP8_CAPABILITY = "8.9"
"""The first compute capability with FP8 units."""

MAX_INLINED = 8
"""AOTInductor writes vectors of up to so many elements into the code, and then binds them no more."""


@dataclass(frozen=True)
class Place:
    """Where a program will run, and what the builder may use.

    Attributes:
        device: `cpu` or `cuda`.
        isa: instruction set of native CPU code; None: this machine's best.
        folder: the bundle being written.
        weights: the bundle's weights, memory mapped; None when it holds none.
        inv_freq: the model's inverse frequencies, which need no weights.
        extents: where each tensor is.
        numerics: how products with FP8 weights are computed.
    """

    device: str
    isa: str | None
    folder: Path
    weights: Mapping[str, torch.Tensor] | None
    inv_freq: torch.Tensor
    extents: Mapping[str, Extent]
    numerics: Numerics = "exact"


@dataclass(frozen=True)
class Lowered:
    """A program file that was written; `constants` are the weights it binds when loaded."""

    file: str
    target: Target
    requires: dict[str, str]
    constants: tuple[str, ...]


class Backend(Protocol):
    """One format."""

    def check(self, device: str, isa: str | None) -> None:
        """Refuses at once what this machine cannot make.

        Raises:
            BuildError: with the reason.
        """
        ...

    def compute_dtype(self, dtype: str, place: Place) -> str:
        """The compute dtype this format uses where `dtype` was asked for."""
        ...

    def formulation(self, dtype: torch.dtype, place: Place, num_shards: int = 1) -> Formulation:
        """How the model must be written for this format, place and number of processes."""
        ...

    def facts(self, job: Job, place: Place) -> dict[str, Any]:
        """What else the program depends on, as JSON: compiler, target, places of weights."""
        ...

    def lower(self, job: Job, place: Place) -> Lowered:
        """Traces the job and writes its program into the folder.

        Raises:
            BuildError: the program cannot be made here.
        """
        ...


def needed_capability(program: ExportedProgram) -> dict[str, str]:
    """What a program requires of a CUDA device: one with FP8 units, where it calls them."""
    graphs = [
        module.graph  # bodies of loops among them
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
    ]
    calls = {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}
    return {CAPABILITY: FP8_CAPABILITY} if torch.ops.aten._scaled_mm.default in calls else {}


def backend(name: Format) -> Backend:
    """The backend of a format; only its own compiler is imported."""
    if name == "pt2":
        from llama_export.lower.pt2 import Pt2Backend

        return Pt2Backend()
    if name == "aoti":
        from llama_export.lower.aoti import AotiBackend

        return AotiBackend()
    if name == "onnx":
        from llama_export.lower.onnx import OnnxBackend

        return OnnxBackend()
    raise BuildError(f"unknown format `{name}`", hint=f"known formats: {', '.join(FORMATS)}")
