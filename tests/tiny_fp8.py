"""Writes a tiny FP8 checkpoint as compressed-tensors stores one, and decodes it in plain torch.

It knows nothing of the code under test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tiny import tiny_config, tiny_tensors, write_tokenizer, write_weights

WEIGHTS: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
    "group_size": None,
    "observer": "minmax",
}
ACTIVATIONS: dict[str, Any] = {**WEIGHTS, "strategy": "token", "dynamic": True, "observer": None}
LINEARS = re.compile(r"(model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj|lm_head)\.weight")
LARGEST = 448.0


def scheme(
    ignore: Collection[str] = ("lm_head",),
    *,
    weights: dict[str, Any] | None = None,
    activations: dict[str, Any] | None = ACTIVATIONS,
    group: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A `quantization_config`, with some values changed."""
    members = {
        "targets": ["Linear"],
        "weights": {**WEIGHTS, **(weights or {})},
        "input_activations": activations,
        "output_activations": None,
        **(group or {}),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": 1.2,
        "config_groups": {"FP8_DYNAMIC": members},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        **changes,
    }


def quantize(
    weight: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16, per_row: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [out, in] that reach the largest, scales [out, 1] or [1]; the rows differ by 4."""
    weight = weight.float() * torch.linspace(0.25, 1, len(weight))[:, None]
    largest = weight.abs().amax(1, keepdim=True) if per_row else weight.abs().max().reshape(1)
    scale = (largest / LARGEST).to(dtype)
    codes = (weight / scale.float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes, scale


def write_tiny_fp8(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    scale_dtype: torch.dtype = torch.bfloat16,
    per_row: bool = True,
    is_fp8: Callable[[str], bool] = lambda module: module != "lm_head",
    change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None,
    quantization: dict[str, Any] | None = None,
    has_tokenizer: bool = False,
    **config: Any,
) -> Path:
    """Writes a checkpoint folder and returns it.

    Args:
        folder: made if it is not there.
        dtype: of what is not FP8.
        scale_dtype: of the scales.
        per_row: a scale for each row [out, 1], or one for the tensor [1].
        is_fp8: which linear layers are stored as FP8, by name.
        change: what to do with the tensors before they are written.
        quantization: the `quantization_config`; None: `scheme()`.
        has_tokenizer: also write a tokenizer.
        config: keys of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"torch_dtype": str(dtype).removeprefix("torch."), **config}
    values = tiny_config(**config, quantization_config=quantization or scheme())
    (folder / "config.json").write_text(json.dumps(values))
    tensors = tiny_tensors(values, dtype=dtype)
    for name in list(tensors):
        module = name.removesuffix(".weight")
        if LINEARS.fullmatch(name) and is_fp8(module):
            codes, scale = quantize(tensors[name], dtype=scale_dtype, per_row=per_row)
            tensors |= {name: codes, f"{module}.weight_scale": scale}
    change(tensors)
    write_weights(folder, tensors)
    if has_tokenizer:
        write_tokenizer(folder, values["vocab_size"])
    return folder


def decoded(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, FP8 weights as code times scale, rounded once to the dtype."""
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("weight_scale"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            scale = tensors[f"{name}_scale"].float().reshape(-1, 1)
            tensor = tensor.float() * scale
        found[name] = tensor.to(dtype)
    return found
