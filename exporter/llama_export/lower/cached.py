"""The kernel of `llama_export::attend_cached` in native code, `kernels/cached.h`.

Softmax in one pass over the keys: a block of places at a time, with the largest score and the sum of
weights so far (Milakov and Gimelshein 2018, online normalizer; Dao et al. 2022, FlashAttention), so
that no scores are stored and nothing after a token's position is read. Of few tokens, threads take
parts of the places, which are put together at the end (Dao et al. 2023, Flash-Decoding). A token's
result does not depend on threads, nor on what other tokens hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

import llama_export.model.cached  # noqa: F401  # the operator
from llama_export.lower.kernel import Call, Kernel, headers

FEW = 32
"""Up to so many tokens that do not follow each other, threads share what each of them sees."""

_BODY = """{{
  constexpr int heads = llama_export::heads_at_once({group}, {width});
  constexpr int tokens = llama_export::tokens_at_once(heads, {page});
  constexpr int64_t stride = {num_heads}L * {width}L;
  for (int64_t i = 0; i < num_rows * num_columns; ++i)
    AOTI_TORCH_CHECK(0 <= table[i] && table[i] < num_pages, "a page of the table is outside of the pool");
  for (int64_t p = 0; p < num; ++p) {{
    AOTI_TORCH_CHECK(0 <= rows[p] && rows[p] < num_rows, "a token's row is outside of the table");
    AOTI_TORCH_CHECK(0 <= positions[p] && positions[p] < num_columns * {page}L,
                     "a token's position is outside of its row");
  }}
  const auto page = [&](int64_t p, int64_t i, int shared) {{
    return (table[rows[p] * num_columns + i] * {kv_heads}L + shared) * {page}L * {width}L;
  }};
  const auto starts = llama_export::pieces<tokens>(rows, positions, num);
  const auto num_pieces = static_cast<int64_t>(starts.size()) - 1;
  if (num <= {few} && num_pieces == num) {{
    llama_export::attend_few<heads, {width}, {page}, {group}>(
        q, keys, values, positions, num, {num_heads}, {scale}f, page, y);
    return;
  }}
  const auto piece = [&](int64_t p, auto tokens) {{
    llama_export::attend<heads, tokens.value, {width}, {page}, {group}>(
        q + p * stride, keys, values, {num_heads}, stride, positions[p] + 1L, {scale}f,
        [&](int64_t i, int shared) {{ return page(p, i, shared); }}, y + p * stride);
  }};
  // The last see most places: they come first, so that threads end together.
  #pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = num_pieces - 1; i >= 0; --i) {{
    if (tokens > 1 && starts[i + 1] - starts[i] == tokens)
      piece(starts[i], std::integral_constant<int, tokens>());
    else
      piece(starts[i], std::integral_constant<int, 1>());
  }}
}}
"""


class AttendCached(Kernel):
    """Inputs are those of the operator; counts are tokens, pages, and rows and columns of the table."""

    def source(
        self, dtypes: Sequence[str], sizes: Sequence[Sequence[Any]]
    ) -> tuple[str, Call, str]:
        (_, num_heads, width), (_, kv_heads, page, _) = sizes[:2]
        names = ("q", "keys", "values", "table", "rows", "positions")
        parameters = [(f"const {dtype}*", name) for dtype, name in zip(dtypes, names, strict=True)]
        parameters += [("int64_t", f"num{of}") for of in ("", "_pages", "_rows", "_columns")]
        body = _BODY.format(
            width=int(width),
            page=int(page),
            num_heads=int(num_heads),
            kv_heads=int(kv_heads),
            group=int(num_heads) // int(kv_heads),
            scale=repr(int(width) ** -0.5),
            few=FEW,
        )
        return (
            headers("vectors", "products", "places", "cached"),
            [*parameters, ("float*", "y")],
            body,
        )


@register_lowering(torch.ops.llama_export.attend_cached.default, type_promotion_kind=None)
def _lower(
    q: ir.TensorBox,
    keys: ir.TensorBox,
    values: ir.TensorBox,
    table: ir.TensorBox,
    rows: ir.TensorBox,
    positions: ir.TensorBox,
) -> ir.TensorBox:
    counts = (q.get_size()[0], keys.get_size()[0], *table.get_size())
    inputs = [q, keys, values, table, rows, positions]
    return ir.TensorBox.create(AttendCached(inputs, q.get_size(), counts))
