from __future__ import annotations

import dataclasses

import pytest

from llama_export.checkpoint.config import LlamaConfig, RopeConfig
from llama_export.checkpoint.layout import expected_tensors
from llama_export.checkpoint.names import to_gguf, to_hf
from tests.tiny_gguf import gguf_name

CONFIG = LlamaConfig(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_layers=12,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    max_position=64,
    tie_word_embeddings=False,
    attention_bias=True,
    mlp_bias=True,
)


@pytest.mark.parametrize("has_bias", [False, True])
def test_every_tensor_of_a_network_goes_there_and_back(has_bias: bool) -> None:
    config = dataclasses.replace(CONFIG, attention_bias=has_bias, mlp_bias=has_bias)
    names = list(expected_tensors(config))
    there = [to_gguf(name) for name in names]
    assert there == [gguf_name(name) for name in names]
    assert len(set(there)) == len(names)
    assert [to_hf(name) for name in there if name] == names


@pytest.mark.parametrize(
    "name",
    [
        "", "blk.0", "blk.01.attn_q.weight", "blk.-1.attn_q.weight", "blk.{}.attn_q.weight",
        "blk.0.attn_norm.bias", "blk.0.ffn_gate_exps.weight", "blk.0.attn_q.weight.scale",
        "blk.0.1.attn_q.weight", "blk.٣.attn_q.weight", "token_embd", "token_embd.bias",
        "rope_freqs.weight", "output_norm.weight ", "blk.99999999999.attn_q.weight",
    ],
)  # fmt: skip
def test_other_names_have_no_translation(name: str) -> None:
    assert to_hf(name) is None
    assert to_gguf(name) is None
