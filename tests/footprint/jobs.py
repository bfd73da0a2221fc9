"""Programs of the tiny network, with the sizes of their calls."""

from __future__ import annotations

from typing import Any

import torch

from llama_artifacts.signature import resolve
from llama_export.checkpoint.config import config_from_hf
from llama_export.entries import registry
from llama_export.entries.registry import EntrySpec, Sizes
from llama_export.footprint.call import Asked, Call, plan_call
from llama_export.footprint.network import Network, plain_tensors
from llama_runtime.states import torch_dtype
from tests.tiny import tiny_config

ENTRIES = tuple(
    "generate_until<8>" if spec.method == "generate_until" else spec.name.replace("Steps", "8")
    for spec in registry.entries()
)


def tiny_network(**overrides: Any) -> Network:
    config = config_from_hf(tiny_config(**overrides), where="config.json")
    return Network("tiny", config, "f32", plain_tensors(config, "f32"), "exact", "tests")


def tiny_call(network: Network, entry: str, *, batch: int, length: int) -> tuple[EntrySpec, Call]:
    """An entry and its largest call."""
    spec = registry.find(entry)
    max_seq = length + (spec.states is None)
    sizes = Sizes(network.config, batch, max_seq, network.dtype, page_size=4)
    return spec, plan_call(spec, spec.signature(sizes), Asked(batch, length))


def arguments(call: Call) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs whose rows stand at the call's position, and states of zeros."""
    inputs, states = (
        [
            torch.zeros(resolve(spec.shape, call.sizes), dtype=torch_dtype(spec.dtype))
            for spec in specs
        ]
        for specs in (call.signature.inputs, call.signature.states)
    )
    for spec, tensor in zip(call.signature.inputs, inputs, strict=True):
        if spec.name in ("pos", "positions", "step_positions"):
            tensor.fill_(call.position)
        if spec.name in ("temperature", "eos"):  # no token 1 is given, so loops run to their end
            tensor.fill_(1)
    return inputs, states
