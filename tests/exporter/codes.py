"""Random weights of small integers, read value by value."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from llama_artifacts.dtypes import from_name
from llama_export.checkpoint.layout import Codes

MADE_ELSEWHERE = [
    Codes("i8", 32, "f16"),
    Codes("u8", 32, "f16"),
    Codes("u8", 32, "f16", has_min=True),
    Codes("u8", 32, "f32", has_min=True),
    Codes("u8", 64, "bf16", has_min=True),
    Codes("i8", None, "f32", has_min=True),
]
"""Codes that checkpoints come with."""


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


class Stored(NamedTuple):
    """A weight of codes [V, H] with their factors [V, G]."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None

    @property
    def width(self) -> int:
        return self.codes.shape[1] * (1 if self.codes.dtype == torch.int8 else 2)

    def value(self, row: int, column: int) -> float:
        """One value, read byte by byte."""
        group = column * self.scale.shape[1] // self.width
        factor = float(self.scale[row, group])
        lowest = 0.0 if self.minimum is None else float(self.minimum[row, group])
        if self.codes.dtype == torch.int8:
            return int(self.codes[row, column]) * factor + lowest
        block, place = divmod(column, 32)
        byte = int(self.codes[row, 16 * block + place % 16])
        code = byte & 15 if place < 16 else byte >> 4
        return (code - (8 if self.minimum is None else 0)) * factor + lowest

    def plain(self) -> Tensor:
        """Every value, float64 [out, in]."""
        rows = range(len(self.codes))
        found = [[self.value(row, column) for column in range(self.width)] for row in rows]
        return torch.tensor(found, dtype=torch.float64)


def drawn(num_rows: int, width: int, codes: Codes, seed: int = 0) -> Stored:
    """Random codes, and factors that make values of about 1 of them, of either sign.

    Factors have as many bits as float16, so that products with codes are exact in float32.
    """
    shape, factors = codes.shape((num_rows, width)), codes.factor_shape((num_rows, width))
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    dtype = getattr(torch, from_name(codes.scale_dtype).torch)
    size = 127 if codes.dtype == "i8" else 8
    scale = (draw(*factors, seed=seed + 1) / size).half().to(dtype)
    minimum = draw(*factors, seed=seed + 2).half().to(dtype) if codes.has_min else None
    return Stored(made.view(torch.int8) if codes.dtype == "i8" else made, scale, minimum)
