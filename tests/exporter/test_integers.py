"""Weights of small integers: how they are rounded, decoded and multiplied, against plain torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from llama_artifacts.errors import ChoiceError
from llama_artifacts.manifest import Quantized
from llama_export.checkpoint.layout import Codes
from llama_export.checkpoint.source import TensorInfo
from llama_export.model import integers
from llama_export.model.formulation import Formulation
from llama_export.model.linear import Embedding, Linear, together
from llama_export.quantize import quantize, quantized_tensors
from tests.exporter.codes import MADE_ELSEWHERE, Stored, draw, drawn

GROUPS = (32, 64, 128, None)
KINDS = {"int8": "i8", "int4": "u8"}
CODES = [Codes(dtype, size) for dtype in KINDS.values() for size in GROUPS]
FORM = Formulation(torch.float32, reads_positions=True)
FUSED = Formulation(torch.float32, reads_positions=True, max_fused_rows=3)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def rounded(weight: Tensor, codes: Codes) -> Stored:
    return Stored(*quantize(weight, codes))


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
