"""The kernel of `llama_export::attend_cached` in native code: softmax in one pass over the keys.

A block of places at a time, with the largest score and the sum of weights so far (Milakov and
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
from llama_export.lower.kernel import Call, Kernel

_HELPERS = r"""
#ifndef LLAMA_EXPORT_ATTEND_CACHED
#define LLAMA_EXPORT_ATTEND_CACHED
namespace llama_export {

// How many of the query heads that share a key/value head are taken together: as many as divide them
// and whose sums the registers hold.
constexpr int heads_at_once(int group, int width) {
  int heads = 12 * static_cast<int>(at::vec::Vectorized<float>::size()) / width;
  while (heads > 1 && group % heads) --heads;
  return heads > 1 ? heads : 1;
}

// Attention of `Heads` query heads of one token that share a key/value head, over `count` places.
// `page(i)` is where the i-th page of this head begins.
template <typename Q, typename T, int Heads, int Width, int Page, typename PageOf>
inline void attend(const Q* q, const T* keys, const T* values, int64_t count, float scale,
                   const PageOf& page, float* out) {
  using Float = at::vec::Vectorized<float>;
  constexpr int lanes = Float::size(), parts = Width / lanes;
  constexpr int loads = at::vec::Vectorized<T>::size() / lanes;  // vectors of floats in one of T
  constexpr int block = Page < 64 ? Page : 64;
  static_assert(Width % 16 == 0);
  const auto load = [](const T* from, int part) {
    if constexpr (std::is_same_v<T, float>) return Float::loadu(from + part * lanes);
    else if constexpr (loads == 2 && parts % 2 == 0) {
      const at::vec::VectorizedN<float, 2> both = at::vec::convert<float, 2, T, 1>(
          at::vec::VectorizedN<T, 1>(at::vec::Vectorized<T>::loadu(from + part / 2 * 2 * lanes)));
      return both[part % 2];
    } else {
      const at::vec::VectorizedN<float, loads> some = at::vec::convert<float, loads, T, 1>(
          at::vec::VectorizedN<T, 1>(at::vec::Vectorized<T>::loadu(from + part * lanes, lanes)));
      return some[0];
    }
  };
  Float wanted[Heads][parts], sums[Heads][parts];
  float largest[Heads], total[Heads];
  #pragma GCC unroll 16
  for (int h = 0; h < Heads; ++h) {
    alignas(64) float scaled[Width];
    for (int d = 0; d < Width; ++d) scaled[d] = static_cast<float>(q[h * Width + d]) * scale;
    #pragma GCC unroll 16
    for (int p = 0; p < parts; ++p) {
      wanted[h][p] = Float::loadu(scaled + p * lanes);
      sums[h][p] = Float(0.0f);
    }
    largest[h] = -std::numeric_limits<float>::infinity();
    total[h] = 0.0f;
  }
  alignas(64) float weights[Heads][64];
  int num = 0;
  for (int64_t first = 0; first < count; first += num) {
    const int64_t offset = page(first / Page) + first % Page * Width;
    num = static_cast<int>(std::min<int64_t>({block, count - first, Page - first % Page}));
    for (int j = 0; j < num; ++j) {
      const T* key = keys + offset + j * Width;
      Float found[parts];
      #pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) found[p] = load(key, p);
      #pragma GCC unroll 16
      for (int h = 0; h < Heads; ++h) {
        Float dot = wanted[h][0] * found[0];
        #pragma GCC unroll 16
        for (int p = 1; p < parts; ++p) dot = at::vec::fmadd(wanted[h][p], found[p], dot);
        weights[h][j] = at::vec::vec_reduce_all<float>(
            [](Float& a, Float& b) { return a + b; }, dot);
      }
    }
    #pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h) {
      float most = largest[h];
      for (int j = 0; j < num; ++j) most = std::max(most, weights[h][j]);
      for (int j = num; j % lanes; ++j) weights[h][j] = -std::numeric_limits<float>::infinity();
      Float added(0.0f);
      for (int j = 0; j < num; j += lanes) {
        const Float weight = (Float::loadu(weights[h] + j) - Float(most)).exp();
        weight.store(weights[h] + j);
        added = added + weight;
      }
      const float kept = std::exp(largest[h] - most);
      total[h] = total[h] * kept + at::vec::vec_reduce_all<float>(
          [](Float& a, Float& b) { return a + b; }, added);
      largest[h] = most;
      #pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) sums[h][p] = sums[h][p] * Float(kept);
    }
    for (int j = 0; j < num; ++j) {
      const T* value = values + offset + j * Width;
      #pragma GCC unroll 16
      for (int p = 0; p < parts; ++p) {
        const Float found = load(value, p);
        #pragma GCC unroll 16
        for (int h = 0; h < Heads; ++h)
          sums[h][p] = at::vec::fmadd(Float(weights[h][j]), found, sums[h][p]);
      }
    }
  }
  #pragma GCC unroll 16
  for (int h = 0; h < Heads; ++h)
    #pragma GCC unroll 16
    for (int p = 0; p < parts; ++p) (sums[h][p] / Float(total[h])).store(out + h * Width + p * lanes);
}

}  // namespace llama_export
#endif
"""

# Heads are taken one at a time where there would be too few pieces of work for the threads.
_BODY = """{{
  constexpr int heads = llama_export::heads_at_once({group}, {width});
  for (int64_t i = 0; i < num_rows * num_columns; ++i)
    AOTI_TORCH_CHECK(0 <= table[i] && table[i] < num_pages, "a page of the table is outside of the pool");
  for (int64_t p = 0; p < num; ++p) {{
    AOTI_TORCH_CHECK(0 <= rows[p] && rows[p] < num_rows, "a token's row is outside of the table");
    AOTI_TORCH_CHECK(0 <= positions[p] && positions[p] < num_columns * {page}L,
                     "a token's position is outside of its row");
  }}
  const auto piece = [&](int64_t p, int64_t head, auto together) {{
    const int64_t shared = head / {group};
    const int32_t* pages = table + rows[p] * num_columns;
    const auto page = [&](int64_t i) {{ return (pages[i] * {kv_heads}L + shared) * {page}L * {width}L; }};
    llama_export::attend<{q}, {kept}, together.value, {width}, {page}>(
        q + (p * {num_heads}L + head) * {width}L, keys, values, positions[p] + 1L, {scale}f, page,
        y + (p * {num_heads}L + head) * {width}L);
  }};
  #pragma omp parallel
  {{
    if (num * ({num_heads} / heads) >= 4 * omp_get_num_threads()) {{
      #pragma omp for schedule(dynamic, 4)
      for (int64_t i = 0; i < num * ({num_heads} / heads); ++i)
        piece(i / ({num_heads} / heads), i % ({num_heads} / heads) * heads,
              std::integral_constant<int, heads>());
    }} else {{
      #pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num * {num_heads}; ++i)
        piece(i / {num_heads}, i % {num_heads}, std::integral_constant<int, 1>());
    }}
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
            q=dtypes[0],
            kept=dtypes[1],
            width=int(width),
            page=int(page),
            num_heads=int(num_heads),
            kv_heads=int(kv_heads),
            group=int(num_heads) // int(kv_heads),
            scale=repr(int(width) ** -0.5),
        )
        return _HELPERS, [*parameters, ("float*", "y")], body


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
