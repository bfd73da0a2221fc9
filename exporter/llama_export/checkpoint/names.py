"""The one table between the tensor names of Hugging Face Llama checkpoints and those of GGUF."""

from __future__ import annotations

import re

# A block is `{}`: `model.layers.3.` there, `blk.3.` here. Suffixes are `.weight` and, for linear
# layers, `.bias`.
_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
}
_LINEAR_MODULES = {
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
}
_TO_GGUF = {
    **{f"{hf}.weight": f"{gguf}.weight" for hf, gguf in (_MODULES | _LINEAR_MODULES).items()},
    **{f"{hf}.bias": f"{gguf}.bias" for hf, gguf in _LINEAR_MODULES.items()},
}
_TO_HF = {gguf: hf for hf, gguf in _TO_GGUF.items()}
_LAYER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,8})(?=\.)", re.ASCII)


def to_gguf(name: str) -> str | None:
    """The GGUF name of a Hugging Face tensor name, or None when there is none."""
    return _translate(name, _TO_GGUF)


def to_hf(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor name, or None when there is none."""
    return _translate(name, _TO_HF)


def _translate(name: str, table: dict[str, str]) -> str | None:
    match = _LAYER.search(name)
    if match is None:
        return table.get(name) if "{" not in name else None
    template = table.get(f"{name[: match.start()]}{{}}{name[match.end() :]}")
    return template.format(match[0]) if template else None
