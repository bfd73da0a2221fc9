"""Several products of not too many rows with stored weights at once: an operator of the graph of native code.

Shape letters: R rows, H in, V out; `...` the axes of a call's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llama_export.model import fp8, integers


@torch.library.custom_op("llama_export::products", mutates_args=())
def products(
    x_RH: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    minima: Sequence[Tensor],
    is_rounded: bool,
) -> Tensor:
    """X [R, H] times each weight [V, H], side by side, [R, sum of V]: in float32, or rounded as x.

    Where there are scales [V, G], one for each weight, these are codes of small integers of one kind
    (see `llama_export.model.integers`), and so are minima, or there are none.

    The operator has a kernel of its own in native code (`llama_export.lower.products`); what it
    computes is this: a sum in float32 over the stored weight, or over the decoded one.
    """
    wide = [weight.float() for weight in weights]
    if scales:
        lowest: Sequence[Tensor | None] = minima or [None] * len(scales)
        parts = zip(weights, scales, lowest, strict=True)
        wide = [integers.decode(*part, torch.float32) for part in parts]
    y = torch.cat([(x_RH[:, None] * weight).sum(-1) for weight in wide], dim=-1)
    return y.to(x_RH.dtype) if is_rounded else y


@torch.library.custom_op("llama_export::fp8_products", mutates_args=())
def fp8_products(
    x_RH: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    is_exact: bool,
    is_rounded: bool,
) -> Tensor:
    """X [R, H] times each weight of FP8 codes [V, H] and scales [V, 1], as `products` has them.

    Where it is exact, a weight is rounded to x's dtype as if it were stored in it; else the scale is
    applied to the sum. The operator has a kernel on CUDA devices (`llama_export.lower.cuda_products`).
    """
    parts = []
    for codes, scale in zip(weights, scales, strict=True):
        weight = fp8.decode(codes, scale, x_RH.dtype) if is_exact else codes
        y = (x_RH.float()[:, None] * weight.float()).sum(-1)
        parts.append(y if is_exact else y * scale.float()[:, 0])
    y = torch.cat(parts, dim=-1)
    return y.to(x_RH.dtype) if is_rounded else y


def _without_values(x_RH: Tensor, weights: Sequence[Tensor], *others: Any) -> Tensor:
    """What either operator gives, for a trace; the last argument says whether it is rounded."""
    size = (x_RH.shape[0], sum(weight.shape[0] for weight in weights))
    return x_RH.new_empty(size, dtype=x_RH.dtype if others[-1] else torch.float32)


products.register_fake(_without_values)
fp8_products.register_fake(_without_values)
