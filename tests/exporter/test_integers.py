"""Weights of small integers: how they are rounded, decoded and multiplied, against plain torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import ChoiceError
from llama_artifacts.manifest import Quantized
from llama_export.checkpoint.layout import Codes
from llama_export.checkpoint.source import TensorInfo
from llama_export.model import integers
from llama_export.model.formulation import Formulation
from llama_export.model.linear import Embedding, Linear, together
from llama_export.model.products import products
from llama_export.quantize import quantize, quantized_tensors
from tests.exporter.native import ISAS, call_by_threads, compile_native, kernel_sources, load_native

GROUPS = (32, 64, 128, None)
KINDS = {"int8": "i8", "int4": "u8"}
CODES = [Codes(dtype, size) for dtype in KINDS.values() for size in GROUPS]
MADE_ELSEWHERE = [
    Codes("i8", 32, "f16"),
    Codes("u8", 32, "f16"),
    Codes("u8", 32, "f16", has_min=True),
    Codes("u8", 32, "f32", has_min=True),
    Codes("u8", 64, "bf16", has_min=True),
    Codes("i8", None, "f32", has_min=True),
]
"""Codes that checkpoints come with."""
FORM = Formulation(torch.float32, reads_positions=True)
FUSED = Formulation(torch.float32, reads_positions=True, max_fused_rows=3)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


class Stored(NamedTuple):
    """A weight of codes [V, H] with their factors [V, G]."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None

    @property
    def width(self) -> int:
        return self.codes.shape[1] * (1 if self.codes.dtype == torch.int8 else 2)

    def value(self, row: int, column: int) -> float:
        """One value, read byte by byte."""
        group = column * self.scale.shape[1] // self.width
        factor = float(self.scale[row, group])
        lowest = 0.0 if self.minimum is None else float(self.minimum[row, group])
        if self.codes.dtype == torch.int8:
            return int(self.codes[row, column]) * factor + lowest
        block, place = divmod(column, 32)
        byte = int(self.codes[row, 16 * block + place % 16])
        code = byte & 15 if place < 16 else byte >> 4
        return (code - (8 if self.minimum is None else 0)) * factor + lowest

    def plain(self) -> Tensor:
        """Every value, float64 [out, in]."""
        rows = range(len(self.codes))
        found = [[self.value(row, column) for column in range(self.width)] for row in rows]
        return torch.tensor(found, dtype=torch.float64)


def rounded(weight: Tensor, codes: Codes) -> Stored:
    return Stored(*quantize(weight, codes))


def drawn(num_rows: int, width: int, codes: Codes, seed: int = 0) -> Stored:
    """Random codes, and factors that make values of about 1 of them, of either sign.

    Factors have as many bits as float16, so that products with codes are exact in float32.
    """
    shape, factors = codes.shape((num_rows, width)), codes.factor_shape((num_rows, width))
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    dtype = getattr(torch, from_name(codes.scale_dtype).torch)
    size = 127 if codes.dtype == "i8" else 8
    scale = (draw(*factors, seed=seed + 1) / size).half().to(dtype)
    minimum = draw(*factors, seed=seed + 2).half().to(dtype) if codes.has_min else None
    return Stored(made.view(torch.int8) if codes.dtype == "i8" else made, scale, minimum)


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
    found = rounded(weight, codes)
    scales = found.scale
    size = codes.group_size or 256
    assert scales.dtype == torch.bfloat16
    assert scales.shape == (6, 256 // size)
    assert found.codes.shape == (6, 256 if codes.dtype == "i8" else 128)
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
            stored = found.value(row, group * size + place)
            assert stored == pytest.approx(code * scale, abs=1e-12, rel=1e-6)


@pytest.mark.parametrize("size", [32, 64, None])
def test_codes_beside_minima_are_those_of_each_group(size: int | None) -> None:
    weight = draw(4, 128) * torch.logspace(-4, 1, 4)[:, None] + torch.tensor([[0], [1], [-3], [0]])
    weight[3, :64] = 0.3
    found = rounded(weight, Codes("u8", size, has_min=True))
    assert found.minimum is not None
    assert found.scale.dtype == found.minimum.dtype == torch.bfloat16
    groups = weight.unflatten(-1, (-1, size or 128)).double()
    factors = zip(found.scale.flatten(), found.minimum.flatten(), strict=True)
    errors = (found.plain() - weight.double()).unflatten(-1, (-1, size or 128)).square().sum(-1)
    for values, (scale, minimum), got in zip(
        groups.flatten(0, 1), factors, errors.flatten(), strict=True
    ):
        tried = []
        for span in (1, 0.95, 0.9, 0.85):
            middle, half = (values.max() + values.min()) / 2, (values.max() - values.min()) / 2
            low = (middle - span * half).bfloat16()
            step = ((middle + span * half - low.double()) / 15).bfloat16()
            tried.append((float(step), float(low)))
        assert (float(scale), float(minimum)) in tried
        least = min(
            error([float(value) - low for value in values], step, 0, 15) for step, low in tried
        )
        assert float(got) <= least * (1 + 1e-4) + 1e-12


def test_a_tensor_is_rounded_alike_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(7, 64)
    whole = quantize(weight, CODES[4])
    monkeypatch.setattr("llama_export.quantize._CHUNK_VALUES", 130)
    for one, other in zip(whole, quantize(weight, CODES[4]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codes", [*CODES, *MADE_ELSEWHERE], ids=str)
def test_a_decoded_weight_is_made_in_float32_and_rounded_once(
    codes: Codes, dtype: torch.dtype
) -> None:
    found = drawn(3, 128, codes)
    actual = integers.decode(*found, dtype)
    assert torch.equal(actual, found.plain().float().to(dtype))


def test_every_code_of_four_bits_is_kept() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(4).reshape(2, 32)
    packed = integers.pack(values)
    assert packed.shape == (2, 16)
    assert packed[0].tolist() == [17 * code for code in range(16)]
    assert torch.equal(integers.unpack(packed), values.float())
    positive = values + 8
    assert torch.equal(integers.pack(positive, 0), packed)
    assert torch.equal(integers.unpack(packed, 0), positive.float())


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
    for name, part in zip(("", "_scale", "_min"), drawn(24, 128, codes, seed=1), strict=True):
        if part is not None:
            setattr(made, f"weight{name}", nn.Parameter(part, requires_grad=False))
    if made.bias is not None:
        made.bias.data = draw(24, seed=2)
    return made.requires_grad_(False)


def table_of(made: Linear) -> Tensor:
    assert made.weight_scale is not None
    return Stored(made.weight, made.weight_scale, made.weight_min).plain()


def expected(x: Tensor, made: Linear) -> Tensor:
    y = x.double() @ table_of(made).T
    return y if made.bias is None else y + made.bias.double()


@pytest.mark.parametrize("form", [FORM, FUSED], ids=["many rows", "few rows"])
@pytest.mark.parametrize("codes", [*CODES, *MADE_ELSEWHERE], ids=str)
def test_the_product_is_that_of_the_decoded_weight(codes: Codes, form: Formulation) -> None:
    made = layer(codes, form)
    for tokens in ((1,), (3,), (2, 1), (5, 2)):
        x = draw(*tokens, 128, seed=3)
        torch.testing.assert_close(made(x).double(), expected(x, made), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", [FORM, FUSED], ids=["many rows", "few rows"])
@pytest.mark.parametrize("codes", [Codes("i8", 64), MADE_ELSEWHERE[2]], ids=str)
def test_an_embedding_is_looked_up_and_is_a_head(codes: Codes, form: Formulation) -> None:
    made = layer(codes, form, kind=Embedding)
    assert isinstance(made, Embedding)
    rows = made.rows(torch.tensor([[3, 0], [23, 3]]))
    assert torch.equal(rows, table_of(made).float()[torch.tensor([[3, 0], [23, 3]])])
    x = draw(2, 1, 128, seed=3)
    torch.testing.assert_close(made(x).double(), expected(x, made), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", [FORM, FUSED], ids=["many rows", "few rows"])
def test_layers_of_other_kinds_share_an_input(form: Formulation) -> None:
    plain = Linear(128, 24, form)
    plain.weight.data = draw(24, 128, seed=4)
    layers = [layer(MADE_ELSEWHERE[2], form), layer(MADE_ELSEWHERE[2], form), plain]
    layers += [layer(MADE_ELSEWHERE[0], form), layer(CODES[4], form)]
    x = draw(2, 128, seed=3)
    found = together(x, *layers)
    for made, actual in zip(layers, found, strict=True):
        wanted = x.double() @ made.weight.double().T if made is plain else expected(x, made)
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-4)


def test_activations_can_be_differentiated() -> None:
    with torch.enable_grad():
        x = draw(2, 128, seed=1).requires_grad_()
        made = layer(CODES[4], FORM)
        (gradient,) = torch.autograd.grad(made(x).sum(), x)
    torch.testing.assert_close(gradient[0], table_of(made).sum(0).float())


# --- in native code -------------------------------------------------------------------------------

X_DTYPES = (torch.float32, torch.bfloat16)
SHAPES = (
    (Codes("i8"), 40),  # a rest that fills no block
    (Codes("i8", 32), 64),
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
