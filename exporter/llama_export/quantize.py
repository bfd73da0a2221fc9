"""Rounds weights to small integers: which tensors, how they are stored, and their values.

A group of a row at a time. Symmetric, as GGUF's Q8_0 and Q4_0: of eight bits, the largest
magnitude of a group becomes 127 or -127; of four, the value of the largest magnitude becomes -8,
or nearly so: of the scales that make it `_PEAKS`, the one with the least squared error is taken.
Asymmetric, as Q4_1: 0 is the minimum of a group and 15 its maximum, or both are drawn in to one of
`_SPANS` of their distance, whichever has the least squared error. Scales and minima are bf16, and
codes are rounded with them as they are stored. The embedding and the output
head are int8 in any case: there, four bits raise perplexity and eight do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from llama_artifacts.errors import ChoiceError
from llama_artifacts.manifest import IntegerKind, Quantized
from llama_export.checkpoint.layout import BLOCK, EIGHT_BITS, EMBEDDING, HEAD, PACKED, Codes
from llama_export.checkpoint.source import TensorInfo
from llama_export.model.integers import OFFSET, pack
from llama_export.recipe import Quantize

DEFAULT_GROUP_SIZES: dict[IntegerKind, int | None] = {"int8": 64, "int4": 32, "uint4": 32}
"""Values that share a scale where nothing else is asked for."""

_LARGEST = 127
_PEAKS = (-8.0, -7.5, -7.0, -8.5, -9.0)
_SPANS = (1.0, 0.95, 0.9, 0.85)
_MOST = 15
"""The largest code beside a minimum."""
_CHUNK_VALUES = 1 << 24
"""How many values are rounded at a time, which bounds memory beside the tensor."""


def choose(
    kind: Quantize | None,
    group_size: str | None,
    *,
    is_fp8: bool = False,
    is_packed: bool = False,
) -> Quantized | None:
    """What the options `--quantize` and `--group-size` ask to make; None: nothing.

    Raises:
        ChoiceError: they contradict each other, or the weights are FP8 or integers.
    """
    if kind is None or kind == "stored":
        if group_size is not None:
            message = f"--group-size {group_size} is for --quantize int8, int4 and uint4"
            raise ChoiceError(message, hint="use --quantize int8")
        return None
    if is_fp8 or is_packed:
        found = "FP8" if is_fp8 else "integers already"
        raise ChoiceError(
            f"--quantize {kind} is for unquantised weights, and the checkpoint's are {found}",
            hint="leave --quantize out, or take the unquantised checkpoint of the same model",
        )
    if group_size is None:
        return Quantized(kind, DEFAULT_GROUP_SIZES[kind])
    return Quantized(kind, None if group_size == "row" else int(group_size))


def quantized_tensors(
    tensors: Mapping[str, TensorInfo], quantized: Quantized
) -> dict[str, TensorInfo]:
    """The tensors with every matrix as codes and scales.

    Raises:
        ChoiceError: a matrix has a width that the groups, or blocks of codes, do not divide.
    """
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        codes = codes_of(name, info, quantized)
        if codes is None:
            found[name] = info
            continue
        _check_width(name, info, codes)
        found |= codes.tensors(name.removesuffix(".weight"), info.shape)
    return found


def codes_of(name: str, info: TensorInfo, quantized: Quantized) -> Codes | None:
    """How a tensor is stored as codes; None for those that stay as they are."""
    if len(info.shape) != 2:
        return None
    if quantized.kind == "int8" or name in (EMBEDDING, HEAD):
        return Codes(EIGHT_BITS, quantized.group_size)
    return Codes(PACKED, quantized.group_size, has_min=quantized.kind == "uint4")


def quantize(weight: Tensor, codes: Codes) -> tuple[Tensor, ...]:
    """Codes and their factors, bf16, of a weight [V, H].

    Returns:
        int8 [V, H], or uint8 [V, H / 2] for four bits; scales [V, G] for G groups of a row; and
        minima [V, G], where the codes have them.
    """
    num_rows = max(1, _CHUNK_VALUES // weight.shape[1])
    parts = [_quantize_rows(rows.float(), codes) for rows in weight.split(num_rows)]
    return tuple(torch.cat(of_all) for of_all in zip(*parts, strict=True))


def _quantize_rows(rows: Tensor, codes: Codes) -> tuple[Tensor, ...]:
    groups = rows.unflatten(-1, (-1, codes.group_size or rows.shape[-1]))
    if codes.has_min:
        scale, least = _four_bit_span(groups)
        values = _rounded(groups - least.float(), scale, 0, _MOST)
        return pack(values.flatten(-2), 0), scale[..., 0], least[..., 0]
    if codes.dtype == PACKED:
        scale = _four_bit_scale(groups)
        return pack(_rounded(groups, scale, -OFFSET, OFFSET - 1).flatten(-2)), scale[..., 0]
    scale = (groups.abs().amax(-1, keepdim=True) / _LARGEST).bfloat16()
    return _rounded(groups, scale, -_LARGEST, _LARGEST).flatten(-2).to(torch.int8), scale[..., 0]


def _four_bit_scale(groups: Tensor) -> Tensor:
    """Scales [..., 1], bf16."""
    peak = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    nothing = torch.zeros_like(peak, dtype=torch.bfloat16)
    tried = [((peak / target).bfloat16(), nothing) for target in _PEAKS]
    return _best(groups, tried, -OFFSET, OFFSET - 1)[0]


def _four_bit_span(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [..., 1], bf16."""
    least, most = groups.aminmax(dim=-1, keepdim=True)
    middle, half = (least + most) / 2, (most - least) / 2
    minima = [(middle - span * half).bfloat16() for span in _SPANS]
    tops = [middle + span * half for span in _SPANS]
    pairs = zip(minima, tops, strict=True)
    tried = [(((top - minimum.float()) / _MOST).bfloat16(), minimum) for minimum, top in pairs]
    return _best(groups, tried, 0, _MOST)


def _best(
    groups: Tensor, tried: Sequence[tuple[Tensor, Tensor]], least: int, most: int
) -> tuple[Tensor, Tensor]:
    """Of scales and minima, each group's with the least squared error; the first of equal ones."""
    errors = []
    for scale, minimum in tried:
        above = groups - minimum.float()
        codes = _rounded(above, scale, least, most)
        errors.append((above - codes * scale.float()).square().sum(-1, keepdim=True))
    best = torch.cat(errors, dim=-1).argmin(-1, keepdim=True)
    scales, minima = (
        torch.cat(parts, dim=-1).gather(-1, best) for parts in zip(*tried, strict=True)
    )
    return scales, minima


def _rounded(groups: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    """Codes as float32."""
    divisor = torch.where(scale == 0, 1, scale.float())  # a group of zeros
    return (groups / divisor).round().clamp(least, most)


def _check_width(name: str, info: TensorInfo, codes: Codes) -> None:
    width = info.shape[1]
    if codes.group_size is not None and width % codes.group_size:
        raise ChoiceError(
            f"expected widths that groups of {codes.group_size} divide, got {width} of `{name}`",
            hint="choose another --group-size; `row` fits every width",
        )
    if codes.dtype == PACKED and width % BLOCK:
        raise ChoiceError(
            f"expected widths that blocks of {BLOCK} values divide, got {width} of `{name}`",
            hint="use --quantize int8 --group-size row",
        )
