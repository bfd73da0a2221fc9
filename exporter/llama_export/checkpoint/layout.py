"""Which tensors a configuration needs, and whether a checkpoint holds exactly those."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from llama_artifacts.errors import CheckpointError
from llama_artifacts.strict_json import shown
from llama_export.checkpoint.config import LlamaConfig
from llama_export.checkpoint.source import TensorInfo

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SCALE, MIN = ".weight_scale", ".weight_min"
"""End the names of a weight's scales and minima; what stands before is the module's name."""
ORDER = ".weight_order"
"""Ends the name of the input feature of each stored column."""
SIBLINGS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
"""Modules of a layer that have the same input."""
FACTORS = (SCALE, MIN)
"""What makes values of codes, in the order in which it is stored."""
E4M3 = "f8e4m3"
"""The dtype of FP8 codes."""
EIGHT_BITS = "i8"
"""The dtype of codes of eight bits."""
PACKED = "u8"
"""The dtype of codes of four bits, two a byte."""
BLOCK = 32
"""Codes of four bits that lie together: values of one block cannot be parted."""
MAX_LISTED = 3

T = TypeVar("T")

_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.")


@dataclass(frozen=True)
class Codes:
    """How a matrix [out, in] is stored as codes: a value is code * scale, or code * scale + minimum.

    Scales are `<module>.weight_scale`, minima `<module>.weight_min`, of one dtype. Codes of four bits
    are -8 to 7, beside minima 0 to 15.

    Attributes:
        dtype: `f8e4m3` and `i8`, a code a value; or `u8`, two codes of four bits a byte.
        group_size: values of a row that share a scale; None: the whole row.
        scale_dtype: `bf16`, `f16` or `f32`.
        has_min: whether there are minima.
        has_order: whether `<module>.weight_order` is stored; see `order_of`.
    """

    dtype: str
    group_size: int | None = None
    scale_dtype: str = "bf16"
    has_min: bool = False
    has_order: bool = False

    @property
    def is_fp8(self) -> bool:
        """Whether these are no integers."""
        return self.dtype == E4M3

    @property
    def per_byte(self) -> int:
        """How many values a byte holds."""
        return 2 if self.dtype == PACKED else 1

    def shape(self, matrix: tuple[int, ...]) -> tuple[int, int]:
        """Of the stored codes of a matrix [out, in]."""
        num_out, num_in = matrix
        return num_out, num_in // self.per_byte

    def factor_shape(self, matrix: tuple[int, ...]) -> tuple[int, int]:
        """Of its scales, and of its minima."""
        num_out, num_in = matrix
        return num_out, 1 if self.group_size is None else num_in // self.group_size

    def tensors(self, module: str, matrix: tuple[int, ...]) -> dict[str, TensorInfo]:
        """All that is stored of a module's matrix [out, in], by name."""
        factor = TensorInfo(self.scale_dtype, self.factor_shape(matrix))
        found = {f"{module}.weight": TensorInfo(self.dtype, self.shape(matrix))}
        found |= {f"{module}{ending}": factor for ending in FACTORS[: 1 + self.has_min]}
        order = {f"{module}{ORDER}": TensorInfo("i32", matrix[1:])}
        return found | order if self.has_order else found


FP8 = Codes(E4M3)
"""As FP8 checkpoints come: a scale for each row."""


def expected_tensors(
    config: LlamaConfig, coded: Mapping[str, Codes] | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes by Hugging Face name, in the order of the network; no head where it is tied.

    Args:
        config: the network.
        coded: the modules whose weights are codes, by name; their factors follow them.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in _plain(config).items():
        module = name.removesuffix(".weight")
        codes = (coded or {}).get(module)
        stored = {} if codes is None else codes.tensors(module, shape)
        shapes |= {part: info.shape for part, info in stored.items()} or {name: shape}
    return shapes


def linear_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Weight shapes [out, in] of the linear layers, by the layer's name; no head where tied."""
    shapes = matrix_shapes(config)
    return {name: shapes[name] for name in shapes if f"{name}.weight" != EMBEDDING}


def matrix_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Weight shapes of all matrices, the embedding [vocabulary, hidden] among them, by module."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in _plain(config).items()
        if len(shape) == 2
    }


def coded_modules(tensors: Mapping[str, TensorInfo]) -> dict[str, Codes]:
    """The modules whose weights are codes, by all tensors of a bundle: those with scales."""
    modules = [name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)]
    return {module: _codes(module, tensors) for module in modules if f"{module}.weight" in tensors}


def _codes(module: str, tensors: Mapping[str, TensorInfo]) -> Codes:
    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}{SCALE}"]
    has_min, has_order = (f"{module}{ending}" in tensors for ending in (MIN, ORDER))
    codes = Codes(weight.dtype, None, scale.dtype, has_min, has_order)
    num_groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if num_groups == 1:
        return codes
    return replace(codes, group_size=weight.shape[1] * codes.per_byte // num_groups)


def siblings(module: str) -> tuple[str, ...]:
    """Modules with the same input, the module itself among them."""
    for group in SIBLINGS:
        for name in group:
            if module.endswith(f".{name}"):
                return tuple(module.removesuffix(name) + other for other in group)
    return (module,)


def order_of(module: str, names: Collection[str]) -> str | None:
    """The name of the order of a module's codes: its own, or the one that its siblings share.

    Column c of the codes belongs to input feature order[c] (activation order); None: to feature c.

    Args:
        module: one whose weight is codes.
        names: of all tensors.
    """
    for sibling in (module, *siblings(module)):
        if f"{sibling}{ORDER}" in names:
            return f"{sibling}{ORDER}"
    return None


def _plain(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
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
    coded: Mapping[str, Codes] | None = None,
) -> None:
    """Holds a checkpoint's tensors against the configuration: none missing, unused or misshapen.

    Tensors that are ignored by name must have been taken out before, and so must a head that is
    the same as the embedding. `coded` are the linear layers whose weights are codes.

    Raises:
        CheckpointError: names the tensor, and for a shape both shapes.
    """
    _check_layers(config, tensors, where=where)
    expected = expected_tensors(config, coded)
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
