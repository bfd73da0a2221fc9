"""Products of some rows with several weights: the operator, and its kernel in native code."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llama_export.lower import kernel
from llama_export.model.products import products
from tests.exporter.native import (
    BEST,
    ISAS,
    OTHERS,
    call_by_threads,
    compile_native,
    kernel_sources,
    load_native,
)

DTYPES = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
)
"""Of x and of the weights."""
WIDTHS = (1, 15, 64, 100)  # less than a vector, whole vectors, and vectors with a rest
NUM_ROWS = (1, 3, 4, 29)  # dot products, and tiles of several sizes
SIZES = (37, 1, 64)
"""Rows of the weights that one call multiplies."""


def draw(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def given(x: Tensor, y: Tensor, num_rows: int | None) -> Tensor:
    return y if num_rows is None else x[:num_rows]


class Calls(nn.Module):
    """One call for each pair of dtypes, width and number of rows, and the first once more.

    Each number of rows is one that is fixed, of x, or open, of y.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cases = list(itertools.product(DTYPES, WIDTHS, (*NUM_ROWS, None)))
        self.cases.append(self.cases[0])
        self.weights = nn.ParameterList(
            nn.Parameter(draw(size, width, seed=i).to(dtype), requires_grad=False)
            for i, ((_, dtype), width, _) in enumerate(self.cases)
            for size in SIZES
        )

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        parts = [list(self.weights)[i : i + 3] for i in range(0, len(self.weights), 3)]
        return [
            products(
                given(x, y, num_rows)[:, :width].to(dtype).contiguous(), weights, [], [], False
            )
            for ((dtype, _), width, num_rows), weights in zip(self.cases, parts, strict=True)
        ]

    def exact(self, x: Tensor, y: Tensor) -> list[Tensor]:
        whole = [torch.cat(list(self.weights)[i : i + 3]) for i in range(0, len(self.weights), 3)]
        return [
            given(x, y, num_rows)[:, :width].to(dtype).double() @ weight.double().T
            for ((dtype, _), width, num_rows), weight in zip(self.cases, whole, strict=True)
        ]


def test_the_operator_is_products_side_by_side() -> None:
    calls, x, y = Calls(), draw(NUM_ROWS[-1], 100, seed=99), draw(2, 100, seed=98)
    for actual, expected in zip(calls(x, y), calls.exact(x, y), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_operator_is_whole() -> None:
    x, weights = draw(2, 33, seed=0), [draw(5, 33, seed=1), draw(2, 33, seed=2).bfloat16()]
    torch.library.opcheck(torch.ops.llama_export.products.default, (x, weights, [], [], False))


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_the_kernel_in_native_code(isa: str, tmp_path: Path) -> None:
    calls, x = Calls(), draw(NUM_ROWS[-1], 100, seed=99)
    dims = (None, {0: torch.export.Dim("rows", min=1, max=64)})
    package = compile_native(calls, (x, draw(5, 100, seed=98)), isa, tmp_path, dims)
    run = load_native(package, calls)
    for num_rows in (1, 2, 3, 4, 34, 64):
        y = draw(num_rows, 100, seed=num_rows)
        for actual, expected in zip(call_by_threads(run, x, y), calls.exact(x, y), strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    # One function for one row, one for three, one for any number.
    code = kernel_sources(package)
    assert code.count('extern "C" void llama_products') == len(DTYPES) * len(WIDTHS) * 3


class Rounded(nn.Module):
    """Each product in float32, and rounded; the rows of x are open."""

    def __init__(self) -> None:
        super().__init__()
        weights = (draw(size, 64, seed=size).bfloat16() for size in SIZES)
        self.weights = nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in weights)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [products(x, list(self.weights), [], [], is_rounded) for is_rounded in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isa", "has_tiles"), [(BEST, True), (BEST, False), *((isa, False) for isa in OTHERS)]
)
def test_rounded_results(
    isa: str, has_tiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the CPU multiplied tiles, too: then many rows are the library's."""
    asked = '__builtin_cpu_supports("amx-bf16")'
    headers = kernel.headers

    def told(*names: str) -> str:
        return headers(*names).replace(asked, "true" if has_tiles else "false")

    monkeypatch.setattr("llama_export.lower.products.headers", told)
    module = Rounded()
    dims: Any = ({0: torch.export.Dim("rows", min=1, max=300)},)
    package = compile_native(module, (draw(5, 64, seed=0).bfloat16(),), isa, tmp_path, dims)
    run = load_native(package, module)
    weight = torch.cat(list(module.weights)).double()
    for num_rows in (1, 3, 5, 64, 65, 300):
        x = draw(num_rows, 64, seed=num_rows).bfloat16()
        exact, rounded = run(x)
        expected = x.double() @ weight.T
        if has_tiles and num_rows > 64 and isa == "avx512":
            assert torch.equal(exact, exact.bfloat16().float())  # the library rounds
            torch.testing.assert_close(exact.double(), expected, rtol=2**-7, atol=1e-2)
        else:
            torch.testing.assert_close(exact.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(rounded, exact.bfloat16())
