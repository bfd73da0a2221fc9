"""ONNX programs in ONNX Runtime, with every tensor bound to memory of ours.

A state is bound as input `state.<name>` and as output `state.<name>.next` to the same buffer, so
the graph's scatter happens in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnxruntime
import torch

from llama_artifacts.dtypes import DType, from_name, from_torch
from llama_artifacts.errors import CompatibilityError, IntegrityError
from llama_artifacts.signature import StateSpec, TensorSpec, resolve
from llama_runtime.programs.base import Loading
from llama_runtime.states import torch_dtype

_NO_GRAPH = -1


class OnnxProgram:
    """See `Program`."""

    def __init__(self, loading: Loading) -> None:
        self._signature = loading.program.signature
        self._device = loading.device
        self._num_graphs = 0
        weights = loading.constants()  # all there
        # ONNX Runtime finds them by their place in a file beside the program, or is given them.
        self._given = {} if loading.is_whole else {n: t.cpu() for n, t in weights.items()}
        self._session = _session(loading, self._given)
        self._check_interface(loading)
        self._binding = self._session.io_binding()
        self._bound_states: list[torch.Tensor] = []
        self._eager = _numbered(_NO_GRAPH) if loading.uses_graphs else None

    def run(
        self, inputs: list[torch.Tensor], states: list[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[torch.Tensor]:
        outputs = self._bind_call(self._binding, inputs, sizes)
        if len(states) != len(self._bound_states) or not all(map(_is, states, self._bound_states)):
            self._bind_states(self._binding, states)
            # Keeps the buffers alive for as long as they are bound.
            self._bound_states = list(states)
        self._run(self._binding, self._eager)
        return outputs

    def record(
        self, inputs: list[torch.Tensor], states: list[torch.Tensor], sizes: Mapping[str, int]
    ) -> OnnxRecording:
        """The call as a CUDA graph of ONNX Runtime's, captured on its first replay, which is now.

        Raises:
            RuntimeError: ONNX Runtime cannot capture it.
        """
        binding = self._session.io_binding()
        outputs = self._bind_call(binding, inputs, sizes)
        self._bind_states(binding, states)
        options = _numbered(self._num_graphs)
        self._num_graphs += 1
        recording = OnnxRecording(outputs, partial(self._run, binding, options))
        try:
            recording.replay([*inputs, *states])
        except Exception as cause:  # onnxruntime's own types derive from Exception alone
            raise RuntimeError(*cause.args) from cause
        return recording

    def _run(self, binding: Any, options: onnxruntime.RunOptions | None) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._session.run_with_iobinding(binding, options)

    def _bind_call(
        self, binding: Any, inputs: list[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[torch.Tensor]:
        """Binds the inputs and new outputs, which are returned."""
        for spec, tensor in zip(self._signature.inputs, inputs, strict=True):
            self._bind(binding.bind_input, spec.name, spec.dtype, tensor)
        outputs = [self._new(spec, sizes) for spec in self._signature.outputs]
        for spec, tensor in zip(self._signature.outputs, outputs, strict=True):
            self._bind(binding.bind_output, spec.name, spec.dtype, tensor)
        return outputs

    def _bind_states(self, binding: Any, states: list[torch.Tensor]) -> None:
        for spec, tensor in zip(self._signature.states, states, strict=True):
            name = f"state.{spec.name}"
            self._bind(binding.bind_input, name, spec.dtype, tensor)
            self._bind(binding.bind_output, f"{name}.next", spec.dtype, tensor)

    def _bind(self, bind: Any, name: str, dtype: str, tensor: torch.Tensor) -> None:
        index = tensor.device.index or 0
        shape = list(tensor.shape)
        bind(name, tensor.device.type, index, _element_type(dtype), shape, tensor.data_ptr())

    def _new(self, spec: TensorSpec, sizes: Mapping[str, int]) -> torch.Tensor:
        shape = resolve(spec.shape, sizes)
        return torch.empty(shape, dtype=torch_dtype(spec.dtype), device=self._device)

    def _check_interface(self, loading: Loading) -> None:
        """ONNX Runtime believes what a buffer is bound as, so the model must say the same."""
        inputs, outputs = self._signature.inputs, self._signature.outputs
        states = self._signature.states
        expected = [_described(spec.name, spec) for spec in inputs]
        expected += [_described(f"state.{spec.name}", spec) for spec in states]
        expected += [_described(spec.name, spec) for spec in outputs]
        expected += [_described(f"state.{spec.name}.next", spec) for spec in states]
        values = [*self._session.get_inputs(), *self._session.get_outputs()]
        found = [(value.name, value.type, tuple(value.shape)) for value in values]
        if found != expected:
            odd = next(
                (
                    name
                    for (name, *_), other in zip(found, expected, strict=False)
                    if other[0] != name
                ),
                "their dtypes or shapes differ",
            )
            raise IntegrityError(
                f"its inputs and outputs are not the manifest's: {odd}", where=loading.path
            )


@dataclass(frozen=True)
class OnnxRecording:
    """See `llama_runtime.cuda_graphs.Recording`."""

    outputs: list[torch.Tensor]
    launch: Callable[[], None]

    def replay(self, buffers: Sequence[torch.Tensor]) -> None:
        self.launch()


def _numbered(number: int) -> onnxruntime.RunOptions:
    """Options of a run that captures or replays the graph of that number."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options


def _described(name: str, spec: TensorSpec | StateSpec) -> tuple[str, str, tuple[int | str, ...]]:
    return name, f"tensor({from_name(spec.dtype).onnx.lower()})", spec.shape


def _is(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first is second


def _element_type(dtype: str) -> Any:
    row = from_name(dtype)
    if row.numpy is not None:
        return np.dtype(row.numpy).type
    return _number(row)


def _number(row: DType) -> int:
    """ONNX's own number of a dtype."""
    from onnx import TensorProto

    return TensorProto.DataType.Value(row.onnx)


def _value(tensor: torch.Tensor) -> onnxruntime.OrtValue:
    """A tensor of the CPU as ONNX Runtime takes it: in the same memory, which must outlive it."""
    row = from_torch(tensor.dtype)
    codes = tensor.view(torch_dtype(f"i{8 * row.num_bytes}")).numpy()
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(codes, _number(row))


def _session(loading: Loading, given: Mapping[str, torch.Tensor]) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if loading.threads is not None:
        options.intra_op_num_threads = loading.threads
    if given:
        options.add_external_initializers(list(given), [_value(t) for t in given.values()])
    providers: list[Any] = ["CPUExecutionProvider"]
    if loading.device.type == "cuda":
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise CompatibilityError(
                "this onnxruntime has no CUDA provider",
                where=loading.path,
                hint="pip install onnxruntime-gpu",
            )
        settings = {"device_id": loading.device.index or 0}
        if loading.uses_graphs:
            settings["enable_cuda_graph"] = 1
        providers = [("CUDAExecutionProvider", settings)]
    try:
        return onnxruntime.InferenceSession(str(loading.path), options, providers=providers)
    except Exception as cause:  # onnxruntime's own types derive from Exception alone
        message = str(cause).splitlines()[0]
        raise IntegrityError(
            f"ONNX Runtime refuses it: {message}", where=loading.path, hint="build the bundle again"
        ) from cause
