"""A bundle's integer codes in a model of onnxruntime-genai's builder, in place of its own rounding.

An operator MatMulNBits holds blocks of codes [V, G, bytes of a block], a float32 scale each [V, G], and
no zero points: codes are unsigned around 8 or 128. Of four bits, a byte holds two neighbours, the first
in its low half.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from llama_artifacts.bundle import Bundle
from llama_artifacts.weights import stored_tensors
from llama_export.checkpoint.layout import (
    EMBEDDING,
    HEAD,
    SCALE,
    Codes,
    coded_modules,
    matrix_shapes,
)
from llama_export.checkpoint.source import TensorInfo
from llama_export.laws.oracle import model_config
from llama_export.model.integers import unpack

OPERATOR = "MatMulNBits"
BLOCK_SIZES = (16, 32, 64, 128, 256)
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
"""Modules whose rows the builder puts into one operator."""

Array = np.ndarray[Any, np.dtype[Any]]


def replace_codes(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Puts the codes and scales of a bundle into a model, and writes it anew.

    Args:
        path: the model; its data are in a file beside it.
        weights: of the bundle, by name.
    """
    model = onnx.load(path)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != OPERATOR:
            continue
        _, codes_name, scales_name = node.input
        parts = [blocks(weights, module) for module in _modules(codes_name, weights)]
        codes, scales = (np.concatenate(of_all) for of_all in zip(*parts, strict=True))
        attributes = {attribute.name: attribute for attribute in node.attribute}
        attributes["block_size"].i = attributes["K"].i // scales.shape[1]
        attributes["bits"].i = 8 * codes.shape[2] // attributes["block_size"].i
        for name, array in ((codes_name, codes), (scales_name, scales)):
            tensors[name].CopyFrom(onnx.numpy_helper.from_array(array, name))
    data = path.with_name(f"{path.name}.data")
    data.unlink()
    onnx.save_model(model, path, save_as_external_data=True, location=data.name)


def blocks(weights: Mapping[str, torch.Tensor], module: str) -> tuple[Array, Array]:
    """Codes, uint8 [V, G, bytes of a block], and scales, float32 [V, G], of a module."""
    codes, scales = weights[f"{module}.weight"], weights[f"{module}{SCALE}"]
    offset = 128 if codes.dtype == torch.int8 else 8
    values = (unpack(codes) + offset).to(torch.uint8).unflatten(1, (scales.shape[1], -1))
    if codes.dtype != torch.int8:
        values = values[..., ::2] | values[..., 1::2] << 4
    return values.numpy(), scales.float().numpy()


def has_codes(bundle: Bundle) -> bool:
    """Whether the operator can hold all matrices of a bundle as they are.

    Only the bundle's own files are looked at.
    """
    stored = stored_tensors(bundle).items()
    coded = coded_modules({name: TensorInfo(t.dtype, t.shape) for name, (_, t) in stored})
    modules = matrix_shapes(model_config(bundle.manifest))
    return all(module in coded and is_held(coded[module]) for module in modules)


def is_held(codes: Codes) -> bool:
    """Whether the operator has such codes."""
    is_plain = not (codes.is_fp8 or codes.has_min or codes.has_order)
    return is_plain and codes.group_size in BLOCK_SIZES


def _modules(name: str, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """The bundle's modules in an operator, by the name of its codes."""
    module = name.partition(".MatMul.")[0].replace(".attn.", ".self_attn.")
    if module == HEAD.removesuffix(".weight") and HEAD not in weights:
        module = EMBEDDING.removesuffix(".weight")
    parent, _, last = module.rpartition(".")
    return [f"{parent}.{part}" for part in _JOINED[last]] if last in _JOINED else [module]
