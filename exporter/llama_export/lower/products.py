"""The kernels of `llama_export::products` in native code, `products.h` and others in `kernels`.

Inductor puts a multiply and reduce into functions that hold a whole network, and reads the weights
that share an input side by side. These kernels read them at the speed of the memory, each thread a
part that lies together in a few streams; their source depends on shapes and dtypes alone, so that
all layers share one function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
from torch._inductor.lowering import register_lowering

import llama_export.model.products  # noqa: F401  # the operator
from llama_export.lower.kernel import Call, Kernel, headers

MAX_ROWS = 64
"""Up to so many rows of x these kernels beat a library's products, whatever the CPU and dtype."""

_FEW = 3
"""Rows of x that are multiplied as dot products; `few` in the kernel."""
_COLUMNS = 32
"""Rows of a weight that a thread takes at once; `columns` in the kernel."""

# Of a thread: calls that make the blocks of all weights in turn.
_LOOP = """
  for (int64_t block, end; blocks.take(&block, &end);)
    for (; block < end; ++block) {{
      {calls}
    }}
"""
# Many rows, where the library is better at them; other CPUs have no tiles, and get no such calls.
_LIBRARY = """
#if defined(CPU_CAPABILITY_AVX512)
  if (num > {max_rows} && llama_export::has_tiles()) {{
    {calls}
    return;
  }}
#endif
"""
_SHARED = """{{{library}
  const llama_export::Given<{dtype}> given(x, num, {width}, {has_pairs});
  llama_export::Blocks blocks({num_blocks});
  #pragma omp parallel
  {{{loop}  }}
}}
"""
_OWN = """{{
  llama_export::Blocks blocks({num_blocks});
  #pragma omp parallel
  llama_export::with_rows<{kind}>(x, [&](const auto& rows) {{{loop}  }});
}}
"""


class _Products(Kernel):
    def _parameters(self, dtypes: Sequence[str], num_weights: int) -> list[tuple[str, str]]:
        """Of a kernel of x, weights, and perhaps scales and minima for each."""
        names = ["x", *(f"{kind}{i}" for kind in "wsm" for i in range(num_weights))][: len(dtypes)]
        inputs = [(f"const {dtype}*", name) for dtype, name in zip(dtypes, names, strict=True)]
        return [*inputs, ("int64_t", "num"), (f"{DTYPE_TO_CPP[self.dtype]}*", "y")]


class Products(_Products):
    """Inputs are x [R, H] and the weights [V, H]; the count is R."""

    def source(
        self, dtypes: Sequence[str], sizes: Sequence[Sequence[Any]]
    ) -> tuple[str, Call, str]:
        (num, width), *weights = sizes
        rows = [int(size) for size, _ in weights]
        calls = [f"rows_of<{_few(num)}>(given, w{i}, {size}" for i, size in enumerate(rows)]
        has_bf16 = all(dtype == "at::BFloat16" for dtype in dtypes[1:])
        body = _SHARED.format(
            dtype=dtypes[0],
            width=width,
            has_pairs="true" if has_bf16 else "false",
            library=_library(num, rows, width) if has_bf16 and dtypes[0] == dtypes[1] else "",
            num_blocks=_num_blocks(rows),
            loop=_loop(rows, calls),
        )
        return headers("vectors", "blocks", "products"), self._parameters(dtypes, len(rows)), body


class CodedProducts(_Products):
    """Inputs are x [R, H], the codes of each weight, then the scales [V, G] of each.

    Weights of one call have codes of one dtype, scales of one dtype and groups of one size. For few
    rows of bf16, x becomes whole numbers of 14 or 15 bits below the largest of those that share a
    scale, so that products with codes are whole and exact; of other dtypes, codes become floats in
    registers. A group's sum is multiplied by its scale in float32. For more rows, weights are
    decoded.
    """

    _num_parts = 2
    """Inputs for each weight."""

    def source(
        self, dtypes: Sequence[str], sizes: Sequence[Sequence[Any]]
    ) -> tuple[str, Call, str]:
        (num, width), *rest = sizes
        weights = rest[: len(rest) // self._num_parts]
        rows, few = [int(size) for size, _ in weights], _few(num)
        group, has_min = width // rest[len(rows)][1], "true" if self._num_parts > 2 else "false"
        name = f"coded_rows_of<{width}, {group}>(rows" if few else f"decoded_rows_of<{group}>(given"
        factors = f"llama_export::Factors<{dtypes[1 + len(rows)]}, {has_min}>"
        calls = [
            f"{name}, w{i}, {factors}{{s{i}, {f'm{i}' if self._num_parts > 2 else 'nullptr'}}}, {size}"
            for i, size in enumerate(rows)
        ]
        loop = _loop(rows, calls)
        if few:
            kind = f"{dtypes[0]}, {dtypes[1]}, {few}, {width}, {group}, {has_min}"
            body = _OWN.format(kind=kind, num_blocks=_num_blocks(rows), loop=loop)
        else:
            body = _SHARED.format(
                dtype=dtypes[0],
                width=width,
                has_pairs="true",
                library="",
                num_blocks=_num_blocks(rows),
                loop=loop,
            )
        parameters = self._parameters(dtypes, len(rows))
        return headers("vectors", "blocks", "products", "integers", "code_dots"), parameters, body


class LiftedProducts(CodedProducts):
    """The same with the minima [V, G] of each weight as further inputs.

    For few rows each is multiplied by the sum of x over its group.
    """

    _num_parts = 3


def _library(num: Any, rows: Sequence[int], width: Any) -> str:
    """All products by the library, unless the number of rows is known to be small."""
    if _few(num):
        return ""
    total, calls = sum(rows), []
    for i, size in enumerate(rows):
        y = f"y + {sum(rows[:i])}, {total}"
        calls.append(f"llama_export::by_library(x, num, {width}, w{i}, {size}, {y});")
    return _LIBRARY.format(max_rows=MAX_ROWS, calls="\n    ".join(calls))


def _few(num: Any) -> int:
    """The number of rows where it is known and small, else 0."""
    return int(num) if isinstance(num, int | sympy.Integer) and num <= _FEW else 0


def _loop(rows: Sequence[int], calls: Sequence[str]) -> str:
    """The blocks of weights of so many rows; each call lacks its last arguments."""
    lines = []
    for i, call in enumerate(calls):
        first, end = _num_blocks(rows[:i]), _num_blocks(rows[: i + 1])
        place = f"block - {first}, y + {sum(rows[:i])}, {sum(rows)}"
        lines.append(f"if (block < {end}) llama_export::{call}, {place});")
    return _LOOP.format(calls="\n      else ".join(lines))


def _num_blocks(rows: Sequence[int]) -> int:
    return sum(-(-size // _COLUMNS) for size in rows)


@register_lowering(torch.ops.llama_export.products.default, type_promotion_kind=None)
def _lower(
    x: ir.TensorBox,
    weights: Sequence[ir.TensorBox],
    scales: Sequence[ir.TensorBox],
    minima: Sequence[ir.TensorBox],
    is_rounded: bool,
) -> ir.TensorBox:
    num = x.get_size()[0]
    size = [num, sum(int(weight.get_size()[0]) for weight in weights)]
    kind = LiftedProducts if minima else CodedProducts if scales else Products
    dtype = x.get_dtype() if is_rounded else torch.float32
    return ir.TensorBox.create(kind([x, *weights, *scales, *minima], size, (num,), dtype))
