"""What loading takes beside weights and states, as measured; and what nobody here can tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llama_artifacts.manifest import Format
from llama_export.footprint.figures import Figure

MIB = 2**20
BASE_BYTES: Mapping[Format, int] = {"pt2": 310 * MIB, "aoti": 232 * MIB, "onnx": 250 * MIB}
LAYER_BYTES: Mapping[Format, int] = {"pt2": 3 * MIB, "aoti": 0, "onnx": 0}
"""Resident memory of a Python 3.11 process with torch 2.13.0 (CPU) on Linux x86-64 after one program
was loaded and called, without weights, states and activations: networks of 2 and of 30 layers."""


def runtime_figure(format: Format, num_layers: int) -> Figure:
    """The process on the CPU: interpreter, libraries and one loaded program."""
    num_bytes = BASE_BYTES[format] + num_layers * LAYER_BYTES[format]
    how = "interpreter, libraries and the loaded program, as measured with torch 2.13 on Linux"
    return Figure("runtime", num_bytes, "estimated", how)


def unknown(format: Format, device: str, num_shards: int) -> Iterator[str]:
    """What needs memory too, and is in no figure."""
    if format == "onnx":
        yield "activations: ONNX Runtime plans memory of its own"
        yield "weights that ONNX Runtime casts or packs when it loads a program"
    if device == "cuda":
        yield "CUDA context, kernels and the workspaces of its libraries"
        yield "the process on the host"
    yield "memory that kernels take while they run"
    yield "what the allocator keeps or loses between blocks"
    if num_shards > 1:
        yield "buffers of the communication between shards"
