"""Medians and percentiles, and what one step or one prompt costs at least."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import WEIGHTS_NAME, Manifest, Program
from llama_artifacts.safetensors import StoredTensor, read_header

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Spread:
    """The median of a figure over runs, and its quartiles."""

    median: float
    low: float
    high: float

    @property
    def range(self) -> tuple[float, float]:
        return self.low, self.high


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie, linear between the two neighbours.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("expected at least one value, got none")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Sequence[float]) -> tuple[float, ...]:
    """The 50th, 95th and 99th."""
    return tuple(percentile(values, percent) for percent in (50, 95, 99))


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value."""
    return Spread(percentile(values, 50), percentile(values, 25), percentile(values, 75))


@dataclass(frozen=True)
class Cost:
    """What a workload costs at least, on any engine with these weights and states.

    Attributes:
        step_bytes: read by one decode step: every weight of the step once, and keys and values of
            the positions in use (on average over the new tokens), of every row.
        prompt_flops: operations of the prompt, see `prompt_flops`.
    """

    step_bytes: int
    prompt_flops: int


def cost(
    manifest: Manifest,
    program: Program,
    places: Mapping[str, Path],
    *,
    prompt_len: int,
    new_tokens: int,
) -> Cost:
    """The cost of a prompt and the steps after it.

    Args:
        manifest: of the bundle.
        program: of the step, for its weights and states.
        places: where each weights file is.
        prompt_len: tokens of the prompt.
        new_tokens: tokens after it, of which the first comes from the prompt itself.

    Raises:
        IntegrityError: as `step_weight_bytes`.
    """
    weights = step_weight_bytes(manifest, program, places)
    states = state_bytes(program, manifest, prompt_len + new_tokens / 2)
    return Cost(weights + states, prompt_flops(manifest, prompt_len))


def step_weight_bytes(manifest: Manifest, program: Program, places: Mapping[str, Path]) -> int:
    """Bytes of the weights that one step reads.

    Of an embedding that is not the output head too, a step reads one row for each text.

    Raises:
        IntegrityError: a weights file breaks the format, or lacks a weight of the program.
    """
    stored: dict[str, StoredTensor] = {}
    for name in sorted(places, key=lambda name: (name == WEIGHTS_NAME, name)):
        stored |= read_header(places[name], error=IntegrityError).tensors
    total = 0
    for name in program.constants:
        if name not in stored:
            raise IntegrityError(f"the weights lack `{name}`", where=program.file)
        num_bytes = stored[name].end - stored[name].start
        if name == EMBEDDING and not manifest.model.tie_word_embeddings:
            num_bytes = num_bytes // manifest.model.vocab_size * manifest.batch
        total += num_bytes
    return total


def state_bytes(program: Program, manifest: Manifest, positions: float) -> int:
    """Bytes of keys and values at so many positions, of all rows of the bundle."""
    model = manifest.model
    per_position = 0
    for state in program.signature.states:
        num_bytes = from_name(state.dtype).num_bytes
        per_position += model.num_kv_heads * model.head_dim * num_bytes
    return round(per_position * manifest.batch * positions)


def prompt_flops(manifest: Manifest, prompt_len: int) -> int:
    """Operations (a multiply and an add are two) of a prompt in every row.

    Linear layers: 2 x weights x tokens, and the head for the last token alone. Causal attention:
    the t-th token scores and sums t keys, 4 x heads x head_dim operations each, in every layer.
    """
    model = manifest.model
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 2 * heads + 2 * kv_heads
    linear = model.hidden_size * (attention + 3 * model.intermediate_size)
    pairs = prompt_len * (prompt_len + 1) // 2
    layer = 2 * linear * prompt_len + 4 * heads * pairs
    head = 2 * model.vocab_size * model.hidden_size
    return manifest.batch * (model.num_layers * layer + head)
