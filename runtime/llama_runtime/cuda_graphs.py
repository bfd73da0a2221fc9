"""CUDA graphs: a program's launches are recorded once for each bucket, then replayed as one.

A captured step reads its inputs from buffers of its own and reads and writes states where they were
when it was captured. So a call is copied into the buffers of its bucket, replayed, and its results
are copied out. States at other addresses, such as those of a new session or a changed pool, are
captured anew; graphs of the `MAX_STATE_SETS` sets used last are kept.

A step may be run twice with the same inputs: it writes the same values to the same places and reads
nothing past its positions. That is why it can be warmed up on the caller's own states.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from llama_artifacts import manifest
from llama_artifacts.errors import CompatibilityError, InputError, IntegrityError
from llama_artifacts.signature import resolve
from llama_runtime.buckets import bucket, can_be_captured, cut, fill, padding
from llama_runtime.programs.base import Loading, Program, load_program
from llama_runtime.states import torch_dtype

MAX_STATE_SETS = 4
"""Sets of states whose graphs are kept; a further one takes the place of the one unused longest."""

WARM_UPS = 2
"""Runs before a capture, in which libraries allocate workspaces and choose kernels."""

_HINT = "load with cuda_graphs=False (run --no-cuda-graphs)"
_log = logging.getLogger(__name__)
_Key = tuple["GraphProgram", tuple[tuple[str, int], ...]]


class CaptureError(Exception):
    """A program cannot be captured; nothing is wrong with its states."""


class Recording(Protocol):
    """A captured step.

    Attributes:
        outputs: where each replay leaves its results.
    """

    outputs: list[torch.Tensor]

    def replay(self, buffers: Sequence[torch.Tensor]) -> None:
        """Runs the step on what the buffers hold now; they are those that it was recorded with."""
        ...


class Recorder(Protocol):
    """How steps are captured."""

    def record(
        self,
        program: Program,
        inputs: list[torch.Tensor],
        states: list[torch.Tensor],
        sizes: Mapping[str, int],
    ) -> Recording:
        """Captures a call of the program; it may run it on the inputs and states any number of times.

        A recording keeps no state alive.

        Raises:
            RuntimeError: the program cannot be captured.
        """
        ...


class CudaRecorder:
    """Captures what programs launch through torch, all in one pool of memory.

    The pool may be shared since no two graphs run at the same time and results are copied out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        # One for all: libraries keep a workspace for each stream.
        self._stream: torch.cuda.Stream | None = None

    def record(
        self,
        program: Program,
        inputs: list[torch.Tensor],
        states: list[torch.Tensor],
        sizes: Mapping[str, int],
    ) -> Recording:
        with torch.cuda.device(self._device):
            stream = self._stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    program.run(inputs, states, sizes)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ):
                outputs = program.run(inputs, states, sizes)
        return _CudaRecording(outputs, graph.replay)


@dataclass
class _CudaRecording:
    outputs: list[torch.Tensor]
    launch: Callable[[], None]

    def replay(self, buffers: Sequence[torch.Tensor]) -> None:
        self.launch()


class OnnxRecorder:
    """Leaves the capture to ONNX Runtime, which keeps one graph for each number it is given."""

    def record(
        self,
        program: Any,
        inputs: list[torch.Tensor],
        states: list[torch.Tensor],
        sizes: Mapping[str, int],
    ) -> Recording:
        recording: Recording = program.record(inputs, states, sizes)
        return recording


@dataclass(frozen=True)
class Captured:
    """One graph: its recording and the buffers that it reads its inputs from."""

    recording: Recording
    inputs: list[torch.Tensor]


class CudaGraphs:
    """The graphs of a bundle on one device.

    Args:
        device: where the programs run.
        recorder: captures pt2 and aoti programs.
        is_required: what cannot be captured is refused; else it runs eagerly, with a warning.
    """

    def __init__(self, device: torch.device, recorder: Recorder, *, is_required: bool) -> None:
        self.device = device
        self.is_required = is_required
        self._recorder = recorder
        self._sets: OrderedDict[tuple[int, ...], dict[_Key, Captured]] = OrderedDict()
        # Graphs share memory, so they run one after the other.
        self._lock = threading.Lock()

    @property
    def num_graphs(self) -> int:
        """How many are kept."""
        return sum(map(len, self._sets.values()))

    def load(self, loading: Loading) -> Program:
        """A program whose calls are captured and replayed where they can be.

        Raises:
            CompatibilityError: as `run`, or the engine refuses to load it for graphs.
        """
        record = loading.program
        if not can_be_captured(record.entry, record.signature):
            return load_program(loading)
        try:
            program = load_program(replace(loading, uses_graphs=True))
        except IntegrityError as cause:
            program = load_program(loading)  # raises where graphs are not the reason
            self.refuse(record, cause)
            return program
        recorder = OnnxRecorder() if record.format == "onnx" else self._recorder
        return GraphProgram(program, record, recorder, self)

    def run(
        self,
        program: GraphProgram,
        inputs: list[torch.Tensor],
        states: list[torch.Tensor],
        sizes: Mapping[str, int],
        found: Mapping[str, int],
    ) -> list[torch.Tensor]:
        """Replays the graph of the bucket `found`, captured now if it is the first such call.

        Raises:
            CaptureError: it cannot be captured.
        """
        addresses = tuple(state.data_ptr() for state in states)
        key = (program, tuple(found.items()))
        with self._lock:
            graphs = self._sets.setdefault(addresses, {})
            self._sets.move_to_end(addresses)
            if key not in graphs:
                graphs[key] = program.capture(inputs, states, found)
            # After the capture: a pool of memory lives as long as a graph does.
            while len(self._sets) > MAX_STATE_SETS:
                self._sets.popitem(last=False)
            return program.replay(graphs[key], inputs, states, sizes, found)

    def refuse(self, record: manifest.Program, cause: Exception) -> None:
        """Tells that a program runs without graphs.

        Raises:
            CompatibilityError: graphs are required.
        """
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        message = f"`{record.label}` in {record.format} cannot be captured: {reason}"
        if self.is_required:
            raise CompatibilityError(message, hint=_HINT) from cause
        _log.warning("%s; it runs without a CUDA graph", message)


class GraphProgram:
    """See `Program`; a call is padded to its bucket and replayed."""

    def __init__(
        self,
        program: Program,
        record: manifest.Program,
        recorder: Recorder,
        graphs: CudaGraphs,
    ) -> None:
        self._program = program
        self._record = record
        self._recorder = recorder
        self._graphs = graphs
        self._is_eager = False

    def run(
        self, inputs: list[torch.Tensor], states: list[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[torch.Tensor]:
        found = None if self._is_eager else bucket(self._record.signature, sizes)
        if found is None:
            return self._program.run(inputs, states, sizes)
        try:
            return self._graphs.run(self, inputs, states, sizes, found)
        except CaptureError as cause:
            self._graphs.refuse(self._record, cause)
            self._is_eager = True
            return self._program.run(inputs, states, sizes)

    def capture(
        self, inputs: list[torch.Tensor], states: list[torch.Tensor], found: Mapping[str, int]
    ) -> Captured:
        """The graph of a bucket, recorded on a call of it.

        Raises:
            CaptureError: it cannot be captured.
        """
        buffers = [
            torch.empty(
                resolve(spec.shape, found),
                dtype=torch_dtype(spec.dtype),
                device=self._graphs.device,
            )
            for spec in self._record.signature.inputs
        ]
        self._fill(buffers, inputs)
        try:
            recording = self._recorder.record(self._program, buffers, states, found)
        except RuntimeError as cause:
            raise CaptureError(*cause.args) from cause
        return Captured(recording, buffers)

    def replay(
        self,
        captured: Captured,
        inputs: list[torch.Tensor],
        states: list[torch.Tensor],
        sizes: Mapping[str, int],
        found: Mapping[str, int],
    ) -> list[torch.Tensor]:
        """New output tensors of a call of the sizes."""
        self._fill(captured.inputs, inputs)
        captured.recording.replay([*captured.inputs, *states])
        specs = self._record.signature.outputs
        outputs = zip(captured.recording.outputs, specs, strict=True)
        return [cut(output, spec.shape, found, sizes) for output, spec in outputs]

    def _fill(self, buffers: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        specs = self._record.signature.inputs
        for spec, buffer, tensor in zip(specs, buffers, inputs, strict=True):
            fill(buffer, tensor, padding(self._record.entry, spec))


def graphs_for(device: torch.device, is_wanted: bool | None) -> CudaGraphs | None:
    """The graphs of a new bundle; None where it runs eagerly.

    Args:
        device: where its programs run.
        is_wanted: True requires graphs, None uses them on a CUDA device where they can be had.

    Raises:
        InputError: graphs are asked for without a CUDA device.
    """
    if is_wanted not in (True, False, None):
        raise InputError(f"expected True, False or None, got {is_wanted!r}", where="cuda_graphs")
    if device.type != "cuda":
        if is_wanted:
            raise InputError(f"expected a CUDA device, got {device}", where="cuda_graphs")
        return None
    if is_wanted is False:
        return None
    return CudaGraphs(device, CudaRecorder(device), is_required=bool(is_wanted))
