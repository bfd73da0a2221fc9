"""A tiny Hugging Face Llama folder written as GGUF, the way llama.cpp's converter does it.

Independent of the package's reader: names, row order and tokenizer keys are spelled out here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file

MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_tiny_gguf(
    target: Path,
    hf_folder: Path,
    *,
    quant: dict[str, str] | str = "F32",
    pre: str = "smollm",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Converts a folder; `target` is the file, or a folder to write `tiny.gguf` into.

    `quant` is a type for all matrices, or a type by GGUF tensor name (`*`: the others); vectors
    are F32. K-quants, which the gguf package cannot write, get seeded random blocks. `metadata`
    replaces keys (None leaves one out), `extra` adds tensors. The folder's `tokenizer.json` and
    chat template go in as well.
    """
    path = target / "tiny.gguf" if target.is_dir() else target
    config = json.loads((hf_folder / "config.json").read_text())
    writer = GGUFWriter(path, "llama")
    values = _metadata(config) | _tokenizer(hf_folder, config, pre) | (metadata or {})
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    types = {"*": quant} if isinstance(quant, str) else quant
    for name, tensor in load_file(hf_folder / "model.safetensors").items():
        ours = gguf_name(name)
        array = _permuted(name, tensor.float().numpy(), config)
        kind = "F32" if array.ndim == 1 else types.get(ours, types.get("*", "F32"))
        _add_tensor(writer, ours, array, GGMLQuantizationType[kind])
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    module, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{MODULES[module]}.{suffix}"


def permute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head as llama.cpp rotates them, as in its conversion script."""
    half = array.shape[0] // num_heads // 2
    return array.reshape(num_heads, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _permuted(name: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    if ".q_proj." in name:
        return permute(array, config["num_attention_heads"])
    if ".k_proj." in name:
        return permute(array, config["num_key_value_heads"])
    return array


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.rope.dimension_count": head_dim,
        "llama.rope.freq_base": float(config.get("rope_theta", 10000.0)),
        "llama.vocab_size": config["vocab_size"],
    }


def _tokenizer(folder: Path, config: dict[str, Any], pre: str) -> dict[str, Any]:
    file = folder / "tokenizer.json"
    if not file.exists():
        return {}
    content = json.loads(file.read_text())
    tokens = [f"[PAD{index}]" for index in range(config["vocab_size"])]
    types = [5] * len(tokens)
    for token, index in content["model"]["vocab"].items():
        tokens[index], types[index] = token, 1
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = 3 if added["special"] else 4
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": content["post_processor"] is not None,
    }
    for name in ("bos", "eos"):
        if isinstance(config.get(f"{name}_token_id"), int):
            values[f"tokenizer.ggml.{name}_token_id"] = config[f"{name}_token_id"]
    template = _chat_template(folder)
    if template:
        values["tokenizer.chat_template"] = template
    return values


def _chat_template(folder: Path) -> str | None:
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.exists():
        return file.read_text()
    return json.loads(config.read_text()).get("chat_template") if config.exists() else None


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(
    writer: GGUFWriter, name: str, array: np.ndarray, kind: GGMLQuantizationType
) -> None:
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        writer.add_tensor(name, gguf.quants.quantize(array, kind))
        return
    try:
        data = gguf.quants.quantize(array, kind)
    except NotImplementedError:
        data = _random_blocks(array.shape, kind)
    writer.add_tensor(name, data.view(np.uint8), raw_dtype=kind)


def _random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    return rng.integers(0, 64, (*shape[:-1], shape[-1] // block * size), dtype=np.uint8)
