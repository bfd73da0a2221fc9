"""Weights of small integers: how they are rounded, decoded and multiplied, against plain torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from llama_artifacts.errors import ChoiceError
from llama_artifacts.manifest import Quantized
from llama_export.checkpoint.layout import Codes
from llama_export.checkpoint.source import TensorInfo
from llama_export.model import integers
from llama_export.model.formulation import Formulation
from llama_export.model.linear import Embedding, Linear
from llama_export.model.products import products
from llama_export.quantize import quantize, quantized_tensors
from tests.exporter.native import ISAS, call_by_threads, compile_native, kernel_sources, load_native

GROUPS = (32, 64, 128, None)
KINDS = {"int8": "i8", "int4": "u8"}
CODES = [Codes(dtype, size) for dtype in KINDS.values() for size in GROUPS]
FORM = Formulation(torch.float32, reads_positions=True)
FUSED = Formulation(torch.float32, reads_positions=True, max_fused_rows=3)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def value_of(codes: Tensor, scale: Tensor, row: int, column: int) -> float:
    """One value of a stored weight, read byte by byte."""
    width = codes.shape[1] * (1 if codes.dtype == torch.int8 else 2)
    factor = float(scale[row, column * scale.shape[1] // width])
    if codes.dtype == torch.int8:
        return int(codes[row, column]) * factor
    block, place = divmod(column, 32)
    byte = int(codes[row, 16 * block + place % 16])
    return ((byte & 15 if place < 16 else byte >> 4) - 8) * factor


def plain(codes: Tensor, scale: Tensor) -> Tensor:
    """The stored weight, float32 [out, in]."""
    width = codes.shape[1] * (1 if codes.dtype == torch.int8 else 2)
    rows = [
        [value_of(codes, scale, row, column) for column in range(width)]
        for row in range(codes.shape[0])
    ]
    return torch.tensor(rows)


def error(values: list[float], scale: float, least: int, most: int) -> float:
    """The sum of squared differences after rounding."""
    if scale == 0:
        return sum(value**2 for value in values)
    codes = [min(max(round(value / scale), least), most) for value in values]
    return sum((value - code * scale) ** 2 for value, code in zip(values, codes, strict=True))


# --- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_codes_and_scales_are_those_of_each_group(codes: Codes) -> None:
    weight = draw(6, 256) * torch.logspace(-4, 2, 6)[:, None]
    weight[2, 32:64] = 0
    found, scales = quantize(weight, codes)
    size = codes.group_size or 256
    assert scales.dtype == torch.bfloat16
    assert scales.shape == (6, 256 // size)
    assert found.shape == (6, 256 if codes.dtype == "i8" else 128)
    for row, group in itertools.product(range(6), range(256 // size)):
        values = weight[row, group * size : (group + 1) * size].tolist()
        peak = max(values, key=abs)
        least, most = (-127, 127) if codes.dtype == "i8" else (-8, 7)
        targets = (math.copysign(127, peak),) if codes.dtype == "i8" else (-8, -7.5, -7, -8.5, -9)
        tried = [float(torch.tensor(peak / target).bfloat16()) for target in targets]
        scale = float(scales[row, group])
        assert scale in tried
        errors = [error(values, wanted, least, most) for wanted in tried]
        assert error(values, scale, least, most) <= min(errors) * (1 + 1e-5)
        for place, value in enumerate(values):
            code = min(max(round(value / scale), least), most) if scale else 0
            stored = value_of(found, scales, row, group * size + place)
            assert stored == pytest.approx(code * scale, abs=1e-12, rel=1e-6)


def test_a_tensor_is_rounded_alike_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(7, 64)
    whole = quantize(weight, CODES[4])
    monkeypatch.setattr("llama_export.quantize._CHUNK_VALUES", 130)
    for one, other in zip(whole, quantize(weight, CODES[4]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_a_decoded_weight_is_code_times_scale_rounded_once(
    codes: Codes, dtype: torch.dtype
) -> None:
    found = quantize(draw(3, 128), codes)
    assert torch.equal(integers.decode(*found, dtype), plain(*found).to(dtype))


def test_every_code_of_four_bits_is_kept() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(4).reshape(2, 32)
    packed = integers.pack(values)
    assert packed.shape == (2, 16)
    assert packed[0].tolist() == [17 * code for code in range(16)]
    assert torch.equal(integers.unpack(packed), values.float())


@pytest.mark.parametrize(
    ("quantized", "width", "message"),
    [
        (Quantized("int8", 64), 96, "groups of 64 divide, got 96 of `a.weight`"),
        (Quantized("int4"), 48, "blocks of 32 values divide, got 48 of `a.weight`"),
    ],
)
def test_a_width_that_does_not_divide_is_refused(
    quantized: Quantized, width: int, message: str
) -> None:
    with pytest.raises(ChoiceError, match=message):
        quantized_tensors({"a.weight": TensorInfo("f32", (4, width))}, quantized)


def test_matrices_become_codes_and_the_embedding_keeps_eight_bits() -> None:
    infos = {
        "model.embed_tokens.weight": TensorInfo("bf16", (7, 64)),
        "a.weight": TensorInfo("bf16", (5, 128)),
        "a.bias": TensorInfo("bf16", (5,)),
    }
    assert quantized_tensors(infos, Quantized("int4", 32)) == {
        "model.embed_tokens.weight": TensorInfo("i8", (7, 64)),
        "model.embed_tokens.weight_scale": TensorInfo("bf16", (7, 2)),
        "a.weight": TensorInfo("u8", (5, 64)),
        "a.weight_scale": TensorInfo("bf16", (5, 4)),
        "a.bias": TensorInfo("bf16", (5,)),
    }


# --- products -------------------------------------------------------------------------------------


def layer(codes: Codes, form: Formulation, *, kind: type[Linear] = Linear) -> Linear:
    made = kind(128, 24, form, bias=kind is Linear)
    made.hold(codes)
    found = quantize(draw(24, 128, seed=1), codes)
    made.weight, made.weight_scale = (nn.Parameter(part, requires_grad=False) for part in found)
    if made.bias is not None:
        made.bias.data = draw(24, seed=2)
    return made.requires_grad_(False)


def expected(x: Tensor, made: Linear) -> Tensor:
    assert made.weight_scale is not None
    y = x.double() @ plain(made.weight, made.weight_scale).double().T
    return y if made.bias is None else y + made.bias.double()


@pytest.mark.parametrize("form", [FORM, FUSED], ids=["many rows", "few rows"])
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_the_product_is_that_of_the_decoded_weight(codes: Codes, form: Formulation) -> None:
    made = layer(codes, form)
    for tokens in ((1,), (3,), (2, 1), (5, 2)):
        x = draw(*tokens, 128, seed=3)
        torch.testing.assert_close(made(x).double(), expected(x, made), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [FORM, FUSED], ids=["many rows", "few rows"])
def test_an_embedding_is_looked_up_and_is_a_head(form: Formulation) -> None:
    made = layer(Codes("i8", 64), form, kind=Embedding)
    assert isinstance(made, Embedding)
    assert made.weight_scale is not None
    rows = made.rows(torch.tensor([[3, 0], [23, 3]]))
    table = plain(made.weight, made.weight_scale)
    assert torch.equal(rows, table[torch.tensor([[3, 0], [23, 3]])])
    x = draw(2, 1, 128, seed=3)
    torch.testing.assert_close(made(x).double(), expected(x, made), rtol=1e-5, atol=1e-5)


def test_activations_can_be_differentiated() -> None:
    with torch.enable_grad():
        x = draw(2, 128, seed=1).requires_grad_()
        made = layer(CODES[4], FORM)
        (gradient,) = torch.autograd.grad(made(x).sum(), x)
    assert made.weight_scale is not None
    wanted = plain(made.weight, made.weight_scale).sum(0)
    torch.testing.assert_close(gradient[0], wanted)


# --- in native code -------------------------------------------------------------------------------

X_DTYPES = (torch.float32, torch.bfloat16)
SHAPES = (
    ("i8", 40, None),  # a rest that fills no block
    ("i8", 64, 32),
    ("i8", 256, 128),
    ("u8", 96, 32),  # a block without another to pair with
    ("u8", 96, None),
    ("u8", 128, 64),
)
NUM_ROWS = (1, 3, None)  # None: any number
SIZES = (37, 1, 18)
"""Rows of the weights that one call multiplies."""


class Calls(nn.Module):
    """One call for each dtype of x, kind of codes and number of rows, and the first once more.

    Each number of rows is one that is fixed, of x, or open, of y.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cases = list(itertools.product(X_DTYPES, SHAPES, NUM_ROWS))
        self.cases.append(self.cases[0])
        found = [
            quantize(draw(size, width, seed=i), Codes(dtype, group))
            for i, (_, (dtype, width, group), _) in enumerate(self.cases)
            for size in SIZES
        ]
        for name, parts in zip(("codes", "scales"), zip(*found, strict=True), strict=True):
            frozen = [nn.Parameter(part, requires_grad=False) for part in parts]
            setattr(self, name, nn.ParameterList(frozen))

    def parts(
        self, x: Tensor, y: Tensor
    ) -> Iterator[tuple[Tensor, list[Tensor], list[Tensor], bool]]:
        """X of each call, codes, scales, and whether the weights are decoded first."""
        for i, (dtype, (_, width, _), num_rows) in enumerate(self.cases):
            given = y if num_rows is None else x[:num_rows]
            place = slice(3 * i, 3 * i + 3)
            codes, scales = list(self.codes)[place], list(self.scales)[place]
            yield given[:, :width].to(dtype), codes, scales, num_rows is None

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [
            products(given, codes, scales, False) for given, codes, scales, _ in self.parts(x, y)
        ]

    def check(self, actual: list[Tensor], x: Tensor, y: Tensor) -> None:
        for result, (given, codes, scales, is_decoded) in zip(
            actual, self.parts(x, y), strict=True
        ):
            pairs = zip(codes, scales, strict=True)
            weights = torch.cat([plain(*pair) for pair in pairs]).double().T
            wide = given.double()
            # A decoded weight may be rounded to bf16.
            allowed = 2**-8 if is_decoded and given.dtype == torch.bfloat16 else 1e-6
            limit = allowed * (wide.abs() @ weights.abs()) + 1e-6
            assert ((result - wide @ weights).abs() <= limit).all()


def test_the_operator_is_products_with_decoded_weights() -> None:
    calls, x, y = Calls(), draw(3, 256, seed=99), draw(5, 256, seed=98)
    calls.check(calls(x, y), x, y)


@pytest.mark.parametrize("dtype", X_DTYPES, ids=str)
def test_the_operator_is_whole(dtype: torch.dtype) -> None:
    weights = [quantize(draw(size, 64, seed=size), Codes("u8", 32)) for size in (5, 2)]
    arguments = (
        draw(2, 64).to(dtype),
        [codes for codes, _ in weights],
        [scale for _, scale in weights],
        False,
    )
    torch.library.opcheck(torch.ops.llama_export.products.default, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_the_kernel_in_native_code(isa: str, tmp_path: Path) -> None:
    calls, x = Calls(), draw(3, 256, seed=99)
    dims = (None, {0: torch.export.Dim("rows", min=1, max=64)})
    package = compile_native(calls, (x, draw(5, 256, seed=98)), isa, tmp_path, dims)
    run = load_native(package, calls)
    for num_rows in (1, 5, 20):
        y = draw(num_rows, 256, seed=num_rows)
        calls.check(call_by_threads(run, x, y), x, y)
    code = kernel_sources(package)
    assert code.count('extern "C" void llama_codedproducts') == len(calls.cases) - 1
