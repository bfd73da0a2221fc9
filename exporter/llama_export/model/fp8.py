"""Products with FP8 weights: E4M3 codes [out, in] and a scale for each row, [out, 1] in bf16 or f32.

`exact`: a weight is code times scale in float32, rounded once to the compute dtype, and then as any
other weight. `fast` saves work: the scale is applied after the sum, and where the device multiplies
FP8 by FP8, activations are rounded to E4M3, too, each row by a scale of its own.

Shape letters: M rows, H in, V out; `...` the axes of a call's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from llama_artifacts.manifest import Numerics
from llama_export.model.formulation import Formulation
from llama_export.model.stored import stored

LARGEST = 448.0
"""Of E4M3."""
MAX_FUSED_ROWS = 3
"""Of x, of which a product is written as multiply and reduce where a compiler fuses that."""
UNIT_MULTIPLE = 16
"""FP8 units take matrices whose sides are multiples of this."""

_HALF_OF_GAP = 2.0**119
_MAGNITUDE_AND_SIGN = -0x78000001
_BF16_BITS = 16


def linear(
    x: Tensor,
    codes_VH: Tensor,
    scale_V1: Tensor,
    bias: Tensor | None,
    *,
    form: Formulation,
) -> Tensor:
    """A linear layer [..., H] -> [..., V] in x's dtype."""
    num_rows = math.prod(x.shape[:-1])
    if form.is_fused and isinstance(num_rows, int) and num_rows <= MAX_FUSED_ROWS:
        y = fused_product(x, codes_VH, scale_V1, form.numerics)
    elif form.numerics == "fast" and form.has_fp8_units and fits_units(codes_VH.shape):
        y = unit_product(x, codes_VH, scale_V1)
    else:
        weight = decode(codes_VH, scale_V1, x.dtype)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    return (y if bias is None else y + bias.float()).to(x.dtype)


def decode(codes_VH: Tensor, scale_V1: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as it would be stored in the compute dtype."""
    return (codes_VH.float() * scale_V1.float()).to(dtype)


def fused_product(x: Tensor, codes_VH: Tensor, scale_V1: Tensor, numerics: Numerics) -> Tensor:
    """X [..., H] times the weight, float32 [..., V], as multiply and reduce over the bytes."""
    # Twice x times half the weight: a new tensor in any case, as `stored` needs it.
    twice_x, scale = stored(x.float() * 2)[..., None, :], stored(scale_V1.float())
    if numerics == "fast":
        return (twice_x * _half(codes_VH)).sum(-1) * scale[:, 0]
    return (twice_x * _rounded(_half(codes_VH) * scale, x.dtype)).sum(-1)


def fits_units(shape: Sequence[int]) -> bool:
    """Whether FP8 units take a weight of this shape."""
    return all(size % UNIT_MULTIPLE == 0 for size in shape)


def unit_product(x: Tensor, codes_VH: Tensor, scale_V1: Tensor) -> Tensor:
    """X [..., H] times the weight, float32 [..., V], on the device's FP8 units.

    The result is rounded to bf16, the only dtype that they give with a scale for each row.
    """
    x_codes, x_scale = quantize_rows(x.flatten(0, -2))
    y = torch._scaled_mm(
        x_codes,
        codes_VH.t(),
        scale_a=x_scale,
        scale_b=scale_V1.float().t(),
        out_dtype=torch.bfloat16,
    )
    return y.float().unflatten(0, x.shape[:-1])


def quantize_rows(x_MH: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [M, H] and scales [M, 1], by each row's largest magnitude.

    A scale of the whole tensor would let one row's values change what another row gives.
    """
    wide = x_MH.float()
    largest = wide.abs().amax(-1, keepdim=True)
    scale = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)  # also for rows of zeros
    codes = (wide / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes, scale


def _half(codes: Tensor) -> Tensor:
    """Half of E4M3 codes as float32, exactly (NaN apart), in a few operations on vectors.

    Shifted into place, the bits of a code are those of a float32 that is 2^120 times too small,
    also where the code is subnormal. Compilers take several times as long for a conversion.
    """
    bits = (codes.view(torch.int8).int() << 20) & _MAGNITUDE_AND_SIGN
    return bits.view(torch.float32) * _HALF_OF_GAP


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 values rounded to the dtype.

    To bf16 it is done by bits, since a compiler that fuses drops casts there and back.
    """
    if dtype != torch.bfloat16:
        return x.to(dtype).float()
    bits = x.view(torch.int32)
    half = (1 << (_BF16_BITS - 1)) - 1
    return ((bits + half + ((bits >> _BF16_BITS) & 1)) & -(1 << _BF16_BITS)).view(torch.float32)
