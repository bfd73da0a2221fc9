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
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
from torch._inductor.lowering import register_lowering

import llama_export.model.products  # noqa: F401  # the operator

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


class Products(ir.ExternKernelOut):
    """A call of the kernel; inputs are x [R, H] float32 and the weights [V, H]."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call, and the kernel if no earlier call has the same shapes."""
        nodes: list[Any] = list(self.inputs)
        types = [f"const {DTYPE_TO_CPP[node.get_dtype()]}*" for node in nodes] + ["float*"]
        x_size, *weight_sizes = (tuple(map(int, node.get_size())) for node in nodes)
        source = _source(x_size, weight_sizes, types)
        name = wrapper.src_to_kernel.get(source)
        if name is None:
            name = f"llama_products_{wrapper.next_kernel_suffix()}"
            wrapper.src_to_kernel[source] = name
            signature = _signature(types).replace("NAME", name)
            wrapper.define_kernel(
                name, source.replace("NAME", name), gpu=False, cpp_definition=f"{signature};\n"
            )
        call = [node.codegen_reference() for node in nodes] + [self.get_name()]
        wrapper.generate_kernel_call(name, call, triton=False, arg_types=types)


def _signature(types: Sequence[str]) -> str:
    names = ["x", *(f"w{i}" for i in range(len(types) - 2)), "y"]
    return f'extern "C" void NAME({", ".join(map(" ".join, zip(types, names, strict=True)))})'


def _source(x: Sequence[int], weights: Sequence[Sequence[int]], types: Sequence[str]) -> str:
    num, width = x
    total = sum(size for size, _ in weights)
    calls, offset = [], 0
    for i, (size, _) in enumerate(weights):
        dtype = types[i + 1].removeprefix("const ").removesuffix("*")
        calls.append(
            f"llama_export::rows_of<{dtype}, {num}>"
            f"(x, w{i}, {size}, {width}, {offset}, first, last, y, {total});"
        )
        offset += size
    lines = "\n    ".join(calls)
    return f"""
#include <torch/csrc/inductor/cpp_prefix.h>
{_HELPERS}
{_signature(types)}
{{
  #pragma omp parallel
  {{
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t first = {total}L * thread / threads, last = {total}L * (thread + 1) / threads;
    {lines}
  }}
}}
"""


@register_lowering(torch.ops.llama_export.products.default, type_promotion_kind=None)
def _lower(x: ir.TensorBox, weights: Sequence[ir.TensorBox]) -> ir.TensorBox:
    inputs = [
        ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(t)) for t in (x, *weights)
    ]
    total = sum(int(weight.get_size()[0]) for weight in weights)
    layout = ir.FixedLayout(x.get_device_or_error(), torch.float32, [x.get_size()[0], total])
    return ir.TensorBox.create(Products(layout, inputs))
