"""The model configuration, read strictly: what would change the maths is implemented or refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding (Su et al. 2021, RoFormer), with the scaling of the checkpoint.

    `kind` is `default`, `linear` (positions divided by `factor`), `llama3` (Llama 3.1's blend of
    scaled and unscaled frequencies between two wavelengths) or `divisors` (one divisor per
    frequency, as GGUF's `rope_freqs` tensor stores them).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of one Llama-family network."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
