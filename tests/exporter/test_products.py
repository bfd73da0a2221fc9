"""Products of few rows with several weights: the operator, and its kernel in native code."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from llama_export.model.products import products
from tests.exporter.native import ISAS, call_by_threads, compile_native, kernel_sources, load_native

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 15, 64, 100)  # less than a vector, whole vectors, and vectors with a rest
NUM_ROWS = (1, 3)
SIZES = (5, 1, 18)
"""Rows of the weights that one call multiplies."""


def draw(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


class Calls(nn.Module):
    """One call for each dtype, width and number of rows, and the first once more."""

    def __init__(self) -> None:
        super().__init__()
        self.cases = list(itertools.product(DTYPES, WIDTHS, NUM_ROWS))
        self.cases.append(self.cases[0])
        self.weights = nn.ParameterList(
            nn.Parameter(draw(size, width, seed=i).to(dtype), requires_grad=False)
            for i, (dtype, width, _) in enumerate(self.cases)
            for size in SIZES
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        parts = [list(self.weights)[i : i + 3] for i in range(0, len(self.weights), 3)]
        return [
            products(x[:num_rows, :width].contiguous(), weights, [])
            for (_, width, num_rows), weights in zip(self.cases, parts, strict=True)
        ]

    def exact(self, x: Tensor) -> list[Tensor]:
        whole = [torch.cat(list(self.weights)[i : i + 3]) for i in range(0, len(self.weights), 3)]
        return [
            x[:num_rows, :width].double() @ weight.double().T
            for (_, width, num_rows), weight in zip(self.cases, whole, strict=True)
        ]


def test_the_operator_is_products_side_by_side() -> None:
    calls, x = Calls(), draw(3, 100, seed=99)
    for actual, expected in zip(calls(x), calls.exact(x), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_operator_is_whole() -> None:
    x, weights = draw(2, 33, seed=0), [draw(5, 33, seed=1), draw(2, 33, seed=2).bfloat16()]
    torch.library.opcheck(torch.ops.llama_export.products.default, (x, weights, []))


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_the_kernel_in_native_code(isa: str, tmp_path: Path) -> None:
    calls, x = Calls(), draw(3, 100, seed=99)
    package = compile_native(calls, (x,), isa, tmp_path)
    results = call_by_threads(load_native(package, calls), x)
    for actual, expected in zip(results, calls.exact(x), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    code = kernel_sources(package)
    assert code.count('extern "C" void llama_products') == len(calls.cases) - 1
