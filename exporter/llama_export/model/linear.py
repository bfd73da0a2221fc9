"""Modules of one weight: norms, linear layers and embeddings, whichever way the weight is stored.

Shape letters: `...` the axes of the call's tokens, [B, S] or [P].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from llama_export.checkpoint.layout import Codes
from llama_export.model import contrib, fp8, integers
from llama_export.model.collectives import summed
from llama_export.model.formulation import Formulation
from llama_export.model.products import fp8_products, products


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class Linear(nn.Module):
    """A linear layer [..., in] -> [..., out], fused for few rows (see `Formulation`).

    `weight_scale` [out, groups] is there where the weight is codes, and multiplies each group of a row;
    `weight_min`, which is added to a group's values, where codes have minima. `weight_order` [in] says
    which feature of x each column of codes belongs to, also for siblings with codes that have none.
    """

    def __init__(self, num_in: int, num_out: int, form: Formulation, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.empty(num_out)) if bias else None
        self.weight_scale: nn.Parameter | None = None
        self.weight_min: nn.Parameter | None = None
        self.weight_order: nn.Parameter | None = None
        self.codes: Codes | None = None
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return together(x, self)[0]

    def hold(self, codes: Codes) -> None:
        """Makes room for a weight of codes and what belongs to them."""
        self.codes = codes
        for name, info in codes.tensors("", tuple(self.weight.shape)).items():
            room = nn.Parameter(torch.empty(info.shape), requires_grad=False)
            setattr(self, name.removeprefix("."), room)

    @property
    def has_fp8(self) -> bool:
        """Whether the weight is FP8 codes (see `llama_export.model.fp8`)."""
        return self.weight.dtype == torch.float8_e4m3fn

    @property
    def kind(self) -> Codes | None:
        """What weights of one pass have in common; None: no codes."""
        return None if self.codes is None else replace(self.codes, has_order=False)

    @property
    def has_kernel(self) -> bool:
        """Whether few rows are multiplied with the weight by an operator that has kernels."""
        return not self.has_fp8 or self.form.has_fp8_kernel

    @property
    def has_addition(self) -> bool:
        """Whether something is added to a product before it is rounded."""
        return self.bias is not None

    def finish(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Adds the bias, if there is one, to a product in float32, and rounds."""
        return (y if self.bias is None else y + self.bias.float()).to(dtype)

    def apart(self, x: Tensor) -> Tensor:
        """The layer by itself, in the form that many rows or FP8 weights have."""
        return self._apart(x, self.bias)

    def _has_contrib(self, x: Tensor) -> bool:
        """Whether ONNX Runtime multiplies x by codes as they are stored."""
        scale = self.weight_scale
        if scale is None or self.weight_min is not None or not self.form.has_contrib:
            return False
        is_small = statically_known_true(math.prod(x.shape[:-1]) <= contrib.MAX_ROWS)
        return is_small and contrib.takes(self.weight, scale)

    def _apart(self, x: Tensor, bias: Tensor | None) -> Tensor:
        scale, form = self.weight_scale, self.form
        if scale is not None and self._has_contrib(x):
            y = contrib.linear(x, self.weight, scale)
            return y if bias is None else y + bias.to(x.dtype)
        if scale is not None and not self.has_fp8:
            return integers.linear(x, self.weight, scale, self.weight_min, bias)
        if scale is not None:
            return fp8.linear(x, self.weight, scale, bias, form=form)
        return F.linear(x, self.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class Summed(Linear):
    """A linear layer of which each process has some columns: the processes add up their products.

    They do it in float32, so that the sum is rounded once.
    """

    @property
    def has_addition(self) -> bool:
        return True

    def finish(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Adds up a product in float32, adds the bias once, and rounds."""
        return super().finish(summed(y, self.form), dtype)

    def apart(self, x: Tensor) -> Tensor:
        """As that of the class above, where the bias is no part of the product."""
        return self.finish(self._apart(x, None).float(), x.dtype)


class Embedding(Linear):
    """Rows of a table [vocabulary, hidden]; as a tied head, the linear layer of that weight."""

    def rows(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., hidden] of tokens [...], in the compute dtype."""
        found = F.embedding(tokens, self.weight)
        if self.weight_scale is None:
            return found.to(self.form.dtype)
        scale = F.embedding(tokens, self.weight_scale)
        minimum = None if self.weight_min is None else F.embedding(tokens, self.weight_min)
        return integers.decode(found, scale, minimum, self.form.dtype)


def together(x: Tensor, *layers: Linear) -> list[Tensor]:
    """Linear layers of the same x [..., in]; for few rows as one pass over weights of one kind."""
    orders = [layer.weight_order for layer in layers if layer.weight_order is not None]
    if len(orders) > 1:
        return [y for layer in layers for y in together(x, layer)]
    ordered = x.index_select(-1, orders[0]) if orders else x
    is_small = statically_known_true(math.prod(x.shape[:-1]) <= layers[0].form.max_fused_rows)
    found: list[Tensor] = []
    for codes, alike in itertools.groupby(layers, key=lambda layer: layer.kind):
        few, given = list(alike), x if codes is None else ordered
        is_fused = is_small and few[0].has_kernel
        found += _fused(given, few) if is_fused else [layer.apart(given) for layer in few]
    return found


def _fused(x: Tensor, layers: Sequence[Linear]) -> list[Tensor]:
    weights = [layer.weight for layer in layers]
    scales = [layer.weight_scale for layer in layers if layer.weight_scale is not None]
    minima = [layer.weight_min for layer in layers if layer.weight_min is not None]
    is_rounded = not any(layer.has_addition for layer in layers)
    flat, form = x.flatten(0, -2), layers[0].form
    if layers[0].has_fp8:
        y = fp8_products(flat, weights, scales, form.numerics == "exact", is_rounded)
    else:
        y = products(flat, weights, scales, minima, is_rounded)
    parts = y.unflatten(0, x.shape[:-1]).split([weight.shape[0] for weight in weights], dim=-1)
    return [layer.finish(part, x.dtype) for layer, part in zip(layers, parts, strict=True)]
