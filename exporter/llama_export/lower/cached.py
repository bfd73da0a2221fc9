"""The kernel of `llama_export::attend_cached` in native code, `kernels/cached.h`.

Softmax in one pass over the keys: a block of places at a time, with the largest score and the sum of weights so far (Milakov and
Gimelshein 2018, online normalizer; Dao et al. 2022, FlashAttention), so that no scores are stored
and nothing after a token's position is read. A token's result does not depend on threads or on
other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

import llama_export.model.cached  # noqa: F401  # the operator
from llama_export.lower.kernel import Call, Kernel, headers

# Heads are taken one at a time where there would be too few pieces of work for the threads.
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
  const auto piece = [&](int64_t p, int first_head, int last_head, auto heads, auto tokens) {{
    const int32_t* pages = table + rows[p] * num_columns;
    const auto page = [&](int64_t i, int shared) {{
      return (pages[i] * {kv_heads}L + shared) * {page}L * {width}L;
    }};
    llama_export::attend<heads.value, tokens.value, {width}, {page}, {group}>(
        q + p * stride, keys, values, first_head, last_head, stride, positions[p] + 1L, {scale}f, page,
        y + p * stride);
  }};
  const std::integral_constant<int, 1> one;
  if (num >= 4 * omp_get_max_threads()) {{
    const std::integral_constant<int, heads> some;
    const auto starts = llama_export::pieces<tokens>(rows, positions, num);
    #pragma omp parallel for schedule(dynamic, 1)
    for (size_t i = 0; i < starts.size() - 1; ++i) {{
      if (tokens > 1 && starts[i + 1] - starts[i] == tokens)
        piece(starts[i], 0, {num_heads}, some, std::integral_constant<int, tokens>());
      else
        piece(starts[i], 0, {num_heads}, some, one);
    }}
  }} else {{
    #pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < num * {num_heads}; ++i)
      piece(i / {num_heads}, i % {num_heads}, i % {num_heads} + 1, one, one);
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
