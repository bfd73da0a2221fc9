"""Writes a tiny Llama checkpoint: seeded weights, a tokenizer that works, a chat template.

It knows nothing of the code under test: the shapes come from the raw config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()  # as an override: leave the key out

SPECIALS = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>")
BYTE_LEVEL_VOCAB = 256 + len(SPECIALS)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """The tiny config.json with some keys set, or left out where `ABSENT`."""
    return {key: value for key, value in {**CONFIG, **overrides}.items() if value is not ABSENT}


def tiny_tensors(
    config: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Seeded weights for a config: matrices around zero, norms around one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _draw(name, shape, generator).to(dtype) for name, shape in _shapes(config).items()
    }


def write_tiny(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 1,
    has_tokenizer: bool = True,
    **config_overrides: Any,
) -> Path:
    """Writes a checkpoint folder and returns it.

    Args:
        folder: made if it is not there.
        seed: of the weights.
        dtype: of the stored weights.
        num_shards: one `model.safetensors`, or that many shards and an index.
        has_tokenizer: also write tokenizer.json and tokenizer_config.json.
        config_overrides: keys of config.json; `ABSENT` leaves one out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**config_overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_weights(folder, tiny_tensors(config, seed=seed, dtype=dtype), num_shards=num_shards)
    if has_tokenizer:
        write_tokenizer(folder, config["vocab_size"])
    return folder


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], *, num_shards: int = 1) -> None:
    """Writes tensors as one safetensors file, or as shards with an index."""
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[number::num_shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer of one token per byte, or per ASCII character where 256 do not fit."""
    is_byte_level = vocab_size >= BYTE_LEVEL_VOCAB
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if is_byte_level else _ascii()
    vocab = {token: index for index, token in enumerate((*SPECIALS, *alphabet))}
    assert len(vocab) <= vocab_size
    tokenizer = Tokenizer(BPE(vocab, [], unk_token="<unk>"))
    if is_byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _ascii() -> list[str]:
    return ["\n", *(chr(code) for code in range(32, 127))]


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    query, keys = heads * width, (config.get("num_key_value_heads") or heads) * width
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    linears = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in linears.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if config.get("attention_bias" if name.startswith("self") else "mlp_bias"):
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return shapes


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * noise
    return noise * (0.2 if "embed" in name else 0.15)
