"""The kernel of `llama_export::products` and `fp8_products` on a CUDA device, in Triton.

One launch multiplies all weights that share an input, up to three of them. A program of its grid
takes some rows of one weight and reads them once, in order, as they are stored; codes become numbers
in registers. One row of x is multiplied as dot products, several are multiplied as matrices. Sums are
in float32, in an order that depends on sizes alone.

A compiler that is given the mathematics alone reads a weight once for each row of x, or writes the
decoded weight to memory and reads it back. Block sizes are fixed and not tuned on the device, so that
a program that is built twice is the same program.

Shape letters: R rows, H in, V out, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from llama_export.checkpoint.layout import BLOCK
from llama_export.model.integers import OFFSET

_MAX_WEIGHTS = 3  # of one launch: those of queries, keys and values
_LEAST = 16  # sides of the matrices that tensor cores take are multiples of this
_HALF = tl.constexpr(BLOCK // 2)


@triton.jit
def _columns(place, IS_PACKED: tl.constexpr):
    """Of the values in stored places; where a byte holds two, of the one in its low half."""
    if IS_PACKED:
        return place // _HALF * (2 * _HALF) + place % _HALF
    return place


@triton.jit
def _added(
    sums, codes, x, scale, minimum, rows, start, num_rows,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, NUM_GROUPS: tl.constexpr,
    SPANS: tl.constexpr, SPAN: tl.constexpr, BLOCK_R: tl.constexpr,
    IS_PACKED: tl.constexpr, IS_EXACT: tl.constexpr, HAS_MIN: tl.constexpr,
):  # fmt: skip
    """The sums and the products of codes [BLOCK_V, SPANS, SPAN], from place `start` on, with x.

    NUM_GROUPS: of a row that have scales; 0: no scale, or one that is applied to the sum.
    """
    dtype = x.dtype.element_ty
    values = codes.to(tl.float32)
    if NUM_GROUPS > 0:
        group = (start + tl.arange(0, SPANS) * SPAN) * NUM_GROUPS // STRIDE
        there = tl.minimum(group, NUM_GROUPS - 1)
        factor = rows[:, None] * NUM_GROUPS + there[None, :]
        values = values * tl.load(scale + factor).to(tl.float32)[:, :, None]
        if HAS_MIN:
            values = values + tl.load(minimum + factor).to(tl.float32)[:, :, None]
    if BLOCK_R == 1:
        if IS_EXACT:
            values = values.to(dtype).to(tl.float32)
        place = start + tl.arange(0, SPANS)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        part = tl.load(x + _columns(place, IS_PACKED), mask=place < STRIDE, other=0.0)
        return sums + values * part.to(tl.float32)[None, :, :]
    else:
        place = start + tl.arange(0, SPANS * SPAN)[:, None]
        row = tl.arange(0, BLOCK_R)[None, :]
        is_there = (place < STRIDE) & (row < num_rows)
        part = tl.load(x + row * WIDTH + _columns(place, IS_PACKED), mask=is_there, other=0.0)
        matrix = tl.reshape(values, [values.shape[0], SPANS * SPAN]).to(dtype)
        return tl.dot(matrix, part, sums, input_precision="ieee")


@triton.jit
def _multiply(
    x, w0, w1, w2, s0, s1, s2, m0, m1, m2, y, num_rows,
    V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    TOTAL: tl.constexpr, OFFSET_Y: tl.constexpr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, NUM_GROUPS: tl.constexpr,
    SPANS: tl.constexpr, SPAN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    IS_PACKED: tl.constexpr, IS_EXACT: tl.constexpr, IS_SCALED_AFTER: tl.constexpr,
    HAS_MIN: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """X [R, WIDTH] times up to three weights of V0, V1 and V2 rows, into columns of y [R, TOTAL]."""
    block = tl.program_id(0)
    second: tl.constexpr = (V0 + BLOCK_V - 1) // BLOCK_V
    third: tl.constexpr = second + (V1 + BLOCK_V - 1) // BLOCK_V
    weight = tl.where(block < second, w0, tl.where(block < third, w1, w2))
    scale = tl.where(block < second, s0, tl.where(block < third, s1, s2))
    minimum = tl.where(block < second, m0, tl.where(block < third, m1, m2))
    size = tl.where(block < second, V0, tl.where(block < third, V1, V2))
    first = tl.where(block < second, 0, tl.where(block < third, second, third))
    column = tl.where(block < second, 0, tl.where(block < third, V0, V0 + V1)) + OFFSET_Y
    own = (block - first) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows = tl.minimum(own, size - 1).to(tl.int64)  # what a row too many gives is not stored
    if BLOCK_R == 1:
        sums = tl.zeros([BLOCK_V, SPANS, SPAN], tl.float32)
    else:
        sums = tl.zeros([BLOCK_V, BLOCK_R], tl.float32)
    for start in range(0, STRIDE, SPANS * SPAN):
        inner = tl.arange(0, SPANS)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        place = (start + inner)[None, :, :]
        codes = tl.load(
            weight + rows[:, None, None] * STRIDE + place, mask=place < STRIDE, other=0.0
        )
        if IS_PACKED:
            high = (codes >> 4).to(tl.int32) - OFFSET
            sums = _added(
                sums, high, x + _HALF, scale, minimum, rows, start, num_rows,
                WIDTH, STRIDE, NUM_GROUPS, SPANS, SPAN, BLOCK_R, IS_PACKED, IS_EXACT, HAS_MIN,
            )  # fmt: skip
            codes = (codes & 15).to(tl.int32) - OFFSET
        sums = _added(
            sums, codes, x, scale, minimum, rows, start, num_rows,
            WIDTH, STRIDE, NUM_GROUPS, SPANS, SPAN, BLOCK_R, IS_PACKED, IS_EXACT, HAS_MIN,
        )  # fmt: skip
    if BLOCK_R == 1:
        sums = tl.sum(tl.sum(sums, axis=2), axis=1)[:, None]
    if IS_SCALED_AFTER:
        sums = sums * tl.load(scale + rows).to(tl.float32)[:, None]
    row = tl.arange(0, BLOCK_R)[None, :]
    where = y + row * TOTAL + column + own[:, None]
    tl.store(where, sums.to(y.dtype.element_ty), mask=(own < size)[:, None] & (row < num_rows))


@triton_op("llama_export::cuda_products", mutates_args=())
def cuda_products(
    x_RH: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    minima: Sequence[Tensor],
    is_rounded: bool,
    is_exact: bool,
    most_rows: int,
) -> Tensor:
    """As `llama_export::products`, or `fp8_products` where the weights are FP8.

    Args:
        x_RH: of as many rows as the program was compiled for, up to `most_rows`.
        weights: each [V, H], or codes of it.
        scales: one for each weight of codes.
        minima: the same where codes have them.
        is_rounded: whether the result is in x's dtype, else float32.
        is_exact: FP8 weights are rounded to x's dtype when they are decoded.
        most_rows: the largest R.
    """
    sizes = [weight.shape[0] for weight in weights]
    dtype = x_RH.dtype if is_rounded else torch.float32
    y = x_RH.new_empty((x_RH.shape[0], sum(sizes)), dtype=dtype)
    is_one_kind = len({weight.dtype for weight in weights}) == 1
    step = _MAX_WEIGHTS if is_one_kind else 1
    for i in range(0, len(weights), step):
        _launch(
            x_RH.contiguous(),
            weights[i : i + step],
            scales[i : i + step],
            minima[i : i + step],
            y,
            sum(sizes[:i]),
            is_exact=is_exact,
            most_rows=most_rows,
        )
    return y


def _launch(
    x_RH: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    minima: Sequence[Tensor],
    y: Tensor,
    offset: int,
    *,
    is_exact: bool,
    most_rows: int,
) -> None:
    """Multiplies up to three weights of one kind into columns of y from the offset on."""
    R, width = x_RH.shape
    stride = weights[0].shape[1]
    num_groups = scales[0].shape[1] if scales else 0
    is_after = num_groups == 1 and not is_exact and not minima
    block_r = 1 if most_rows == 1 else max(_LEAST, triton.next_power_of_2(most_rows))
    block = _places(stride, block_r, x_RH.element_size())
    span = block if num_groups <= 1 else min(block, stride // num_groups)
    block_v = 4 if block_r == 1 else 32
    sizes = [weight.shape[0] for weight in weights]
    spare = _MAX_WEIGHTS - len(weights)
    all_scales, all_minima = scales or weights, minima or weights  # never read
    wrap_triton(_multiply)[(sum(-(-size // block_v) for size in sizes),)](
        x_RH,
        *weights,
        *list(weights[:1]) * spare,
        *all_scales,
        *list(all_scales[:1]) * spare,
        *all_minima,
        *list(all_minima[:1]) * spare,
        y,
        R,
        *sizes,
        *[0] * spare,
        TOTAL=y.shape[1],
        OFFSET_Y=offset,
        WIDTH=width,
        STRIDE=stride,
        NUM_GROUPS=0 if is_after else num_groups,
        SPANS=block // span,
        SPAN=span,
        BLOCK_R=block_r,
        BLOCK_V=block_v,
        IS_PACKED=weights[0].dtype == torch.uint8,
        IS_EXACT=is_exact,
        IS_SCALED_AFTER=is_after,
        HAS_MIN=bool(minima),
        OFFSET=0 if minima else OFFSET,
    )


def _places(stride: int, block_r: int, size: int) -> int:
    """Stored places of a row of a weight that are read at once.

    Enough to keep the memory busy, and so few that the tiles of three turns fit into what the
    smallest of today's cards shares between threads, 99 KB.
    """
    most = 1024 if block_r == 1 else (256 if block_r == _LEAST else 128) * 2 // size
    return min(most, max(_LEAST, triton.next_power_of_2(stride)))
