"""Products with weights of small integers: the operator, and its kernel in native code."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from llama_export.checkpoint.layout import Codes
from llama_export.model.products import products
from tests.exporter.codes import MADE_ELSEWHERE, Stored, draw, drawn
from tests.exporter.native import ISAS, call_by_threads, compile_native, kernel_sources, load_native


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


X_DTYPES = (torch.float32, torch.bfloat16)
SHAPES = (
    (Codes("i8"), 40),  # a rest that fills no block
    (Codes("i8", 32), 64),
    (Codes("i8", 64), 192),
    (Codes("i8", 128), 256),
    (Codes("u8", 32), 96),  # a block without another to pair with
    (Codes("u8"), 320),
    (Codes("i8"), 200),
    (Codes("u8", 64), 128),
)
NUM_ROWS = (1, 3, None)  # None: any number
OTHERS = (
    (Codes("i8", 32, "f16"), 96),
    (Codes("i8", None, "f32", has_min=True), 40),
    (Codes("u8", 32, "f16"), 96),
    (Codes("u8", 32, "f16", has_min=True), 96),
    (Codes("u8", 32, "f32", has_min=True), 256),
    (Codes("u8", 64, "bf16", has_min=True), 128),
)
"""Codes that checkpoints come with."""
SIZES = (37, 1, 18)
"""Rows of the weights that one call multiplies."""


class Calls(nn.Module):
    """One call for each dtype of x, kind of codes and number of rows, and the first once more.

    Each number of rows is one that is fixed, of x, or open, of y.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cases = [*itertools.product(X_DTYPES, SHAPES, NUM_ROWS)]
        self.cases += itertools.product(X_DTYPES, OTHERS, (2, None))
        self.cases.append(self.cases[0])
        self.stored = nn.ModuleList(
            nn.ParameterList(self._weights(codes, width, seed=i))
            for i, (_, (codes, width), _) in enumerate(self.cases)
        )

    def _weights(self, codes: Codes, width: int, seed: int) -> list[nn.Parameter]:
        """The codes of all weights, then their scales, then their minima."""
        found = [drawn(size, width, codes, seed=3 * seed + size) for size in SIZES]
        parts = [part for parts in zip(*found, strict=True) for part in parts if part is not None]
        return [nn.Parameter(part, requires_grad=False) for part in parts]

    def parts(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, list[list[Tensor]], bool]]:
        """X of each call, codes, scales and minima, and whether the weights are decoded first."""
        for stored, (dtype, (_, width), num_rows) in zip(self.stored, self.cases, strict=True):
            given, flat = y if num_rows is None else x[:num_rows], list(stored)
            kinds = [flat[3 * part : 3 * part + 3] for part in range(3)]
            yield given[:, :width].to(dtype), kinds, num_rows is None

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [products(given, *kinds, False) for given, kinds, _ in self.parts(x, y)]

    def check(self, actual: list[Tensor], x: Tensor, y: Tensor) -> None:
        parts = self.parts(x, y)
        for result, (given, kinds, is_decoded) in zip(actual, parts, strict=True):
            weights = torch.cat([Stored(*part).plain() for part in self._stored(kinds)]).T
            terms = torch.cat([self._terms(Stored(*part)) for part in self._stored(kinds)]).T
            wide = given.double()
            # Of x in bf16, a decoded weight may be rounded to bf16, or x to 14 bits below the
            # largest number that shares a scale with it; minima are added by themselves.
            is_rounded = given.dtype == torch.bfloat16
            allowed = 2 ** -(8 if is_decoded else 13) if is_rounded else 1e-6
            limit = allowed * (wide.abs() @ terms) + 1e-6
            assert ((result - wide @ weights).abs() <= limit).all()

    def _stored(self, kinds: list[list[Tensor]]) -> Iterator[list[Tensor]]:
        """Codes, scale and perhaps minimum of each weight."""
        for parts in zip(*(kind for kind in kinds if kind), strict=True):
            yield list(parts)

    def _terms(self, stored: Stored) -> Tensor:
        """The magnitudes of what is added up."""
        if stored.minimum is None:
            return stored.plain().abs()
        size = stored.width // stored.minimum.shape[1]
        lowest = stored.minimum.double().repeat_interleave(size, dim=1)
        return (stored.plain() - lowest).abs() + lowest.abs()


def test_the_operator_is_products_with_decoded_weights() -> None:
    calls, x, y = Calls(), draw(3, 320, seed=99), draw(5, 320, seed=98)
    calls.check(calls(x, y), x, y)


@pytest.mark.parametrize("dtype", X_DTYPES, ids=str)
@pytest.mark.parametrize("codes", [Codes("u8", 32), MADE_ELSEWHERE[2]], ids=str)
def test_the_operator_is_whole(codes: Codes, dtype: torch.dtype) -> None:
    weights = [drawn(size, 64, codes, seed=size) for size in (5, 2)]
    kinds = [list(kind) for kind in zip(*weights, strict=True)]
    minima = kinds[2] if codes.has_min else []
    arguments = (draw(2, 64).to(dtype), *kinds[:2], minima, False)
    torch.library.opcheck(torch.ops.llama_export.products.default, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_the_kernel_in_native_code(isa: str, tmp_path: Path) -> None:
    calls, x = Calls(), draw(3, 320, seed=99)
    dims = (None, {0: torch.export.Dim("rows", min=1, max=64)})
    package = compile_native(calls, (x, draw(5, 320, seed=98)), isa, tmp_path, dims)
    run = load_native(package, calls)
    for num_rows in (1, 5, 20):
        y = draw(num_rows, 320, seed=num_rows)
        calls.check(call_by_threads(run, x, y), x, y)
    code = kernel_sources(package)
    kinds = [codes.has_min for _, (codes, _), _ in calls.cases[:-1]]
    for name, count in (("coded", kinds.count(False)), ("lifted", kinds.count(True))):
        assert code.count(f'extern "C" void llama_{name}products') == count
    # What is not finite stays so, and in its row.
    hostile = x.clone()
    hostile[1, 3], hostile[2, 7] = float("nan"), float("inf")
    y = draw(2, 320, seed=7)
    expected, actual = run(x, y), run(hostile, y)
    for one, other, (given, _, is_open) in zip(
        expected, actual, calls.parts(hostile, y), strict=True
    ):
        if not is_open:
            assert torch.equal(one[0], other[0])
            assert not other[1:].isfinite().any(), given.dtype
