"""Which tensors a configuration needs, and whether a checkpoint holds exactly those."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from llama_artifacts.errors import CheckpointError
from llama_artifacts.strict_json import shown
from llama_export.checkpoint.config import LlamaConfig
from llama_export.checkpoint.source import TensorInfo

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SCALE = ".weight_scale"
"""Ends the name of an FP8 weight's scales; what stands before it is the linear layer's name."""
MAX_LISTED = 3

T = TypeVar("T")

_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.")


def expected_tensors(config: LlamaConfig, fp8: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Shapes by Hugging Face name, in the order of the network; no head where it is tied.

    Args:
        config: the network.
        fp8: names of the linear layers that are FP8, whose scales follow their weights.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in _unquantised(config).items():
        shapes[name] = shape
        module = name.removesuffix(".weight")
        if module in fp8:
            shapes[f"{module}{SCALE}"] = (shape[0], 1)
    return shapes


def linear_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Weight shapes [out, in] of the linear layers, by the layer's name; no head where tied."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in _unquantised(config).items()
        if len(shape) == 2 and name != EMBEDDING
    }


def scaled_modules(names: Iterable[str]) -> frozenset[str]:
    """The linear layers that are FP8, by the names of all tensors: those with scales."""
    return frozenset(name.removesuffix(SCALE) for name in names if name.endswith(SCALE))


def _unquantised(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for name, shape in layer_tensors(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def layer_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one decoder layer, by name within the layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    shapes |= _linear("self_attn.q_proj", query, hidden, config.attention_bias)
    shapes |= _linear("self_attn.k_proj", keys, hidden, config.attention_bias)
    shapes |= _linear("self_attn.v_proj", keys, hidden, config.attention_bias)
    shapes |= _linear("self_attn.o_proj", hidden, query, config.attention_bias)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    shapes |= _linear("mlp.gate_proj", inner, hidden, config.mlp_bias)
    shapes |= _linear("mlp.up_proj", inner, hidden, config.mlp_bias)
    shapes |= _linear("mlp.down_proj", hidden, inner, config.mlp_bias)
    return shapes


def parameter_count(config: LlamaConfig) -> int:
    """Number of parameters; a tied head counts once."""
    heads = 1 if config.tie_word_embeddings else 2
    outside = heads * config.vocab_size * config.hidden_size + config.hidden_size
    layer = sum(math.prod(shape) for shape in layer_tensors(config).values())
    return outside + config.num_layers * layer


def layer_index(name: str) -> int | None:
    """The decoder layer that a tensor belongs to, or None."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def first_layers(tensors: Mapping[str, T], num_layers: int) -> dict[str, T]:
    """The tensors without those of layer `num_layers` and later."""
    return {name: value for name, value in tensors.items() if (layer_index(name) or 0) < num_layers}


def check_layout(
    config: LlamaConfig,
    tensors: Mapping[str, TensorInfo],
    *,
    where: object,
    fp8: Collection[str] = (),
) -> None:
    """Holds a checkpoint's tensors against the configuration: none missing, unused or misshapen.

    Tensors that are ignored by name must have been taken out before, and so must a head that is
    the same as the embedding. `fp8` names the linear layers that have scales.

    Raises:
        CheckpointError: names the tensor, and for a shape both shapes.
    """
    _check_layers(config, tensors, where=where)
    expected = expected_tensors(config, fp8)
    _check_head(config, tensors, where=where)
    _refuse("missing", [name for name in expected if name not in tensors], where=where)
    _refuse("unused", [name for name in tensors if name not in expected], where=where)
    for name, shape in expected.items():
        got = tensors[name].shape
        if got != shape:
            message = f"expected shape {list(shape)}, got {list(got)}"
            raise CheckpointError(message, where=f"{where}#{name}", hint=_shape_hint(config, name))


def _linear(name: str, num_out: int, num_in: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (num_out, num_in)}
    if has_bias:
        shapes[f"{name}.bias"] = (num_out,)
    return shapes


def _check_layers(config: LlamaConfig, tensors: Mapping[str, TensorInfo], *, where: object) -> None:
    indices = {index for name in tensors if (index := layer_index(name)) is not None}
    stored = max(indices, default=-1) + 1
    if stored != config.num_layers:
        message = f"config says {config.num_layers} layers, checkpoint has {stored}"
        hint = "correct num_hidden_layers; a model with fewer layers can be asked for with --num-layers"
        raise CheckpointError(message, where=where, hint=hint)


def _check_head(config: LlamaConfig, tensors: Mapping[str, TensorInfo], *, where: object) -> None:
    if not config.tie_word_embeddings and HEAD not in tensors:
        message = f"{HEAD} missing and tie_word_embeddings is false"
        hint = "set tie_word_embeddings to true in config.json if the head is the embedding"
        raise CheckpointError(message, where=where, hint=hint)


def _refuse(what: str, names: Sequence[str], *, where: object) -> None:
    if not names:
        return
    listed = ", ".join(shown(name) for name in names[:MAX_LISTED])
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    noun = "tensor" if len(names) == 1 else "tensors"
    hints = {
        "missing": "the checkpoint is incomplete, or its config describes another model",
        "unused": "the model has no place for them; the config may describe another model",
    }
    raise CheckpointError(f"{what} {noun}: {listed}{more}", where=where, hint=hints[what])


def _shape_hint(config: LlamaConfig, name: str) -> str | None:
    if "self_attn" not in name:
        return None
    return (
        f"config: hidden_size {config.hidden_size}, num_attention_heads {config.num_heads}, "
        f"num_key_value_heads {config.num_kv_heads}, head_dim {config.head_dim}"
    )
