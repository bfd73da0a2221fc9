"""The model configuration, read strictly: what would change the maths is implemented or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llama_artifacts.errors import CheckpointError
from llama_artifacts.strict_json import json_type, shown
from llama_export.checkpoint import hf_keys
from llama_export.checkpoint.fields import Fields
from llama_export.checkpoint.quantization import read_scheme
from llama_export.checkpoint.refusals import (
    changes_maths,
    is_neutral,
    quoted,
    refuse_other_architecture,
    refuse_other_maths,
)
from llama_export.checkpoint.schemes import Fp8Scheme, PackedScheme

Shapes = Mapping[str, tuple[int, ...]]

# The reference implementation's class defaults, for keys that old checkpoints leave out.
DEFAULT_RMS_NORM_EPS = 1e-6
DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_MAX_POSITION = 2048
DEFAULT_ACTIVATION = "silu"

GATE = "model.layers.0.mlp.gate_proj.weight"


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


@dataclass(frozen=True)
class HfConfig:
    """What a config.json says.

    Attributes:
        config: the network.
        dtype: `bf16`, `f16`, `f32` or `f64`; None where the file leaves it open.
        notes: values that were assumed, and keys that were ignored.
        scheme: which linear layers are quantised, and how; None where none is.
    """

    config: LlamaConfig
    dtype: str | None
    notes: tuple[str, ...]
    scheme: Fp8Scheme | PackedScheme | None = None


def config_from_hf(
    config: dict[str, Any],
    *,
    where: object,
    shapes: Shapes | None = None,
    num_layers: int | None = None,
) -> LlamaConfig:
    """The network that a config.json describes; `read_hf_config` without its remarks."""
    return read_hf_config(config, where=where, shapes=shapes, num_layers=num_layers).config


def read_hf_config(
    config: dict[str, Any],
    *,
    where: object,
    shapes: Shapes | None = None,
    num_layers: int | None = None,
) -> HfConfig:
    """Reads a config.json of either generation.

    Args:
        config: the parsed file.
        where: the file's path, for messages.
        shapes: the checkpoint's tensor shapes, from which absent sizes are derived.
        num_layers: take only this many of the layers.

    Raises:
        CheckpointError: a key is absent, of another type or out of range, or asks for maths that
            the model lacks.
    """
    fields = Fields(config, str(where))
    notes: list[str] = []
    scheme = read_scheme(fields)
    refuse_other_maths(fields, notes)
    refuse_other_architecture(fields)
    _check_activation(fields, notes)
    network = _network(fields, shapes or {}, num_layers, notes)
    _refuse_short_window(fields, network.max_position)
    return HfConfig(network, _dtype(fields), tuple(notes), scheme)


def check_hf_config(config: dict[str, Any], *, where: object) -> None:
    """Refuses what the config alone shows, before any weight file is looked at or fetched."""
    if config.get("intermediate_size") is None:
        config = {**config, "intermediate_size": 1}  # the weights will tell
    read_hf_config(config, where=where)


def reduced_layers(stored: int, num_layers: int | None, *, where: object) -> int:
    """The number of layers to use: all, or the first `num_layers` where fewer are asked for."""
    if num_layers is None:
        return stored
    if not 1 <= num_layers <= stored:
        message = f"expected --num-layers between 1 and {stored}, got {num_layers}"
        raise CheckpointError(message, where=where, hint="layers can be left out, not added")
    return num_layers


def _network(
    fields: Fields, shapes: Shapes, num_layers: int | None, notes: list[str]
) -> LlamaConfig:
    hidden = fields.required_integer("hidden_size")
    heads = fields.required_integer("num_attention_heads")
    head_dim = _head_dim(fields, hidden, heads)
    layers = fields.required_integer("num_hidden_layers")
    return LlamaConfig(
        vocab_size=fields.required_integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=_intermediate_size(fields, shapes, notes),
        num_layers=reduced_layers(layers, num_layers, where=fields.where),
        num_heads=heads,
        num_kv_heads=_num_kv_heads(fields, heads),
        head_dim=head_dim,
        rms_norm_eps=_assumed(fields, "rms_norm_eps", DEFAULT_RMS_NORM_EPS, notes),
        rope=_rope(fields, notes),
        max_position=_max_position(fields, notes),
        tie_word_embeddings=fields.boolean("tie_word_embeddings") or False,
        attention_bias=fields.boolean("attention_bias") or False,
        mlp_bias=fields.boolean("mlp_bias") or False,
    )


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    head_dim = fields.integer("head_dim")
    if head_dim is None:
        if hidden % heads:
            message = f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads})"
            raise CheckpointError(
                f"{message} and head_dim is absent", where=fields.place("head_dim")
            )
        head_dim = hidden // heads
    if head_dim % 2:
        message = f"expected an even head_dim (rotary pairs), got {head_dim}"
        raise CheckpointError(message, where=fields.place("head_dim"))
    return head_dim


def _num_kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.integer("num_key_value_heads")
    if kv_heads is None:
        return heads
    if heads % kv_heads:
        message = f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads"
        raise CheckpointError(f"{message} ({kv_heads})", where=fields.place("num_key_value_heads"))
    return kv_heads


def _intermediate_size(fields: Fields, shapes: Shapes, notes: list[str]) -> int:
    size = fields.integer("intermediate_size")
    if size is not None:
        return size
    shape = shapes.get(GATE, ())
    if len(shape) != 2 or shape[0] < 1:
        raise fields.fail("intermediate_size", "a positive integer")
    notes.append(f"assumed intermediate_size = {shape[0]} (from {GATE})")
    return shape[0]


def _assumed(fields: Fields, key: str, default: float, notes: list[str]) -> float:
    value = fields.number(key)
    if value is None:
        notes.append(f"assumed {key} = {default!r}")
        return default
    return value


def _max_position(fields: Fields, notes: list[str]) -> int:
    value = fields.integer("max_position_embeddings")
    if value is None:
        notes.append(f"assumed max_position_embeddings = {DEFAULT_MAX_POSITION}")
        return DEFAULT_MAX_POSITION
    return value


# --- rope -----------------------------------------------------------------------------------------


def _rope(fields: Fields, notes: list[str]) -> RopeConfig:
    """Rope of either generation: `rope_theta` + `rope_scaling`, or `rope_parameters`."""
    scaling = _rope_object(fields)
    theta = _agreed_theta(fields, scaling)
    if theta is None:
        theta = DEFAULT_ROPE_THETA
        notes.append(f"assumed rope_theta = {theta!r}")
    if scaling is None:
        return RopeConfig(theta)
    kind = _rope_kind(scaling)
    _check_rope_keys(scaling, kind, notes)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor=_factor(scaling))
    if kind == "llama3":
        return _llama3_rope(scaling, theta)
    return RopeConfig(theta)


def _rope_object(fields: Fields) -> Fields | None:
    old, new = fields.nested("rope_scaling"), fields.nested("rope_parameters")
    if old is None or new is None:
        return new if old is None else old
    if _without_theta(old) != _without_theta(new):
        message = "rope_scaling and rope_parameters differ; expected one of them, or both equal"
        raise CheckpointError(message, where=fields.place("rope_parameters"))
    return new


def _without_theta(scaling: Fields) -> dict[str, Any]:
    values = {key: value for key, value in scaling.values.items() if key != "rope_theta"}
    kind = values.pop("type", None)
    return values if kind is None else {"rope_type": kind, **values}


def _agreed_theta(fields: Fields, scaling: Fields | None) -> float | None:
    outer = fields.number("rope_theta")
    inner = None if scaling is None else scaling.number("rope_theta")
    if outer is not None and inner is not None and outer != inner:
        assert scaling is not None
        message = f"rope_theta = {outer!r} and {scaling.prefix}rope_theta = {inner!r} differ"
        raise CheckpointError(message, where=fields.place("rope_theta"))
    return outer if inner is None else inner


def _rope_kind(scaling: Fields) -> str:
    new, old = scaling.text("rope_type"), scaling.text("type")
    if new is not None and old is not None and new != old:
        message = f"rope_type {new!r} and type {old!r} differ; expected one of them"
        raise CheckpointError(message, where=scaling.place("rope_type"))
    kind = new if new is not None else old
    if kind is None:
        if not set(scaling.values) - {"rope_theta"}:
            return "default"
        raise scaling.fail("rope_type", "the name of a rope type")
    if kind not in hf_keys.ROPE_KEYS:
        supported = ", ".join(hf_keys.ROPE_KEYS)
        message = f"rope_type {quoted(kind)} is not supported (supported: {supported})"
        raise CheckpointError(message, where=scaling.place("rope_type"))
    return kind


def _check_rope_keys(scaling: Fields, kind: str, notes: list[str]) -> None:
    for key, value in scaling.values.items():
        if key in hf_keys.ROPE_KEYS[kind] or value is None:
            continue
        is_scale = key in ("partial_rotary_factor", "factor")
        if is_scale and is_neutral(value, (1,)):
            continue
        if key in hf_keys.ROPE_MATHS or key == "partial_rotary_factor":
            raise changes_maths(scaling, key)
        if key not in hf_keys.ROPE_HEAD_KEYS and key != "original_max_position_embeddings":
            notes.append(f"ignored unknown config key {scaling.prefix}{shown(key)}")


def _factor(scaling: Fields) -> float:
    factor = scaling.required_number("factor")
    if factor < 1:
        raise scaling.fail("factor", "a number of at least 1")
    return factor


def _llama3_rope(scaling: Fields, theta: float) -> RopeConfig:
    low = scaling.required_number("low_freq_factor")
    high = scaling.required_number("high_freq_factor")
    if high <= low:
        raise scaling.fail("high_freq_factor", f"a number above low_freq_factor ({low!r})")
    return RopeConfig(
        theta,
        "llama3",
        factor=_factor(scaling),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=scaling.required_integer("original_max_position_embeddings"),
    )


def _check_activation(fields: Fields, notes: list[str]) -> None:
    activation = fields.text("hidden_act")
    if activation is None:
        notes.append(f"assumed hidden_act = {DEFAULT_ACTIVATION}")
    elif activation not in hf_keys.ACTIVATIONS:
        supported = ", ".join(hf_keys.ACTIVATIONS)
        message = f"hidden_act {quoted(activation)} is not supported (supported: {supported})"
        raise CheckpointError(message, where=fields.place("hidden_act"))


def _refuse_short_window(fields: Fields, max_position: int) -> None:
    """A window at least as long as the model's reach never hides a position."""
    if fields.boolean("use_sliding_window") is False:
        return
    window = fields.integer("sliding_window")
    if window is not None and window < max_position:
        raise changes_maths(fields, "sliding_window")


def _dtype(fields: Fields) -> str | None:
    named: dict[str, str] = {}
    for key in ("dtype", "torch_dtype"):
        text = fields.text(key)
        if text is None or text == "auto":
            continue
        dtype = hf_keys.DTYPES.get(text.removeprefix("torch."))
        if dtype is None:
            raise fields.fail(key, "bfloat16, float16 or float32")
        named[key] = dtype
    if len(set(named.values())) > 1:
        message = f"dtype = {named['dtype']} and torch_dtype = {named['torch_dtype']} differ"
        raise CheckpointError(message, where=fields.place("dtype"), hint="remove one of them")
    return next(iter(named.values()), None)


def token_ids(value: object, *, where: object) -> tuple[int, ...]:
    """Token ids from a config's null, integer or list of integers."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            kind = json_type(token)
            message = f"expected token ids as non-negative integers, got {shown(token)} ({kind})"
            raise CheckpointError(message, where=where)
    return tuple(ids)
