"""Modules of one weight: norms, linear layers and embeddings, whichever way the weight is stored.

Shape letters: `...` the axes of the call's tokens, [B, S] or [P].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from llama_export.checkpoint.layout import Codes
from llama_export.model import contrib, fp8, integers
from llama_export.model.collectives import summed
from llama_export.model.formulation import Formulation
from llama_export.model.products import products


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

    `weight_scale` [out, groups] is there where the weight is codes, and multiplies each group of a row.
    """

    def __init__(self, num_in: int, num_out: int, form: Formulation, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.empty(num_out)) if bias else None
        self.weight_scale: nn.Parameter | None = None
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return together(x, self)[0]

    def hold(self, codes: Codes) -> None:
        """Makes room for a weight of codes and its scales."""
        weight, scale = codes.shape(self.weight.shape), codes.scale_shape(self.weight.shape)
        self.weight, self.weight_scale = (
            nn.Parameter(torch.empty(shape), requires_grad=False) for shape in (weight, scale)
        )

    @property
    def has_integers(self) -> bool:
        """Whether the weight is codes of small integers (see `llama_export.model.integers`)."""
        return self.weight_scale is not None and self.weight.dtype in integers.DTYPES

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

    def _apart(self, x: Tensor, bias: Tensor | None) -> Tensor:
        scale, form = self.weight_scale, self.form
        if scale is not None and form.has_contrib and contrib.takes(self.weight, scale):
            y = contrib.linear(x, self.weight, scale)
            return y if bias is None else y + bias.to(x.dtype)
        if scale is not None and self.has_integers:
            return integers.linear(x, self.weight, scale, bias)
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
        return integers.decode(found, F.embedding(tokens, self.weight_scale), self.form.dtype)


def together(x: Tensor, *layers: Linear) -> list[Tensor]:
    """Linear layers of the same x [..., in], as one pass over their weights for few rows."""
    scales = [layer.weight_scale for layer in layers if layer.weight_scale is not None]
    has_kernel = not scales or all(layer.has_integers for layer in layers)
    is_small = statically_known_true(math.prod(x.shape[:-1]) <= layers[0].form.max_fused_rows)
    if not has_kernel or not is_small:
        return [layer.apart(x) for layer in layers]
    weights = [layer.weight for layer in layers]
    is_rounded = not any(layer.has_addition for layer in layers)
    y = products(x.flatten(0, -2), weights, scales, is_rounded).unflatten(0, x.shape[:-1])
    parts = y.split([weight.shape[0] for weight in weights], dim=-1)
    return [layer.finish(part, x.dtype) for layer, part in zip(layers, parts, strict=True)]
