"""Rotary tables against transformers' and against published values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig as ReferenceConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from llama_export.checkpoint.config import RopeConfig, config_from_hf
from llama_export.model import rope
from tests.tiny import tiny_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Head width 16.
TINY_LLAMA3 = [
    *(1, 0.24438459, 0.013042256, 0.0039528473),
    *(0.00125, 0.00039528473, 0.000125, 3.9528473e-05),
]
PUBLISHED_LLAMA3 = [
    *(1, 0.19392276, 0.037606031, 0.0072926651),
    *(0.000524846022, 3.4281024e-05, 6.6478697e-06, 1.2891732e-06),
]
DIVISORS = (1, 1.294, 7.667, 8, 8, 8, 8, 8)


def our_table(**overrides: Any) -> torch.Tensor:
    config = config_from_hf(tiny_config(**overrides), where="config.json")
    return rope.inverse_frequencies(config.rope, config.head_dim)


def reference(**overrides: Any) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(ReferenceConfig(**tiny_config(**overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_theta": 100000, "head_dim": 64},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 32}, "rope_theta": 500000},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "head_dim": 128},
    ],
)
def test_the_table_is_the_references_bit_for_bit(overrides: dict[str, Any]) -> None:
    assert torch.equal(our_table(**overrides), reference(**overrides).inv_freq)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_llama3_gives_the_published_values(key: str) -> None:
    tiny = our_table(rope_scaling={key: "llama3", **LLAMA3})
    torch.testing.assert_close(tiny, torch.tensor(TINY_LLAMA3), rtol=1e-6, atol=0)
    scaling = {key: "llama3", **LLAMA3, "original_max_position_embeddings": 8192}
    large = our_table(rope_scaling=scaling, rope_theta=500000)
    torch.testing.assert_close(large, torch.tensor(PUBLISHED_LLAMA3), rtol=1e-6, atol=0)


def test_a_factor_of_32_divides_the_longest_wavelength_exactly() -> None:
    scaled = our_table(rope_scaling={"rope_type": "llama3", **LLAMA3, "factor": 32})
    assert scaled[-1] == our_table()[-1] / 32


def test_integers_are_as_good_as_floats() -> None:
    integers = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling = {"rope_type": "llama3", **LLAMA3}
    assert torch.equal(
        our_table(rope_scaling=scaling, rope_theta=500000.0),
        our_table(rope_scaling={**scaling, **integers}, rope_theta=500000),
    )


def test_divisors_divide_one_frequency_each() -> None:
    divided = rope.inverse_frequencies(RopeConfig(1e4, "divisors", divisors=DIVISORS), 16)
    expected = [10000 ** (-2 * i / 16) / divisor for i, divisor in enumerate(DIVISORS)]
    torch.testing.assert_close(divided, torch.tensor(expected), rtol=1e-6, atol=0)
    # They are llama3's blend, rounded to four digits.
    torch.testing.assert_close(divided, torch.tensor(TINY_LLAMA3), rtol=1e-3, atol=0)


def test_the_table_is_float32_whatever_the_default_dtype() -> None:
    expected = our_table()
    torch.set_default_dtype(torch.float64)
    try:
        table = our_table()
    finally:
        torch.set_default_dtype(torch.float32)
    assert table.dtype == torch.float32
    assert torch.equal(table, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotations_equal_the_references_bit_for_bit(dtype: torch.dtype) -> None:
    model, positions = reference(), torch.arange(300, dtype=torch.int32)[None]
    cos, sin = rope.rotations(positions, model.inv_freq, dtype)
    expected_cos, expected_sin = model(torch.zeros(1, dtype=dtype), positions)
    assert torch.equal(cos, expected_cos)
    assert torch.equal(sin, signed(expected_sin))


def signed(sin: torch.Tensor) -> torch.Tensor:
    """The other sign in the first half: how the two ways to write a rotation differ."""
    first, second = sin.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)


def test_positions_that_bfloat16_cannot_tell_apart_differ() -> None:
    table = our_table()
    near, far = rope.rotations(torch.tensor([256, 257], dtype=torch.int32), table, torch.bfloat16)
    assert not torch.equal(near[0], near[1])
    assert not torch.equal(far[0], far[1])
    # The phase of a distant position, in float64, is the judge.
    position = 8191
    cos, _ = rope.rotations(torch.tensor([position]), table, torch.bfloat16)
    exact = (position * table.double()).cos()
    torch.testing.assert_close(cos[0, :8].double(), exact, rtol=0, atol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotating_equals_the_reference_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(2, 30, 4, 16).to(dtype), torch.arange(30)[None]
    cos, sin = rope.rotations(positions, our_table(), dtype)
    ours = rope.rotate(x, cos[:, :, None], sin[:, :, None])
    expected, _ = apply_rotary_pos_emb(x, x, cos, signed(sin), unsqueeze_dim=2)
    assert torch.equal(ours, expected)
