"""Rotary position embedding (Su et al. 2021, RoFormer) and its scalings.

Shape letters: D head width, so D/2 frequencies; `...` any leading axes.
"""

from __future__ import annotations

import math

import torch

from llama_export.checkpoint.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """The frequencies theta^(-2i/D), scaled as the checkpoint asks; float32 [D/2], in radians.

    The float32 steps are those of the reference implementation, so that the table is equal bit
    for bit. `linear` divides by the factor (Chen et al. 2023, position interpolation); `llama3`
    divides long wavelengths, keeps short ones and blends between (Llama 3.1's published config);
    `divisors` divides each frequency by its own number.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    freqs = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind == "llama3":
        return _llama3(freqs, rope)
    if rope.kind == "divisors":
        return freqs / torch.tensor(rope.divisors, dtype=torch.float32)
    return freqs


def _llama3(freqs: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    wavelengths = 2 * math.pi / freqs
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_scaled = rope.original_max_position / rope.low_freq_factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    scaled = freqs / rope.factor
    blended = (1 - blend) * scaled + blend * freqs
    freqs = torch.where(wavelengths > shortest_scaled, scaled, freqs)
    is_between = (wavelengths <= shortest_scaled) & (wavelengths >= longest_kept)
    return torch.where(is_between, blended, freqs)


def rotations(
    positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [..., D] of integer positions [...], computed in float32, then cast.

    The first half of the sines is negative, as `rotate` adds them.
    """
    angles = positions[..., None].float() * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns each pair (x[i], x[i + D/2]) of [..., D] by its angle."""
    return x * cos + x.unflatten(-1, (2, -1)).flip(-2).flatten(-2) * sin
