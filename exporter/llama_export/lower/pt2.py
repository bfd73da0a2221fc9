"""Lowers to `.pt2`: a portable ExportedProgram without weights and without example inputs."""

from __future__ import annotations

import io
from typing import Any

import torch

from llama_artifacts.manifest import Target
from llama_export.lower.archive import write_archive
from llama_export.lower.backend import Lowered, Place, needed_capability
from llama_export.model.formulation import Formulation
from llama_export.trace import Job, as_kind, trace
from llama_runtime.machine import minor
from llama_runtime.shards import GROUP


class Pt2Backend:
    """ExportedProgram; see `Backend`."""

    def check(self, device: str, isa: str | None) -> None:
        pass

    def compute_dtype(self, dtype: str, place: Place) -> str:
        return dtype

    def formulation(self, dtype: torch.dtype, place: Place, num_shards: int = 1) -> Formulation:
        is_cpu = place.device == "cpu"
        return Formulation(
            dtype,
            reads_positions=is_cpu,
            numerics=place.numerics,
            has_fp8_units=not is_cpu,
            num_shards=num_shards,
            group=GROUP,
        )

    def facts(self, job: Job, place: Place) -> dict[str, Any]:
        return {"torch": torch.__version__}

    def lower(self, job: Job, place: Place) -> Lowered:
        program = trace(job)
        # An archive with example inputs holds a pickle of them.
        program.example_inputs = None
        for name, tensor in program.state_dict.items():
            program.state_dict[name] = as_kind(tensor, torch.empty(0, dtype=tensor.dtype))
        file = f"{job.stem}.pt2" if place.device == "cpu" else f"{job.stem}.cuda.pt2"
        archive = io.BytesIO()
        torch.export.save(program, archive)
        write_archive(place.folder / file, archive)
        target = Target("cpu" if place.device == "cpu" else "cuda")
        requires = {"torch": minor(torch.__version__), **needed_capability(program)}
        return Lowered(file, target, requires, tuple(job.weights))
