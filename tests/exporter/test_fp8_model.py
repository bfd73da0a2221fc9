"""FP8 linear layers against plain torch: every code, every rounding, every way to multiply."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from llama_artifacts.dtypes import from_torch
from llama_artifacts.manifest import Numerics
from llama_export.checkpoint.config import read_hf_config
from llama_export.checkpoint.layout import FP8, expected_tensors, linear_shapes
from llama_export.checkpoint.source import TensorInfo
from llama_export.entries import registry
from llama_export.entries.registry import Sizes
from llama_export.lower.backend import needed_capability
from llama_export.model import fp8
from llama_export.model.formulation import Formulation
from llama_export.model.linear import Linear
from llama_export.model.llama import INV_FREQ
from llama_export.trace import Job, trace
from tests.exporter.native import BEST, OTHERS, compile_native, kernel_sources, load_native
from tests.tiny import tiny_config
from tests.tiny_fp8 import quantize

SHAPES = {
    "square": (64, 64),
    "wide": (32, 64),
    "tall": (128, 64),
    "odd": (136, 72),
    "no vector": (24, 40),
}
EXACT = Formulation(torch.float32, reads_positions=True)
FUSED = replace(EXACT, max_fused_rows=3)
UNITS = Formulation(torch.bfloat16, reads_positions=False, numerics="fast", has_fp8_units=True)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def draw(shape: tuple[int, ...], *, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(
    shape: tuple[int, int],
    form: Formulation,
    *,
    scale_dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
) -> Linear:
    """An FP8 layer of [out, in] whose rows have scales that differ by 4."""
    made = Linear(shape[1], shape[0], form, bias=bias)
    codes, scale = quantize(draw(shape), dtype=scale_dtype)
    made.weight, made.weight_scale = (
        nn.Parameter(tensor, requires_grad=False) for tensor in (codes, scale)
    )
    if made.bias is not None:
        made.bias.data = draw(shape[:1], seed=3)
    return made.requires_grad_(False)


def product(x: Tensor, made: Linear, *, weight_dtype: torch.dtype = torch.float32) -> Tensor:
    """What the layer gives, in float64 but for the one rounding of the weight."""
    assert made.weight_scale is not None
    weight = (made.weight.float() * made.weight_scale.float()).to(weight_dtype).double()
    y = x.double() @ weight.T
    return y if made.bias is None else y + made.bias.double()


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).abs().max() / expected.abs().max())


# --- decoding -------------------------------------------------------------------------------------


def test_half_of_every_code_is_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = codes.float()
    actual = 2 * fp8._half(codes)
    is_number = ~expected.isnan()
    assert int(is_number.sum()) == 254
    assert torch.equal(actual[is_number], expected[is_number])
    assert torch.equal(actual.signbit()[is_number], expected.signbit()[is_number])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_by_bits_is_that_of_a_cast(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[:, None] * (1 + torch.arange(128) / 128))[~codes.isnan()]
    values = torch.cat((ties.flatten(), draw((10_000,)), draw((10_000,)) * 1e-39, -ties[:9, 0]))
    assert torch.equal(fp8._rounded(values, dtype), values.to(dtype).float())


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_decoded_weight_is_code_times_scale_rounded_once(scale_dtype: torch.dtype) -> None:
    codes, scale = quantize(draw((64, 64)), dtype=scale_dtype)
    for dtype in (torch.float32, torch.bfloat16):
        decoded = fp8.decode(codes, scale, dtype)
        for row in range(64):  # a scale of columns would fit the square, too
            assert torch.equal(decoded[row], (codes[row].float() * float(scale[row])).to(dtype))
    largest = fp8.decode(codes, scale, torch.float32).abs().amax(1)
    torch.testing.assert_close(largest, 448 * scale.float()[:, 0], rtol=2**-4, atol=0)


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("form", [EXACT, FUSED], ids=["many rows", "few rows"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_product_is_that_of_the_decoded_weight(
    shape: tuple[int, int], form: Formulation, numerics: Numerics, bias: bool
) -> None:
    made = layer(shape, replace(form, numerics=numerics), bias=bias)
    for tokens in ((1,), (3,), (2, 1), (1, 3), (5, 4)):
        x = draw((*tokens, shape[1]), seed=1)
        actual = made(x)
        assert actual.shape == (*tokens, shape[0])
        assert error(actual, product(x, made)) < 1e-6


@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_in_bf16_exact_is_the_product_of_the_rounded_weight(num_rows: int) -> None:
    """In float32 up to the last rounding, which the fused form makes, too."""
    x = draw((num_rows, 64), seed=1).bfloat16()
    made = layer((64, 64), replace(FUSED, dtype=torch.bfloat16))
    expected = product(x, made, weight_dtype=torch.bfloat16)
    assert made(x).dtype == torch.bfloat16
    assert error(made(x), expected) < 2**-8
    assert made.weight_scale is not None
    if num_rows <= 3:
        y = fp8.fused_product(x, made.weight, made.weight_scale, "exact")
        assert error(y, expected) < 1e-6
        assert error(y, product(x, made)) > 1e-4


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 17])
def test_units_multiply_activations_rounded_row_by_row(num_rows: int) -> None:
    made = layer((128, 64), UNITS, bias=True)
    rows = torch.logspace(-3, 3, num_rows)[:, None]  # a scale for all would lose the small ones
    x = (draw((num_rows, 64), seed=1) * rows).bfloat16()
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    rounded = (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
    y, expected, ideal = made(x), product(rounded, made), product(x, made)
    for row in range(num_rows):
        assert error(y[row], expected[row]) < 2**-7  # bf16, twice
        assert error(y[row], ideal[row]) < 2**-4


def test_activations_are_quantised_by_each_rows_largest() -> None:
    x = draw((6, 64), seed=2)
    x[1] = 0
    x[2] *= 1e30
    x[3] *= 1e-30
    x[4] = 1e-45
    codes, scale = fp8.quantize_rows(x)
    assert codes.dtype == torch.float8_e4m3fn
    assert (scale.shape, scale.dtype) == ((6, 1), torch.float32)
    for row in (0, 2, 3, 5):
        assert float(scale[row]) == float(x[row].abs().max() / 448)
        assert float(codes[row].float().abs().max()) == 448
        assert torch.equal(codes[row].float(), (x[row] / scale[row]).to(codes.dtype).float())
    assert torch.equal(codes[1].float(), torch.zeros(64))
    assert codes.float().isfinite().all()


@pytest.mark.parametrize("form", [EXACT, FUSED, replace(FUSED, numerics="fast"), UNITS])
@pytest.mark.parametrize("num_rows", [3, 5])
def test_neighbours_change_no_bit_of_a_row(form: Formulation, num_rows: int) -> None:
    made = layer((64, 64), form)
    x = draw((num_rows, 64), seed=1).to(form.dtype)
    other = torch.cat((x[:1], 1e4 * x[1:]))
    assert torch.equal(made(x)[0], made(other)[0])


def test_activations_can_be_differentiated() -> None:
    with torch.enable_grad():
        x = draw((2, 64), seed=1).requires_grad_()
        for form in (EXACT, FUSED):
            made = layer((32, 64), form)
            (gradient,) = torch.autograd.grad(made(x).sum(), x)
            torch.testing.assert_close(gradient[0], product(torch.eye(64), made).sum(1).float())


# --- traced for CUDA ------------------------------------------------------------------------------


def job(entry: str, form: Formulation, *, ignored: str = "lm_head", **overrides: object) -> Job:
    config = read_hf_config(tiny_config(**overrides), where="config.json").config
    modules = [name for name in linear_shapes(config) if name != ignored]
    dtype = from_torch(form.dtype).name
    weights = {
        name: TensorInfo("f8e4m3" if name.removesuffix(".weight") in modules else dtype, shape)
        for name, shape in expected_tensors(config, dict.fromkeys(modules, FP8)).items()
    }
    scales = {f"{name}.weight_scale" for name in modules}
    weights |= {name: replace(weights[name], dtype="bf16") for name in scales}
    weights[INV_FREQ] = TensorInfo("f32", (config.head_dim // 2,))
    spec = registry.find(entry)
    sizes = Sizes(config, 2, 64, dtype)
    spec = spec.sized(sizes)
    return Job(config, spec, spec.stem, spec.signature(sizes), form, weights)


def num_unit_products(made: Job) -> tuple[int, dict[str, str]]:
    program = trace(made)
    graphs = [module.graph for module in program.graph_module.modules()]
    calls = [node.target for graph in graphs for node in graph.nodes]
    return calls.count(torch.ops.aten._scaled_mm.default), needed_capability(program)


USUAL = ("forward", "prefill", "step_paged", "generate<Steps>", "loss_packed")
"""One entry of each kind: whole sequences, rows, a pool, loops, training."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry",
    [
        spec.name if spec.name in USUAL else pytest.param(spec.name, marks=pytest.mark.long)
        for spec in registry.entries()
    ],
)
def test_fast_programs_for_cuda_call_the_units_in_every_fp8_layer(entry: str) -> None:
    assert num_unit_products(job(entry, UNITS)) == (14, {"compute capability": "8.9"})


@pytest.mark.slow
def test_widths_that_units_do_not_take_are_decoded() -> None:
    made = job("forward", UNITS, intermediate_size=136)
    assert num_unit_products(made) == (8, {"compute capability": "8.9"})
    made = job("forward", UNITS, hidden_size=72, head_dim=16, intermediate_size=136)
    assert num_unit_products(made) == (0, {})


@pytest.mark.parametrize(
    "form",
    [
        replace(UNITS, numerics="exact"),
        replace(UNITS, has_fp8_units=False),
        replace(FUSED, numerics="fast"),
    ],
    ids=["exact", "no units", "CPU"],
)
def test_other_programs_need_no_units(form: Formulation) -> None:
    assert num_unit_products(job("forward", form)) == (0, {})


def test_on_the_cpu_fast_and_exact_are_one_graph_where_nothing_is_fused() -> None:
    exact, fast = (trace(job("decode", replace(EXACT, numerics=n))) for n in ("exact", "fast"))
    assert exact.graph_module.code == fast.graph_module.code


# --- compiled -------------------------------------------------------------------------------------


class Layers(nn.Module):
    """The same input through layers of every dtype, numerics and kind of scales."""

    def __init__(self) -> None:
        super().__init__()
        forms = [
            replace(FUSED, dtype=dtype, numerics=numerics)
            for dtype in (torch.float32, torch.bfloat16)
            for numerics in ("exact", "fast")
        ]
        self.layers = nn.ModuleList(
            layer(SHAPES[shape], form, scale_dtype=scale_dtype)
            for form in forms
            for shape in ("square", "tall")
            for scale_dtype in (torch.bfloat16, torch.float32)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        # A view with an offset, as a step's last row is one.
        return [made((x * x[:, :1]).to(made.form.dtype)[:, -1]) for made in self.layers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isa", "num_rows"),
    [(BEST, 3), *(pytest.param(isa, 1, marks=pytest.mark.long) for isa in OTHERS)],
)
def test_compiled_products(isa: str, num_rows: int, tmp_path: Path) -> None:
    model, x = Layers(), draw((num_rows, 5, 64), seed=1).bfloat16().float()
    x[:, 0] = 2
    package = compile_native(model, (x,), isa, tmp_path)
    for made, actual in zip(model.layers, load_native(package, model)(x), strict=True):
        assert isinstance(made, Linear)
        is_rounded = made.form.numerics == "exact"
        expected = product(
            2 * x[:, -1], made, weight_dtype=made.form.dtype if is_rounded else torch.float32
        )
        is_narrow = made.form.dtype == torch.bfloat16
        assert error(actual, expected) < (2**-8 if is_narrow else 1e-6), made
    code = kernel_sources(package)
    assert "std::memcpy(&to" in code
    assert "tmpbuf_out" not in code  # an operation that Inductor makes for each element alone
