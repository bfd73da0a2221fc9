"""The peak of a program's own memory, by the kind of program.

A traced graph leaves `Batch` and `MaxSeq` open and has few layers: one trace answers for every size,
and the layers of a network are alike. What a loop carries grows with them, by as much for each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from llama_artifacts.bundle import Bundle, check_digest
from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import Format, Numerics
from llama_artifacts.manifest import Program as ProgramRecord
from llama_export.entries.registry import DEFAULT_PAGE_SIZE, EntrySpec, Sizes
from llama_export.footprint.call import Call, open_signature
from llama_export.footprint.fused import Schedule, schedule
from llama_export.footprint.liveness import ProgramGraph
from llama_export.footprint.network import Network
from llama_export.lower.backend import Place, backend
from llama_export.lower.processes import processes
from llama_export.model.formulation import Formulation
from llama_export.model.fp8 import MAX_FUSED_ROWS
from llama_export.trace import Job, torch_dtype, trace
from llama_runtime.programs.pt2_archive import read_archive

_TRACED_LAYERS = 3
_SCHEDULED_LAYERS = 4
"""One more, since Inductor keeps parts of the residual sum of a few layers."""

_OPEN_ROWS = 8
"""A batch that is traced where it is open: more rows than are written out one by one."""

_OPEN_LENGTH = 256


class Activations(Protocol):
    """What a program needs beside weights, states and inputs.

    `how` says in a few words how it is found out.
    """

    @property
    def how(self) -> str: ...

    def peak(self, call: Call) -> int:
        """Bytes at the worst moment of a call, results among them.

        Raises:
            BuildError: the program cannot be traced or followed.
            IntegrityError: the program's file is damaged.
        """
        ...


@dataclass(frozen=True)
class Kind:
    """Which program of an entry.

    Attributes:
        format: its format.
        device: `cpu` or `cuda`.
        numerics: how it computes products with FP8 weights.
        page_size: positions of a page.
        has_one_row: paged steps of one row have a program of their own.
    """

    format: Format
    device: str
    numerics: Numerics = "exact"
    page_size: int = DEFAULT_PAGE_SIZE
    has_one_row: bool = True

    @property
    def is_native(self) -> bool:
        """Whether it can be compiled here as far as its schedule."""
        return self.format == "aoti" and self.device == "cpu"

    def formulation(self, dtype: str, num_shards: int = 1) -> Formulation:
        """How the model is written for it."""
        place = Place(self.device, None, Path(), None, torch.empty(0), {}, self.numerics)
        like: Format = "aoti" if self.is_native else "pt2"
        return backend(like).formulation(torch_dtype(dtype), place, num_shards)


@dataclass
class Saved:
    """The program in a bundle's `.pt2` file, as it is there."""

    bundle: Bundle
    record: ProgramRecord
    how: str = "liveness over the graph in the bundle"

    def peak(self, call: Call) -> int:
        return self._graph.peak(call).num_bytes

    @cached_property
    def _graph(self) -> ProgramGraph:
        check_digest(self.bundle, self.record.file)
        path = self.bundle.path(self.record.file)
        archive = read_archive(path, is_sharded=self.record.shards > 1)
        try:
            program = torch.export.load(archive)
        except Exception as cause:  # whatever a malformed graph makes of torch's deserializer
            message = f"torch cannot read it: {type(cause).__name__}"
            raise IntegrityError(message, where=path, hint="build the bundle again") from cause
        return ProgramGraph(program)


@dataclass
class Traced:
    """A program that torch's own operators run, traced here."""

    network: Network
    spec: EntrySpec
    kind: Kind
    _graphs: dict[int, ProgramGraph] = field(default_factory=dict)

    @property
    def how(self) -> str:
        if self.kind.format == "aoti":
            return "liveness over the graph; a bound, since compiled loops keep less"
        return "liveness over the graph"

    def peak(self, call: Call) -> int:
        def at(num_layers: int) -> int:
            if num_layers not in self._graphs:
                job = _job(self.network, self.spec, self.kind, num_layers)
                self._graphs[num_layers] = ProgramGraph(trace(job))
            graph = self._graphs[num_layers]
            return graph.peak(call).num_bytes

        return _over_layers(self.spec, self.network.config.num_layers, _TRACED_LAYERS, at)


@dataclass
class Compiled:
    """A program for AOTInductor, compiled here as far as its schedule."""

    network: Network
    spec: EntrySpec
    kind: Kind
    how: str = "liveness over Inductor's schedule"
    _schedules: dict[tuple[int, int], Schedule] = field(default_factory=dict)

    def peak(self, call: Call) -> int:
        # Few rows are written in another form, so they are another program.
        fixed = call.rows if call.rows <= self._most_fixed else 0

        def at(num_layers: int) -> int:
            key = (num_layers, fixed)
            if key not in self._schedules:
                self._schedules[key] = self._schedule(num_layers, fixed)
            return self._schedules[key].peak(call)

        return _over_layers(self.spec, self.network.config.num_layers, _SCHEDULED_LAYERS, at)

    @property
    def _most_fixed(self) -> int:
        """Up to how many rows a build writes out, in the program or in a variant of it."""
        if self.spec.states == "rows":
            return MAX_FUSED_ROWS
        return int(self.spec.name == "decode_paged" and self.kind.has_one_row)

    def _schedule(self, num_layers: int, rows: int) -> Schedule:
        job = _job(self.network, self.spec, self.kind, num_layers, rows=rows)
        with warnings.catch_warnings(), processes(job.form):
            warnings.simplefilter("ignore")
            return schedule(trace(job), job.signature)


def _job(network: Network, spec: EntrySpec, kind: Kind, num_layers: int, *, rows: int = 0) -> Job:
    """What is traced: all sizes open, but for the rows where they are given."""
    few = network.first_layers(num_layers)
    form = kind.formulation(few.dtype, few.shards)
    length = max(_OPEN_LENGTH, 2 * max(spec.counts.values(), default=0))
    sizes = Sizes(few.called_as, rows or _OPEN_ROWS, length, few.dtype, page_size=kind.page_size)
    # A loop that starts at a position that was read has no size that depends on the capacity.
    has_length = not (spec.counts and form.reads_positions)
    signature = open_signature(spec, sizes, has_batch=not rows, has_length=has_length)
    return Job(few.config, spec, spec.stem, signature, form, few.tensors)


def _over_layers(spec: EntrySpec, num_layers: int, most: int, at: Callable[[int], int]) -> int:
    """The peak of all layers from that of few."""
    if num_layers <= most:
        return at(num_layers)
    peak = at(most)
    if not spec.counts:
        return peak
    return peak + (num_layers - most) * (peak - at(most - 1))
