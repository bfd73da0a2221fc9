"""Cases of the kernels for CUDA devices, each compared with the operator that it stands for.

As a script, with TRITON_INTERPRET=1, it runs them all on the CPU, where Triton's interpreter computes
what the kernels say, and prints by case the largest difference and what may be; `tests.gpu` runs the
same cases on a device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from llama_export.lower.cuda_cached import cuda_attend_cached
from llama_export.lower.cuda_products import cuda_products
from llama_export.model.cached import attend_cached
from llama_export.model.products import fp8_products, products

Judge = Callable[[torch.device], tuple[float, float]]
"""Runs a case on a device: the largest difference, and the largest that there may be."""

F32, BF16 = torch.float32, torch.bfloat16
FP8, INT8, INT4 = torch.float8_e4m3fn, torch.int8, torch.uint8
NUM_PAGES, NEVER_READ = 20, float("nan")
ROUNDING = {F32: 2e-5, BF16: 2**-8, torch.float16: 2**-11}
"""Of a value of the dtype, relative; of float32, of a sum."""


@dataclass(frozen=True)
class Product:
    """Weights of `sizes` rows times x [R, width]; `group`: values that share a scale, 0: a row.

    With minima, these and the scales are float32.
    """

    x: torch.dtype
    weight: torch.dtype
    rows: int
    most_rows: int
    width: int
    sizes: tuple[int, ...]
    group: int = 0
    is_exact: bool = False
    is_rounded: bool = False
    has_min: bool = False

    def judge(self, device: torch.device) -> tuple[float, float]:
        parts = [[t.to(device) for t in part] for part in self._arguments()]
        x, weights, scales, minima = parts
        actual = cuda_products(
            x[0], weights, scales, minima, self.is_rounded, self.is_exact, self.most_rows
        )
        if self.weight == FP8:
            expected = fp8_products(x[0], weights, scales, self.is_exact, self.is_rounded)
        else:
            expected = products(x[0], weights, scales, minima, self.is_rounded)
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        size = float(expected.float().abs().max())
        # Several rows are multiplied by decoded weights in x's dtype; so are a few after a sum of f32.
        is_decoded = self.most_rows > 1 and scales and self.x != F32
        limit = ROUNDING[self.x if self.is_rounded or is_decoded else F32] * size
        return float((actual.float() - expected.float()).abs().max()), limit

    def _arguments(self) -> tuple[list[Tensor], ...]:
        """A list of x alone, weights, scales and minima."""
        draw = torch.Generator().manual_seed(self.width + self.rows)
        x = torch.randn(self.rows, self.width, generator=draw).to(self.x)
        weights, scales, minima = [], [], []
        for size in self.sizes:
            if self.weight in (INT8, INT4):
                low, high, stored = (-127, 128, 1) if self.weight == INT8 else (0, 256, 2)
                codes = torch.randint(low, high, (size, self.width // stored), generator=draw)
                weights.append(codes.to(self.weight))
            else:
                weights.append(torch.randn(size, self.width, generator=draw).to(self.weight))
            if self.weight in (INT8, INT4, FP8):
                num = self.width // (self.group or self.width)
                scale = (torch.rand(size, num, generator=draw) + 0.5).to(BF16)
                scales.append(scale.to(F32 if self.has_min else BF16))
                if self.has_min:
                    minima.append(-8 * torch.rand(size, num, generator=draw))
        return [x], weights, scales, minima


@dataclass(frozen=True)
class Attention:
    """Tokens of one call in rows of a scattered table; all but what they see holds no number."""

    dtype: torch.dtype
    kv_heads: int
    group: int
    width: int
    page: int
    positions: tuple[int, ...]
    split_len: int
    columns: int = 5
    q: torch.dtype | None = None

    def judge(self, device: torch.device) -> tuple[float, float]:
        arguments = [tensor.to(device) for tensor in self.arguments()]
        actual = cuda_attend_cached(*arguments, self.split_len)
        expected = attend_cached(*arguments)
        wider = torch.nn.functional.pad(arguments[3], (0, 7))  # page 0 is nobody's
        padded = cuda_attend_cached(*arguments[:3], wider, *arguments[4:], self.split_len)
        alone = [tensor[-1:] for tensor in (arguments[0], *arguments[4:])]
        last = cuda_attend_cached(alone[0], *arguments[1:4], *alone[1:], self.split_len)
        assert torch.equal(padded, actual), "a wider table changes a bit"
        assert torch.equal(last, actual[-1:]), "other tokens change a bit"
        values = arguments[2]
        limit = ROUNDING[self.dtype if self.q is None else F32]
        return float((actual - expected).abs().max()), limit * float(
            values.nan_to_num().abs().max()
        )

    def arguments(self) -> list[Tensor]:
        draw = torch.Generator().manual_seed(self.width + self.page)
        shape = (NUM_PAGES, self.kv_heads, self.page, self.width)
        num = len(self.positions)
        q = torch.randn(num, self.kv_heads * self.group, self.width, generator=draw)
        keys, values = (torch.randn(shape, generator=draw).to(self.dtype) for _ in range(2))
        order = torch.randperm(NUM_PAGES - 1, generator=draw).int() + 1
        table = order[: 3 * self.columns].view(3, self.columns)
        rows = torch.arange(num, dtype=torch.int32) % 3
        positions = torch.tensor(self.positions, dtype=torch.int32)
        self._hide(table, rows, positions, keys, values)
        return [q.to(self.q or self.dtype), keys, values, table, rows, positions]

    def _hide(self, table: Tensor, rows: Tensor, positions: Tensor, *states: Tensor) -> None:
        is_seen = torch.zeros(NUM_PAGES, self.page, dtype=torch.bool)
        for row, position in zip(rows, positions, strict=True):
            for place in range(int(position) + 1):
                is_seen[table[row, place // self.page], place % self.page] = True
        for state in states:
            state.transpose(1, 2)[~is_seen] = NEVER_READ


PRODUCTS = [
    Product(BF16, BF16, 1, 1, 96, (37, 8, 5)),
    Product(BF16, BF16, 1, 1, 2048, (6,), is_rounded=True),
    Product(BF16, BF16, 3, 5, 72, (33, 8), is_rounded=True),
    Product(F32, BF16, 17, 20, 300, (40,)),
    Product(F32, F32, 1, 1, 33, (5, 2)),
    Product(torch.float16, torch.float16, 2, 16, 64, (7, 7, 7)),
    Product(BF16, FP8, 1, 1, 80, (9, 4, 4), is_exact=True),
    Product(BF16, FP8, 1, 1, 1040, (9,)),
    Product(BF16, FP8, 4, 8, 80, (9, 40), is_exact=True, is_rounded=True),
    Product(BF16, FP8, 4, 8, 80, (9, 40)),
    Product(BF16, INT8, 1, 1, 96, (9, 4), group=32),
    Product(BF16, INT8, 1, 1, 96, (9,)),
    Product(BF16, INT8, 2, 4, 384, (9,), group=128, is_rounded=True),
    Product(F32, INT4, 1, 1, 128, (9, 4, 5), group=64),
    Product(BF16, INT4, 1, 1, 4224, (3,), group=128),
    Product(BF16, INT4, 1, 1, 96, (9,)),
    Product(F32, INT4, 3, 64, 160, (34,), group=32),
    Product(BF16, INT4, 3, 8, 160, (9,)),
    Product(F32, INT4, 1, 1, 128, (9, 4), group=32, has_min=True),
    Product(BF16, INT4, 1, 1, 96, (9,), has_min=True),
    Product(F32, INT4, 3, 8, 160, (34,), group=32, has_min=True),
    Product(F32, INT8, 1, 1, 96, (9, 4), group=32, has_min=True),
]
ATTENTION = [
    Attention(BF16, 2, 3, 64, 16, (0, 78, 41, 79), 32),
    Attention(BF16, 1, 4, 128, 8, (39, 7, 8), 16),
    Attention(F32, 1, 8, 80, 16, (70,), 32),
    Attention(F32, 2, 1, 20, 64, (300, 65), 64),
    Attention(torch.float16, 1, 2, 48, 24, (119, 100), 64),
    Attention(BF16, 2, 5, 36, 7, (30, 13), 1024),
    Attention(BF16, 1, 7, 16, 8, (33, 38), 8, q=F32),
    Attention(F32, 1, 6, 32, 64, (313,), 8),
]


def cases() -> Iterator[tuple[str, Judge]]:
    for case in (*PRODUCTS, *ATTENTION):
        yield str(case), case.judge


def compute_as_devices_do() -> None:
    """Triton 3.7's interpreter cuts off bits of bf16, and multiplies its bytes in matrices."""
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(x, source, target, mode)
        return torch.from_numpy(x.copy()).bfloat16().view(torch.uint16).numpy()

    def wide(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (
            self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        )
        return dot(self, a, b, *others)

    interpreter._convert_float = rounded
    interpreter.InterpreterBuilder.create_dot = wide


if __name__ == "__main__":
    compute_as_devices_do()
    found = {name: judge(torch.device("cpu")) for name, judge in cases()}
    sys.stdout.write(json.dumps(found))
