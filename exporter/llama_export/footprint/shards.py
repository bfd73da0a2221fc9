"""One device's part of a network that several share, as in tensor parallelism.

Query heads, key/value heads, inner width and vocabulary are divided, everything else is whole on
every device (Shoeybi et al. 2019, Megatron-LM).
"""

from __future__ import annotations

from dataclasses import replace

from llama_artifacts.errors import BuildError
from llama_export.checkpoint.config import LlamaConfig

_DIVIDED = {
    "num_heads": "query heads",
    "num_kv_heads": "key/value heads",
    "intermediate_size": "inner width",
    "vocab_size": "vocabulary",
}


def shard(config: LlamaConfig, num_shards: int) -> LlamaConfig:
    """The network of one shard, whose products are partial sums that devices add up.

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
            f"expected sizes that {num_shards} shards divide, got {', '.join(odd)}",
            hint="choose another --shards",
        )
    divided = {field: getattr(config, field) // num_shards for field in _DIVIDED}
    return replace(config, **divided)
