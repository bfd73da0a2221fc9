"""Holds the FP8 tensors of a checkpoint against the scheme that its config.json declares.

The dtype in the file is the truth; where it is not what the scheme says, nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from llama_artifacts.errors import CheckpointError
from llama_export.checkpoint.config import LlamaConfig
from llama_export.checkpoint.layout import E4M3, SCALE, linear_shapes
from llama_export.checkpoint.schemes import Fp8Scheme
from llama_export.checkpoint.source import TensorInfo

E5M2 = "f8e5m2"
SCALE_DTYPES = ("bf16", "f32")
INPUT_SCALE = ".input_scale"


def check_fp8(
    scheme: Fp8Scheme | None,
    config: LlamaConfig,
    tensors: Mapping[str, TensorInfo],
    *,
    where: object,
) -> frozenset[str]:
    """The names of the linear layers that are stored as FP8.

    Weights that are missing or of another shape are left to `check_layout`.

    Raises:
        CheckpointError: names the tensor whose dtype, scale or place is not what the scheme says.
    """
    _refuse_by_dtype(scheme, tensors, where=where)
    modules = set()
    for module, shape in linear_shapes(config).items():
        weight = tensors.get(f"{module}.weight")
        if weight is not None and _is_fp8(scheme, module, weight, where=where):
            _check_scale(f"{module}{SCALE}", tensors, shape, where=where)
            modules.add(module)
    _refuse_elsewhere(modules, tensors, where=where)
    return frozenset(modules)


def with_row_scales(
    config: LlamaConfig, tensors: Mapping[str, TensorInfo], modules: Collection[str]
) -> dict[str, TensorInfo]:
    """The tensors with every scale as one number for each row, [out, 1]."""
    linears = linear_shapes(config)
    shapes = {f"{name}{SCALE}": (linears[name][0], 1) for name in modules}
    return {
        name: TensorInfo(info.dtype, shapes.get(name, info.shape)) for name, info in tensors.items()
    }


def _refuse_by_dtype(
    scheme: Fp8Scheme | None, tensors: Mapping[str, TensorInfo], *, where: object
) -> None:
    for name, info in tensors.items():
        if info.dtype == E5M2:
            message = "dtype f8e5m2 (E5M2) is not supported; of FP8 only f8e4m3 (E4M3) is"
            raise _error(name, message, where)
        if name.endswith(INPUT_SCALE):
            raise _error(name, "a static scale of activations is not supported", where)
        if scheme is None and info.dtype == E4M3:
            message = "stored as f8e4m3, but config.json has no quantization_config"
            raise _error(name, message, where)


def _is_fp8(scheme: Fp8Scheme | None, module: str, weight: TensorInfo, *, where: object) -> bool:
    is_covered = scheme is not None and scheme.covers(module)
    is_stored = weight.dtype == E4M3
    if is_covered == is_stored:
        return is_stored
    said = "targets it: expected f8e4m3" if is_covered else "ignores it: expected no FP8"
    message = f"stored as {weight.dtype}, but quantization_config {said}"
    raise _error(f"{module}.weight", message, where)


def _check_scale(
    name: str, tensors: Mapping[str, TensorInfo], shape: tuple[int, ...], *, where: object
) -> None:
    scale = tensors.get(name)
    if scale is None:
        raise _error(name, "missing, but its weight is FP8", where)
    if scale.dtype not in SCALE_DTYPES:
        message = f"expected dtype {' or '.join(SCALE_DTYPES)}, got {scale.dtype}"
        raise _error(name, message, where)
    if math.prod(scale.shape) not in (1, shape[0]):
        message = f"shape {list(scale.shape)} is neither one scale nor one for each row of"
        raise _error(name, f"{message} a weight of shape {list(shape)}", where)


def _refuse_elsewhere(
    modules: Collection[str], tensors: Mapping[str, TensorInfo], *, where: object
) -> None:
    for name, info in tensors.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) not in modules:
            raise _error(name, "unexpected: there is no FP8 weight that it belongs to", where)
        if info.dtype == E4M3 and name.removesuffix(".weight") not in modules:
            raise _error(name, "stored as f8e4m3, but only linear layers can be FP8", where)


def _error(name: str, message: str, where: object) -> CheckpointError:
    return CheckpointError(message, where=f"{where}#{name}")
