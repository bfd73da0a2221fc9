"""Weights of small integers: codes of eight or four bits, with a scale for each group of a row.

A value is code times scale in float32, rounded once to the compute dtype where a whole weight is
decoded. Codes of eight bits are int8. Of four bits, in -8 to 7, they lie as in GGUF's Q4_0: 8 is added,
and byte j of 16 holds value j of 32 in its low half and value j + 16 in its high half.

Shape letters: V out, H in, G groups of a row; `...` the axes of a call's tokens, or a weight's rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from llama_export.checkpoint.layout import BLOCK

OFFSET = 8
"""What is added to a code of four bits."""
DTYPES = (torch.int8, torch.uint8)
"""Of codes of eight bits, and of pairs of codes of four."""


def linear(x: Tensor, codes: Tensor, scale_VG: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer [..., H] -> [..., V] in x's dtype, over the weight decoded whole."""
    weight = decode(codes, scale_VG, x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., H] of codes and their scales [..., G], as they would be stored in the dtype."""
    values = unpack(codes).unflatten(-1, (scale.shape[-1], -1))
    return (values * scale.float()[..., None]).flatten(-2).to(dtype)


def unpack(codes: Tensor) -> Tensor:
    """Codes as float32 [..., H]; of four bits they come as [..., H / 2].

    By arithmetic, since not every format shifts bytes.
    """
    wide = codes.float()
    if codes.dtype == torch.int8:
        return wide
    blocks = wide.unflatten(-1, (-1, 1, BLOCK // 2))
    high = (blocks / 16).floor()
    return torch.cat((blocks - 16 * high, high), dim=-2).flatten(-3) - OFFSET


def pack(values: Tensor) -> Tensor:
    """The inverse of `unpack` for codes -8 to 7 of four bits, [..., H] -> [..., H / 2]."""
    blocks = (values + OFFSET).to(torch.uint8).unflatten(-1, (-1, BLOCK))
    low, high = blocks.split(BLOCK // 2, dim=-1)
    return (low | high << 4).flatten(-2)
