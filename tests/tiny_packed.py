"""Writes tiny checkpoints of integers packed into int32, and decodes them one value at a time.

It knows nothing of the code under test. GPTQ packs rows of [in, out], AWQ columns of it in an order
of its own, compressed-tensors columns of [out, in].
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.tiny import tiny_config, tiny_tensors, write_tokenizer, write_weights
from tests.tiny_fp8 import LINEARS

Array = np.ndarray[Any, Any]
Change = Callable[[dict[str, torch.Tensor]], object]
Q0, O0, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "lm_head"
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns lies in the i-th four bits."""
GROUP_SIZE = 32
FORMS = ("gptq", "gptq_v2", "awq", "pack-quantized")


def scheme(
    form: str,
    *,
    bits: int = 4,
    group_size: int = GROUP_SIZE,
    is_symmetric: bool = False,
    is_ordered: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """A `quantization_config`, with some values changed."""
    if form == "pack-quantized":
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": is_symmetric,
            "strategy": "channel" if group_size == -1 else "group",
            "group_size": None if group_size == -1 else group_size,
            "dynamic": False,
            "actorder": "group" if is_ordered else None,
            "observer": "minmax",
        }
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
            **changes,
        }
    common = {"bits": bits, "group_size": group_size}
    if form == "awq":
        kept = {"zero_point": not is_symmetric, "version": "gemm", "modules_to_not_convert": None}
        return {"quant_method": "awq", **common, **kept, **changes}
    found = {"desc_act": is_ordered, "sym": is_symmetric, "lm_head": False, "damp_percent": 0.01}
    return {"quant_method": "gptq", "checkpoint_format": form, **common, **found, **changes}


def write_tiny_packed(
    folder: Path,
    form: str = "gptq",
    *,
    bits: int = 4,
    group_size: int = GROUP_SIZE,
    is_symmetric: bool = False,
    is_ordered: bool = False,
    order_seed: Callable[[str], str] = lambda module: _input_of(module),
    is_packed: Callable[[str], bool] = lambda module: module != "lm_head",
    scale_dtype: torch.dtype = torch.float16,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None,
    quantization: dict[str, Any] | None = None,
    has_tokenizer: bool = False,
    **config: Any,
) -> Path:
    """Writes a checkpoint folder and returns it.

    Args:
        folder: made if it is not there.
        form: one of `FORMS`.
        bits: of a code.
        group_size: -1 for whole rows.
        is_symmetric: zeros are half of the range.
        is_ordered: groups are of columns drawn at random.
        order_seed: modules for which it is equal have the same groups.
        is_packed: which linear layers are, by name.
        scale_dtype: of scales.
        change: what to do with the tensors before they are written.
        quantization: keys of the `quantization_config` to change.
        has_tokenizer: also write a tokenizer.
        config: keys of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said: dict[str, Any] = {
        "bits": bits,
        "group_size": group_size,
        "is_symmetric": is_symmetric,
        "is_ordered": is_ordered,
    }
    values = tiny_config(
        **{"torch_dtype": "float16", **config},
        quantization_config=scheme(form, **{**said, **(quantization or {})}),
    )
    (folder / "config.json").write_text(json.dumps(values))
    tensors = tiny_tensors(values, dtype=torch.float16)
    for name in list(tensors):
        module = name.removesuffix(".weight")
        if LINEARS.fullmatch(name) and is_packed(module):
            weight = tensors.pop(name).double().numpy()
            size = weight.shape[1] if group_size == -1 else group_size
            groups = _groups(weight.shape[1], size, order_seed(module) if is_ordered else None)
            parts = _quantised(weight, groups, bits, is_symmetric, scale_dtype)
            stored = _stored(form, *parts, groups, bits, is_symmetric, is_ordered)
            tensors |= {f"{module}.{part}": tensor for part, tensor in stored.items()}
    change(tensors)
    write_weights(folder, {name: tensor.contiguous() for name, tensor in tensors.items()})
    if has_tokenizer:
        write_tokenizer(folder, values["vocab_size"])
    return folder


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors in float32, packed weights as (code - zero) * scale."""
    scheme = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name, tensor in tensors.items():
        module, part = name.rsplit(".", 1)
        if part in ("qweight", "weight_packed"):
            found[f"{module}.weight"] = _decoded(module, tensors, scheme)
        elif part in ("weight", "bias"):
            found[name] = tensor.float()
    return found


def _input_of(module: str) -> str:
    """Modules with the same input have the same activations, and so the same order."""
    layer, name = module.rsplit(".", 1)
    return layer + ("o" if name == "o_proj" else "d" if name == "down_proj" else "")


def _groups(width: int, size: int, seed: str | None) -> Array:
    """The group of each column."""
    groups = np.arange(width) // size
    if seed is not None:
        np.random.default_rng(list(seed.encode())).shuffle(groups)
    return groups


def _quantised(
    weight: Array, groups: Array, bits: int, is_symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Array, Array, torch.Tensor]:
    """Codes [V, H] and zeros [V, G], both from 0 up, and scales [V, G]."""
    most, num_groups = (1 << bits) - 1, int(groups.max()) + 1
    half = (most + 1) // 2
    parts = [weight[:, groups == group] for group in range(num_groups)]
    low = np.stack([part.min(1) for part in parts], 1)
    high = np.stack([part.max(1) for part in parts], 1)
    span = 2 * np.maximum(-low, high) if is_symmetric else high - low
    scales = torch.tensor(span / most).to(scale_dtype)
    wide = scales.double().numpy()
    zeros = np.full_like(wide, half) if is_symmetric else np.round(-low / wide).clip(1, most)
    codes = np.round(weight / wide[:, groups]) + zeros[:, groups]
    return codes.clip(0, most).astype(np.int64), zeros.astype(np.int64), scales


def _stored(
    form: str,
    codes: Array,
    zeros: Array,
    scales: torch.Tensor,
    groups: Array,
    bits: int,
    is_symmetric: bool,
    is_ordered: bool,
) -> dict[str, torch.Tensor]:
    """The tensors of one weight, by the end of their names."""
    if form == "pack-quantized":
        found = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(codes.shape),
        }
        if not is_symmetric:
            found["weight_zero_point"] = packed(zeros.T, bits).T
        if is_ordered:
            found["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
        return found
    if form == "awq":
        places = np.concatenate([8 * i + np.array(AWQ_COLUMNS) for i in range(len(codes) // 8)])
        return {
            "qweight": packed(codes.T[:, places], bits),
            "qzeros": packed(zeros.T[:, places], bits),
            "scales": scales.T,
        }
    return {
        "qweight": packed(codes, bits).T,
        "qzeros": packed((zeros - (form == "gptq")).T, bits),
        "scales": scales.T,
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }


def packed(values: Array, bits: int) -> torch.Tensor:
    """Int32 of adjacent columns, the first in the lowest bits; a rest is filled with zeros."""
    count = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % count)))
    words = np.zeros((len(padded), padded.shape[1] // count), dtype=np.uint32)
    for place in range(count):
        words |= (padded[:, place::count] << (bits * place)).astype(np.uint32)
    return torch.tensor(words.view(np.int32))


def _decoded(module: str, tensors: dict[str, torch.Tensor], scheme: dict[str, Any]) -> torch.Tensor:
    """One value after the other, from the definitions of the forms."""
    method = scheme["quant_method"]
    part = {
        name.rsplit(".", 1)[1]: t for name, t in tensors.items() if name.startswith(module + ".")
    }
    if method == "compressed-tensors":
        weights = scheme["config_groups"]["group_0"]["weights"]
        bits, size = weights["num_bits"], weights["group_size"]
        num_out, width = part["weight_shape"].tolist()
    else:
        bits, size = scheme["bits"], scheme["group_size"]
        num_out = part["scales"].shape[1]
        width = len(part["qweight"]) * (1 if method == "awq" else 32 // bits)
    size = width if size in (None, -1) else size
    count, mask = 32 // bits, (1 << bits) - 1
    words = {
        name: (t.numpy().view(np.uint32).tolist() if t.dtype == torch.int32 else None)
        for name, t in part.items()
    }
    indices = part.get("g_idx", part.get("weight_g_idx"))
    groups = [column // size for column in range(width)] if indices is None else indices.tolist()
    scales = (part["weight_scale"] if method == "compressed-tensors" else part["scales"].T).float()
    rows = scales.tolist()
    found = torch.empty(num_out, width)
    for i in range(num_out):
        values = []
        for j, group in enumerate(groups):
            if method == "compressed-tensors":
                code = words["weight_packed"][i][j // count] >> bits * (j % count) & mask
                zero = 1 << (bits - 1)
                if "weight_zero_point" in words:
                    word = words["weight_zero_point"][i // count][group]
                    zero = word >> bits * (i % count) & mask
            elif method == "awq":
                shift = bits * AWQ_COLUMNS.index(i % 8)
                code = words["qweight"][j][i // 8] >> shift & mask
                zero = words["qzeros"][group][i // 8] >> shift & mask
            else:
                code = words["qweight"][j // count][i] >> bits * (j % count) & mask
                zero = words["qzeros"][group][i // count] >> bits * (i % count) & mask
                zero += scheme["checkpoint_format"] == "gptq"
            values.append((code - zero) * rows[i][group])
        found[i] = torch.tensor(values, dtype=torch.float64).float()
    return found


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})
