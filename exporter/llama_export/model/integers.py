"""Weights of small integers: codes of eight or four bits, with factors for each group of a row.

A value is code * scale, or code * scale + minimum where there are minima, in float32; it is rounded once
to the compute dtype where a whole weight is decoded. Codes of eight bits are int8. Of four bits they lie
as in GGUF's Q4_0: byte j of 16 holds value j of 32 in its low half and value j + 16 in its high half,
each with 8 added to codes of -8 to 7; beside minima they are 0 to 15 as they stand, as in Q4_1.

Shape letters: V out, H in, G groups of a row; `...` the axes of a call's tokens, or a weight's rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from llama_export.checkpoint.layout import BLOCK

OFFSET = 8
"""What is added to a code of four bits, unless there are minima."""


def linear(
    x: Tensor, codes: Tensor, scale_VG: Tensor, min_VG: Tensor | None, bias: Tensor | None
) -> Tensor:
    """A linear layer [..., H] -> [..., V] in x's dtype, over the weight decoded whole."""
    weight = decode(codes, scale_VG, min_VG, x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def decode(codes: Tensor, scale: Tensor, minimum: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Values [..., H] of codes and their factors [..., G], as they would be stored in the dtype."""
    offset = OFFSET if minimum is None else 0
    values = unpack(codes, offset).unflatten(-1, (scale.shape[-1], -1)) * scale.float()[..., None]
    if minimum is not None:
        values = values + minimum.float()[..., None]
    return values.flatten(-2).to(dtype)


def unpack(codes: Tensor, offset: int = OFFSET) -> Tensor:
    """Codes as float32 [..., H]; of four bits they come as [..., H / 2] with the offset added.

    By arithmetic, since not every format shifts bytes.
    """
    wide = codes.float()
    if codes.dtype == torch.int8:
        return wide
    blocks = wide.unflatten(-1, (-1, 1, BLOCK // 2))
    high = (blocks / 16).floor()
    values = torch.cat((blocks - 16 * high, high), dim=-2).flatten(-3)
    return values - offset if offset else values


def pack(values: Tensor, offset: int = OFFSET) -> Tensor:
    """The inverse of `unpack` for codes of four bits, [..., H] -> [..., H / 2]."""
    blocks = (values + offset).to(torch.uint8).unflatten(-1, (-1, BLOCK))
    low, high = blocks.split(BLOCK // 2, dim=-1)
    return (low | high << 4).flatten(-2)
