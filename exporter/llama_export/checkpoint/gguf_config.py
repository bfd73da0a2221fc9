"""The configuration of the network in a GGUF file: its metadata and tensor table, read strictly."""

from __future__ import annotations

from collections.abc import Mapping

from llama_artifacts.errors import CheckpointError
from llama_artifacts.strict_json import shown
from llama_export.checkpoint.config import LlamaConfig, RopeConfig
from llama_export.checkpoint.gguf_header import GgufTensor, Value
from llama_export.checkpoint.gguf_metadata import Metadata

ARCHITECTURE = "llama"
DEFAULT_ROPE_THETA = 10000.0
ROPE_FREQS = "rope_freqs.weight"

_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scale_linear", "expert_count",
}  # fmt: skip
# Keys that say something about the file or its training and nothing about the maths.
_INERT = {
    "tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned",
}  # fmt: skip
# Keys that change the maths, and the values with which they do not.
_NEUTRAL: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.layer_norm_epsilon": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
_OTHER_MODEL = "only the plain Llama network is implemented"


def read_config(
    metadata: Metadata,
    tensors: Mapping[str, GgufTensor],
    *,
    divisors: tuple[float, ...] = (),
) -> tuple[LlamaConfig, tuple[str, ...]]:
    """The configuration, and one-line remarks about values that were assumed.

    Raises:
        CheckpointError: a value is missing or wrong, or asks for maths that the model lacks.
    """
    check_architecture(metadata)
    _check_keys(metadata)
    num_heads = metadata.integer(_key("attention.head_count"), minimum=1)
    config = LlamaConfig(
        vocab_size=_vocab_size(metadata, tensors),
        hidden_size=metadata.integer(_key("embedding_length"), minimum=1),
        intermediate_size=metadata.integer(_key("feed_forward_length"), minimum=1),
        num_layers=_num_layers(metadata, tensors),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(metadata, num_heads),
        head_dim=_head_dim(metadata, num_heads),
        rms_norm_eps=metadata.positive(_key("attention.layer_norm_rms_epsilon")),
        rope=_rope(metadata, divisors),
        max_position=metadata.integer(_key("context_length"), minimum=1),
        tie_word_embeddings=_HEAD not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
    )
    _check_window(metadata, config)
    return config, _notes(metadata)


def check_architecture(metadata: Metadata) -> None:
    """Refuse files of another architecture, split files, and mixtures of experts."""
    got = metadata.text("general.architecture")
    if got != ARCHITECTURE:
        message = f"architecture {shown(got)} is not supported (supported: {ARCHITECTURE})"
        metadata.fail("general.architecture", message, hint=_OTHER_MODEL)
    num_parts = metadata.integer("split.count", 0)
    if num_parts > 1:
        hint = "join the parts with `llama-gguf-split --merge`"
        metadata.fail(
            "split.count", f"expected a whole model, got one of {num_parts} parts", hint=hint
        )
    num_experts = metadata.integer(_key("expert_count"), 0)
    if num_experts > 0:
        message = f"{_key('expert_count')} = {num_experts}: a mixture of experts is not supported"
        metadata.fail(_key("expert_count"), message, hint=_OTHER_MODEL)


def check_divisors(tensor: GgufTensor, head_dim: int, *, where: object) -> None:
    """Hold the shape and type of `rope_freqs.weight` against the head dimension."""
    if tensor.type != "F32" or tensor.shape != (head_dim // 2,):
        got = f"{tensor.type} {list(tensor.shape)}"
        message = f"expected F32 [{head_dim // 2}], got {got}"
        raise CheckpointError(
            message, where=f"{where}#{ROPE_FREQS}", hint="convert the model again"
        )


def head_dim(metadata: Metadata) -> int:
    """The size of one attention head."""
    return _head_dim(metadata, metadata.integer(_key("attention.head_count"), minimum=1))


def _key(name: str) -> str:
    return f"{ARCHITECTURE}.{name}"


def _check_keys(metadata: Metadata) -> None:
    prefix = _key("")
    for key, value in metadata.values.items():
        name = key.removeprefix(prefix)
        if name == key or name in _READ or name in _INERT:
            continue
        if value not in _NEUTRAL.get(name, ()):
            got = "a list" if isinstance(value, list) else shown(value)
            message = f"{shown(key)} = {got} may change the maths and is not supported"
            metadata.fail(key, message, hint=_OTHER_MODEL)


def _vocab_size(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> int:
    if _EMBEDDING not in tensors:
        hint = "the file holds no whole model"
        raise CheckpointError(f"{_EMBEDDING} is missing", where=metadata.path, hint=hint)
    num_rows = tensors[_EMBEDDING].shape[0]
    declared = metadata.integer(_key("vocab_size"), num_rows, minimum=1)
    if declared != num_rows:
        message = f"expected {num_rows} (the rows of {_EMBEDDING}), got {declared}"
        metadata.fail(_key("vocab_size"), message, hint="convert the model again")
    return num_rows


def _num_layers(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> int:
    num_layers = metadata.integer(_key("block_count"), minimum=1)
    if num_layers > len(tensors):
        message = f"metadata says {num_layers} layers, the file has {len(tensors)} tensors"
        metadata.fail(_key("block_count"), message, hint="the file is incomplete")
    return num_layers


def _num_kv_heads(metadata: Metadata, num_heads: int) -> int:
    key = _key("attention.head_count_kv")
    num_kv_heads = metadata.integer(key, num_heads, minimum=1)
    if num_heads % num_kv_heads:
        message = f"head_count ({num_heads}) must be a multiple of head_count_kv ({num_kv_heads})"
        metadata.fail(key, message, hint="convert the model again")
    return num_kv_heads


def _head_dim(metadata: Metadata, num_heads: int) -> int:
    hidden_size = metadata.integer(_key("embedding_length"), minimum=1)
    has_length = _key("attention.key_length") in metadata
    rotary_key = _key("rope.dimension_count")
    if not has_length and rotary_key not in metadata and hidden_size % num_heads:
        message = f"embedding_length ({hidden_size}) must be a multiple of head_count ({num_heads})"
        metadata.fail(_key("attention.head_count"), message, hint="convert the model again")
    implied = hidden_size // num_heads
    fallback = implied if hidden_size % num_heads == 0 else metadata.integer(rotary_key, minimum=2)
    size = metadata.integer(_key("attention.key_length"), fallback, minimum=2)
    value_size = metadata.integer(_key("attention.value_length"), size, minimum=1)
    rotary = metadata.integer(rotary_key, size, minimum=1)
    if value_size != size:
        message = f"expected value_length = key_length ({size}), got {value_size}"
        metadata.fail(_key("attention.value_length"), message, hint=_OTHER_MODEL)
    if rotary != size:
        message = f"rope.dimension_count {rotary} of head dimension {size}: partial rotary is not supported"
        metadata.fail(rotary_key, message, hint=_OTHER_MODEL)
    if size % 2:
        metadata.fail(rotary_key, f"expected an even head dimension, got {size}", hint=_OTHER_MODEL)
    return size


def _rope(metadata: Metadata, divisors: tuple[float, ...]) -> RopeConfig:
    theta = metadata.positive(_key("rope.freq_base"), DEFAULT_ROPE_THETA)
    kind, factor = _scaling(metadata)
    if divisors:
        return RopeConfig(theta, "divisors", divisors=tuple(factor * value for value in divisors))
    return RopeConfig(theta, kind, factor=factor)


def _scaling(metadata: Metadata) -> tuple[str, float]:
    """Kind and factor; as in llama.cpp, a factor without a type is linear and 0 means none."""
    kind = metadata.text(_key("rope.scaling.type"), "linear")
    if kind not in ("none", "linear"):
        message = (
            f"rope scaling {shown(kind)} is not supported (supported: none, linear, rope_freqs)"
        )
        metadata.fail(_key("rope.scaling.type"), message, hint=_OTHER_MODEL)
    key = _key("rope.scaling.factor")
    key = key if key in metadata else _key("rope.scale_linear")
    if kind == "none" or metadata.values.get(key, 0) == 0:
        return "default", 1.0
    factor = metadata.positive(key)
    return ("default", 1.0) if factor == 1.0 else ("linear", factor)


def _check_window(metadata: Metadata, config: LlamaConfig) -> None:
    key = _key("attention.sliding_window")
    window = metadata.integer(key, 0)
    if 0 < window < config.max_position:
        message = f"{key} = {window} changes the maths and is not supported"
        metadata.fail(key, message, hint=_OTHER_MODEL)


def _notes(metadata: Metadata) -> tuple[str, ...]:
    if _key("rope.freq_base") in metadata:
        return ()
    return (f"assumed {_key('rope.freq_base')} = {DEFAULT_ROPE_THETA:g}: the file does not say",)
