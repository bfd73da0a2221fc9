"""The bundle's weights file: plain safetensors in an order that programs can bind without copies."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import BuildError
from llama_export.checkpoint.fp8 import E4M3
from llama_export.checkpoint.layout import SCALE
from llama_export.checkpoint.source import Checkpoint, TensorInfo
from llama_export.model.llama import INV_FREQ
from llama_export.model.rope import inverse_frequencies
from llama_export.trace import torch_dtype

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Every tensor whose size is a multiple of this many bytes starts at a multiple of it."""

# Weights that a step reads together lie together, then their FP8 scales.
_LAYER_ORDER = (
    ("input_layernorm",),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("post_attention_layernorm",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
_PLACES = {
    module: (group, place)
    for group, modules in enumerate(_LAYER_ORDER)
    for place, module in enumerate(modules)
}
_MAX_F16 = 65504.0
_NAN_CODE = 0x7F
"""Of E4M3, without its sign."""


@dataclass(frozen=True)
class WeightsPlan:
    """Which tensors the file holds, in file order, and where.

    Attributes:
        tensors: dtype and shape by name, in file order.
        offsets: byte offset from the beginning of the file, and length, by name.
        header: the file's first bytes, up to the data.
        num_bytes: size of the whole file.
    """

    tensors: Mapping[str, TensorInfo]
    offsets: Mapping[str, tuple[int, int]]
    header: bytes
    num_bytes: int


def plan_weights(checkpoint: Checkpoint, *, compute: str, keeps_stored: bool) -> WeightsPlan:
    """Lays out the weights of a checkpoint.

    Args:
        checkpoint: opened by header.
        compute: the compute dtype, which quantised tensors take.
        keeps_stored: a tensor that is stored unquantised keeps its dtype; else all take `compute`.
            FP8 weights and their scales stay as they are in any case.
    """
    kept = ("f32", "f16", "bf16") if keeps_stored else ()
    tensors = {
        name: TensorInfo(
            info.dtype
            if info.dtype in kept or info.dtype == E4M3 or name.endswith(SCALE)
            else compute,
            info.shape,
        )
        for name, info in checkpoint.tensors.items()
    }
    tensors[INV_FREQ] = TensorInfo("f32", (checkpoint.config.head_dim // 2,))
    ordered = dict(sorted(tensors.items(), key=lambda item: _sort_key(*item)))
    sizes = {name: _num_bytes(info) for name, info in ordered.items()}
    header, start = _header(ordered, sizes)
    offsets, end = {}, start
    for name, size in sizes.items():
        offsets[name] = (end, size)
        end += size
    return WeightsPlan(ordered, offsets, header, end)


def write_weights(
    path: Path, plan: WeightsPlan, checkpoint: Checkpoint, *, advance: Callable[[int], None]
) -> None:
    """Writes the file, one tensor in memory at a time.

    Raises:
        BuildError: a value does not fit float16, or an FP8 weight holds NaN.
    """
    with path.open("xb") as file:
        file.write(plan.header)
        for name, info in plan.tensors.items():
            tensor = _value(checkpoint, name)
            converted = tensor.to(torch_dtype(info.dtype)).contiguous()
            if info.dtype == "f16" and tensor.dtype != converted.dtype:
                _check_f16(name, tensor)
            if info.dtype == E4M3:
                _check_codes(name, converted)
            file.write(converted.reshape(-1).view(torch_dtype("u8")).numpy().tobytes())
            advance(plan.offsets[name][1])


def _value(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    if name == INV_FREQ:
        return inverse_frequencies(checkpoint.config.rope, checkpoint.config.head_dim)
    return checkpoint.read(name)


def _check_f16(name: str, tensor: torch.Tensor) -> None:
    largest = float(tensor.abs().max())
    if not largest <= _MAX_F16:
        raise BuildError(
            f"`{name}` holds {largest:g}, float16 ends at {_MAX_F16:g}",
            hint="use --dtype bf16 or f32",
        )


def _check_codes(name: str, codes: torch.Tensor) -> None:
    """Refuses NaN, which compiled programs would take for the 480 that its code would stand for."""
    if int((codes.view(torch_dtype("u8")) & _NAN_CODE).max()) == _NAN_CODE:
        message = f"`{name}` holds NaN among its FP8 weights"
        raise BuildError(message, hint="quantise the checkpoint again, or get it again")


def _num_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * from_name(info.dtype).num_bytes


def _sort_key(name: str, info: TensorInfo) -> tuple[int, int, int, int, int, int, str]:
    # Odd sizes go last, the least divisible of all at the very end, so that the others stay aligned.
    size = _num_bytes(info)
    odd = 0 if size % ALIGNMENT == 0 else ALIGNMENT - (size & -size)
    parts = name.split(".")
    if parts[:2] != ["model", "layers"]:
        return (odd, 0 if "embed" in name else 2, 0, 0, 0, 0, name)
    group, place = _PLACES[".".join(parts[3:-1])]
    if parts[-1] == "bias":  # after all weights of the layer
        group += len(_LAYER_ORDER)
    return (odd, 1, int(parts[2]), group, int(name.endswith(SCALE)), place, name)


def _header(tensors: Mapping[str, TensorInfo], sizes: Mapping[str, int]) -> tuple[bytes, int]:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in tensors.items():
        table[name] = {
            "dtype": from_name(info.dtype).safetensors,
            "shape": list(info.shape),
            "data_offsets": [end, end + sizes[name]],
        }
        end += sizes[name]
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, len(header)
