"""The kernel of `llama_export::products` in native code.

Inductor puts a multiply and reduce into functions that hold a whole network, and reads the weights
that share an input side by side. This kernel reads them one after the other, at the speed of the
memory; its source depends on shapes and dtypes alone, so that all layers share one function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

import llama_export.model.products  # noqa: F401  # the operator
from llama_export.lower.integers import CodedProducts
from llama_export.lower.kernel import Call, Kernel

_HELPERS = r"""
#ifndef LLAMA_EXPORT_PRODUCTS
#define LLAMA_EXPORT_PRODUCTS
namespace llama_export {

// y[m * total] = a row of a weight [width] times row m of x [Num, width]. Rows are read one after the
// other: two at a time are two streams, which the memory serves at half the speed.
template <typename W, int Num>
inline void dot(const float* x, const W* w, int64_t width, float* y, int64_t total) {
  using Float = at::vec::Vectorized<float>;
  constexpr int64_t step = at::vec::Vectorized<W>::size();
  constexpr int parts = step / Float::size();
  constexpr int chains = Num == 1 ? 2 : 1;
  Float sums[Num][chains][parts];
  // Unrolled, since sums that stay an array stay in memory.
  #pragma GCC unroll 8
  for (int m = 0; m < Num; ++m)
    #pragma GCC unroll 8
    for (int c = 0; c < chains; ++c)
      #pragma GCC unroll 8
      for (int p = 0; p < parts; ++p) sums[m][c][p] = Float(0.0f);
  int64_t k = 0;
  for (; k + chains * step <= width; k += chains * step) {
    #pragma GCC unroll 8
    for (int c = 0; c < chains; ++c) {
      const int64_t at = k + c * step;
      const at::vec::VectorizedN<float, parts> weights = at::vec::convert<float, parts, W, 1>(
          at::vec::VectorizedN<W, 1>(at::vec::Vectorized<W>::loadu(w + at)));
      #pragma GCC unroll 8
      for (int m = 0; m < Num; ++m)
        #pragma GCC unroll 8
        for (int p = 0; p < parts; ++p)
          sums[m][c][p] = at::vec::fmadd(
              weights[p], Float::loadu(x + m * width + at + p * Float::size()), sums[m][c][p]);
    }
  }
  #pragma GCC unroll 8
  for (int m = 0; m < Num; ++m) {
    Float sum(0.0f);
    #pragma GCC unroll 8
    for (int c = 0; c < chains; ++c)
      #pragma GCC unroll 8
      for (int p = 0; p < parts; ++p) sum = sum + sums[m][c][p];
    float rest = 0.0f;
    for (int64_t i = k; i < width; ++i) rest += x[m * width + i] * static_cast<float>(w[i]);
    y[m * total] = rest + at::vec::vec_reduce_all<float>(
        [](Float& a, Float& b) { return a + b; }, sum);
  }
}

// The rows of one weight that lie in [first, last) of all rows; `offset` is where this weight begins.
template <typename W, int Num>
inline void rows_of(const float* x, const W* w, int64_t num_rows, int64_t width, int64_t offset,
                    int64_t first, int64_t last, float* y, int64_t total) {
  const int64_t end = std::min(last - offset, num_rows);
  for (int64_t v = std::max(first - offset, int64_t(0)); v < end; ++v)
    dot<W, Num>(x, w + v * width, width, y + offset + v, total);
}

}  // namespace llama_export
#endif
"""


class Products(Kernel):
    """Inputs are x [R, H] float32 and the weights [V, H]."""

    def source(
        self, dtypes: Sequence[str], sizes: Sequence[Sequence[Any]]
    ) -> tuple[str, Call, str]:
        (num, width), *weights = (tuple(map(int, size)) for size in sizes)
        total = sum(size for size, _ in weights)
        names = ["x", *(f"w{i}" for i in range(len(weights)))]
        parameters = [(f"const {dtype}*", name) for dtype, name in zip(dtypes, names, strict=True)]
        calls, offset = [], 0
        for dtype, name, (size, _) in zip(dtypes[1:], names[1:], weights, strict=True):
            calls.append(
                f"llama_export::rows_of<{dtype}, {num}>"
                f"(x, {name}, {size}, {width}, {offset}, first, last, y, {total});"
            )
            offset += size
        lines = "\n    ".join(calls)
        body = f"""{{
  #pragma omp parallel
  {{
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t first = {total}L * thread / threads, last = {total}L * (thread + 1) / threads;
    {lines}
  }}
}}
"""
        return _HELPERS, [*parameters, ("float*", "y")], body


@register_lowering(torch.ops.llama_export.products.default, type_promotion_kind=None)
def _lower(
    x: ir.TensorBox, weights: Sequence[ir.TensorBox], scales: Sequence[ir.TensorBox]
) -> ir.TensorBox:
    size = [x.get_size()[0], sum(int(weight.get_size()[0]) for weight in weights)]
    kind = CodedProducts if scales else Products
    return ir.TensorBox.create(kind([x, *weights, *scales], size))
