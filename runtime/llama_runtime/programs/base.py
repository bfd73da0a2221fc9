"""What every format offers to the runtime."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from llama_artifacts import manifest
from llama_artifacts.errors import IntegrityError


@dataclass(frozen=True)
class Loading:
    """What a program is loaded with.

    Attributes:
        path: the program's file, its size and digest already checked.
        program: its record in the manifest.
        weights: every tensor of the bundle on `device`; the program keeps references, not copies.
        device: where it runs.
        threads: threads of an engine that has its own pool; None: the engine's default.
        is_whole: whether the weights files lie beside the program, where an ONNX program points.
        uses_graphs: whether calls of it will be captured in CUDA graphs.
    """

    path: Path
    program: manifest.Program
    weights: Mapping[str, torch.Tensor]
    device: torch.device
    threads: int | None
    is_whole: bool = True
    uses_graphs: bool = False

    def constants(self) -> dict[str, torch.Tensor]:
        """The weights that the program binds.

        Raises:
            IntegrityError: the weights file lacks one.
        """
        for name in self.program.constants:
            if name not in self.weights:
                raise IntegrityError(f"the weights lack `{name}`", where=self.path)
        return {name: self.weights[name] for name in self.program.constants}

    def check_constants(self, names: Iterable[str]) -> None:
        """Refuses a program whose own list of constants is not the manifest's.

        Raises:
            IntegrityError: it is not.
        """
        if odd := sorted(set(names) ^ set(self.program.constants)):
            raise IntegrityError(
                f"its constants are not the manifest's: `{odd[0]}`", where=self.path
            )


class Program(Protocol):
    """A loaded program. Trusts its caller: whoever calls `run` has checked every tensor."""

    def run(
        self, inputs: list[torch.Tensor], states: list[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[torch.Tensor]:
        """Runs once; writes `states` in place and returns new output tensors.

        After an exception the states may hold a part of the step. Not safe for two calls at the
        same time.
        """
        ...


LOADING = threading.Lock()
"""Held while a program is loaded: the engines do not promise that two loads at once go well."""


def load_program(loading: Loading) -> Program:
    """Loads a program with the adapter of its format; only that engine is imported.

    Raises:
        IntegrityError: the file is not what its record in the manifest says.
        CompatibilityError: the engine here cannot run it.
    """
    with LOADING:
        if loading.program.format == "aoti":
            from llama_runtime.programs.aoti import AotiProgram

            return AotiProgram(loading)
        if loading.program.format == "onnx":
            from llama_runtime.programs.onnx import OnnxProgram

            return OnnxProgram(loading)
        from llama_runtime.programs.pt2 import Pt2Program

        return Pt2Program(loading)
