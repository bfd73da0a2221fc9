"""The parts of a network that several processes run together, as in tensor parallelism.

Query heads, key/value heads, inner width and vocabulary are divided, everything else is whole in
every process (Shoeybi et al. 2019, Megatron-LM). Layers whose outputs are divided bind rows of their
weights; those that take divided inputs bind columns, and their results are added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llama_artifacts.errors import BuildError
from llama_artifacts.manifest import Cut
from llama_export.checkpoint.config import LlamaConfig
from llama_export.checkpoint.layout import (
    BLOCK,
    EMBEDDING,
    FACTORS,
    HEAD,
    ORDER,
    PACKED,
    coded_modules,
)
from llama_export.checkpoint.source import TensorInfo

_DIVIDED = {
    "num_heads": "query heads",
    "num_kv_heads": "key/value heads",
    "intermediate_size": "inner width",
    "vocab_size": "vocabulary",
}
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")
_HINT = "choose another --shards"


def shard(config: LlamaConfig, num_shards: int) -> LlamaConfig:
    """The network of one shard, whose products are partial sums that processes add up.

    Raises:
        BuildError: a size does not divide; names each with its number.
    """
    odd = [
        f"{name} {getattr(config, field):,}"
        for field, name in _DIVIDED.items()
        if getattr(config, field) % num_shards
    ]
    if odd:
        raise BuildError(
            f"expected sizes that {num_shards} shards divide, got {', '.join(odd)}", hint=_HINT
        )
    divided = {field: getattr(config, field) // num_shards for field in _DIVIDED}
    return replace(config, **divided)


def cuts_of(config: LlamaConfig, tensors: Mapping[str, TensorInfo]) -> dict[str, Cut]:
    """Which constants are parts of a tensor, by the name under which a program binds them.

    A tied head is parts of the embedding, which is also bound whole.
    """
    cuts = {}
    for name, info in tensors.items():
        kind = name.split(".")[-2]
        if name.endswith(ORDER):
            continue
        if kind in _BY_ROWS:
            cuts[name] = Cut(name, "rows")
        elif kind in _BY_COLUMNS and len(info.shape) == 2 and not _is_whole(name, info):
            cuts[name] = Cut(name, "columns")
    if config.tie_word_embeddings:
        for ending in (".weight", *FACTORS):
            stored = EMBEDDING.removesuffix(".weight") + ending
            if stored in tensors:
                cuts[HEAD.removesuffix(".weight") + ending] = Cut(stored, "rows")
    return cuts


def part_of(
    tensors: Mapping[str, TensorInfo], cuts: Mapping[str, Cut], num_shards: int
) -> dict[str, TensorInfo]:
    """What one of several processes binds, by name: parts, and the whole of what is not cut.

    Raises:
        BuildError: the scales of a matrix, or blocks of codes, do not divide; names the tensor.
    """
    _check_codes(tensors, num_shards)
    parts = {name: info for name, info in tensors.items() if name not in cuts}
    for name, cut in cuts.items():
        info = tensors[cut.tensor]
        axis = 0 if cut.axis == "rows" else 1
        shape = list(info.shape)
        shape[axis] //= num_shards
        parts[name] = TensorInfo(info.dtype, tuple(shape))
    order = {name: place for place, name in enumerate(tensors)}
    return {
        name: parts[name] for name in sorted(parts, key=lambda name: order.get(name, len(order)))
    }


def _is_whole(name: str, info: TensorInfo) -> bool:
    """Whether these are factors of whole rows, which every part of a row needs."""
    return name.endswith(FACTORS) and info.shape[1] == 1


def _check_codes(tensors: Mapping[str, TensorInfo], num_shards: int) -> None:
    for module, codes in coded_modules(tensors).items():
        if module.split(".")[-1] not in _BY_COLUMNS:
            continue
        if codes.has_order:
            raise BuildError(
                f"expected columns that {num_shards} shards can divide, got those of `{module}` in"
                " activation order",
                hint="use --shards 1, or a checkpoint without desc_act",
            )
        width = tensors[f"{module}.weight"].shape[1] * codes.per_byte
        block = codes.group_size or (BLOCK if codes.dtype == PACKED else 1)
        if width // num_shards % block:
            raise BuildError(
                f"expected groups of scales that {num_shards} shards divide, got"
                f" {width // block:,} groups of {block} values in a row of `{module}`",
                hint=f"{_HINT}, or another --group-size",
            )
