"""Makes the test vectors of a bundle: see `llama_runtime.vectors` for what they are.

A stand-in computes each entry with the eager model in float32; the same plans of calls are run on
it that the laws run on programs, with fewer tokens, and what goes in and comes out is written down.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llama_artifacts.dtypes import from_torch
from llama_artifacts.manifest import Manifest, Program, vectors_name
from llama_artifacts.signature import StateSpec
from llama_export.entries import registry
from llama_export.laws.bench import is_generating, is_known, num_rows, random_sequences
from llama_export.laws.calls import prepare
from llama_export.laws.draws import noise
from llama_export.laws.generation import (
    EOS_STEP,
    KEY,
    TEMPERATURE,
    Generated,
    inputs_of,
    scores_along,
)
from llama_export.laws.memory import POISON, Memory, new_memory
from llama_export.laws.oracle import Oracle, load_model, network_weights
from llama_export.laws.registry import kind
from llama_export.laws.spans import usual
from llama_export.model.llama import Llama
from llama_runtime.comparison import LIMITS
from llama_runtime.entry import Entry
from llama_runtime.vectors import ANYTHING, VERSION

NUM_TOKENS = 7
MAX_ROWS_KEPT = 2
"""Rows of the last call that are kept; of the call in the middle it is one, of others none."""

NUM_BEGINNINGS, NUM_SURE = 64, 4
"""Tokens that a text might begin with, and how far each is followed to choose one."""

_OUT = ".outputs."

SAFE_SHARE = 0.25
"""A token is expected where its lead over the next is at least this share of the limit."""


def write_vectors(
    folder: Path, manifest: Manifest, weights: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Writes the vectors of each entry into the folder; their names.

    An entry of which nothing can be expected beyond doubt gets none: a generating one whose every
    first token rounding might change.
    """
    model = load_model(network_weights(weights, manifest), manifest, where=folder)
    oracle = Oracle(model, random_sequences(manifest, NUM_TOKENS))
    names = []
    for entry in manifest.entries():
        programs = [p for p in manifest.programs if p.entry == entry and not p.variant]
        if is_known(programs[0]):
            tensors, sizes = _record(programs, oracle)
            if all((tensor == ANYTHING).all() for name, tensor in tensors.items() if _OUT in name):
                continue
            data = _file(entry, tensors, sizes)
            names.append(vectors_name(entry))
            (folder / names[-1]).write_bytes(data)
    return tuple(names)


class _EagerProgram:
    """An entry as the eager model computes it; see `llama_runtime.programs.base.Program`."""

    def __init__(self, model: Llama, entry: str) -> None:
        spec = registry.find(entry)
        self._method = functools.partial(getattr(model, spec.method), **spec.arguments)

    def run(
        self, inputs: list[torch.Tensor], states: list[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[torch.Tensor]:
        arguments: list[Any] = list(inputs)
        if states:
            arguments.append(list(zip(states[::2], states[1::2], strict=True)))
        with torch.no_grad():
            outputs = self._method(*arguments)
        return list(outputs) if isinstance(outputs, tuple) else [outputs]


def stand_in(program: Program, model: Llama) -> Entry:
    """A program's entry in float32, checked at every call as the program itself is.

    States are those of the whole network, also where the program is one of several processes'.
    """
    signature = program.signature
    wide = replace(
        signature,
        states=tuple(_whole(spec, program.shards) for spec in signature.states),
        outputs=tuple(
            spec if spec.dtype == "i32" else replace(spec, dtype="f32")
            for spec in signature.outputs
        ),
    )
    eager = _EagerProgram(model, program.entry)
    return Entry(replace(program, signature=wide, dtype="f32"), eager, torch.device("cpu"))


def _whole(spec: StateSpec, num_shards: int) -> StateSpec:
    """A state in float32 with the heads of all processes."""
    first, heads, *rest = spec.shape
    assert isinstance(heads, int)
    return replace(spec, dtype="f32", shape=(first, heads * num_shards, *rest))


def _record(
    programs: list[Program], oracle: Oracle
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Tensors by name, and the sizes of the states."""
    entry = stand_in(programs[0], oracle.model)
    if is_generating(programs[0]):
        limit = max(LIMITS[program.dtype] for program in programs)
        return _record_text(entry, oracle, limit), {}
    memory = new_memory(entry, oracle.sequences.num_tokens)
    plan = usual(entry.name, num_rows(programs[0]), oracle.sequences.num_tokens)
    kept = {len(plan) // 2: 1, len(plan) - 1: MAX_ROWS_KEPT}
    tensors = {}
    for number, call in enumerate(plan):
        prepared = prepare(entry.name, call, oracle.sequences, memory)
        for name, tensor in prepared.inputs.items():
            tensors[f"calls.{number}.inputs.{name}"] = tensor.clone()
        output = entry.run(memory.states, prepared.inputs)[0]
        rows = [index for index, _, _ in prepared.answers][-kept.get(number, 0) :]
        if number in kept:
            name = entry.signature.outputs[0].name
            wide = output.reshape(-1, output.shape[-1] if output.ndim > 1 else 1)
            tensors[f"calls.{number}.rows.{name}"] = torch.tensor(rows, dtype=torch.int32)
            tensors[f"calls.{number}.outputs.{name}"] = wide[rows].clone()
    return tensors, _sizes(memory)


def _sizes(memory: Memory) -> dict[str, int]:
    return {} if memory.states is None else dict(memory.states.sizes)


def _record_text(entry: Entry, oracle: Oracle, limit: float) -> dict[str, torch.Tensor]:
    """One call from position 0; every row begins alike, so that all end at one eos."""
    memory = new_memory(entry, 0)
    first, key = _beginning(entry, oracle, limit)
    token = first.expand(memory.num_rows, 1).contiguous()
    eos = 0
    if kind(entry.name) == "generate_until":
        eos = _token_at(oracle, first, EOS_STEP)
    inputs = inputs_of(entry.signature, token, pos=0, eos=eos, key=key)
    outputs = entry.run(memory.states, inputs)
    tokens = outputs[0].long()
    num_steps = tokens.shape[1]
    count = outputs[1].long() if len(outputs) > 1 else torch.full((len(tokens),), num_steps)
    whole = Oracle(oracle.model, replace(oracle.sequences, tokens=token))
    called = Generated(inputs, tokens, count, 0, (), 0, "")
    safe = _num_safe(scores_along(whole, called), count, limit)
    hidden = torch.arange(num_steps) >= safe[:, None]
    # What follows a row's end is zero if the end is where it must be.
    hidden &= (safe < count)[:, None]
    expected = {"tokens": tokens.masked_fill(hidden, ANYTHING)}
    expected["count"] = torch.where(safe < count, ANYTHING, count)[:, None]
    tensors = {f"calls.0.inputs.{name}": tensor for name, tensor in inputs.items()}
    for spec in entry.signature.outputs:
        rows = torch.arange(memory.num_rows, dtype=torch.int32)
        tensors[f"calls.0.rows.{spec.name}"] = rows
        tensors[f"calls.0.outputs.{spec.name}"] = expected[spec.name].int()
    return tensors


def _beginning(entry: Entry, oracle: Oracle, limit: float) -> tuple[torch.Tensor, tuple[int, int]]:
    """The token [1, 1] and the key after which most tokens are beyond doubt, of some pairs."""
    vocab_size = oracle.logits.shape[2]
    generator = torch.Generator().manual_seed(0)
    tried = torch.randperm(vocab_size, generator=generator)[:NUM_BEGINNINGS, None].int()
    keys = [(KEY[0] + number, KEY[1]) for number in range(len(tried))]
    texts, scores = tried, []
    for step in range(NUM_SURE):
        with torch.no_grad():
            logits = oracle.model.next_token(texts)
        if kind(entry.name) == "sample":
            drawn = torch.cat([noise(key, step, 1, vocab_size) for key in keys])
            logits = logits + drawn * TEMPERATURE
        scores.append(logits)
        texts = torch.cat((texts, logits.argmax(-1, keepdim=True).int()), 1)
    count = torch.full((len(tried),), NUM_SURE)
    best = int(_num_safe(torch.stack(scores, 1), count, limit).argmax())
    return tried[best : best + 1], keys[best]


def _token_at(oracle: Oracle, token: torch.Tensor, step: int) -> int:
    """The greedy token of a step, found by the whole sequence."""
    tokens = token
    for _ in range(step + 1):
        with torch.no_grad():
            logits = oracle.model.next_token(tokens)
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True).int()), 1)
    return int(tokens[0, -1])


def _num_safe(scores: torch.Tensor, count: torch.Tensor, limit: float) -> torch.Tensor:
    """How many tokens of each row no rounding can change, int64 [rows]."""
    best = scores.topk(2).values
    lead = (best[..., 0] - best[..., 1]) / scores.abs().max()
    is_safe = lead >= SAFE_SHARE * limit
    return torch.minimum(is_safe.long().cumprod(1).sum(1), count)


def _file(entry: str, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> bytes:
    """Safetensors; the same bytes for the same content, which the library does not promise."""
    metadata = {
        "entry": entry,
        "fill": str(POISON),
        "sizes": json.dumps(dict(sizes), sort_keys=True),
        "version": VERSION,
    }
    table: dict[str, object] = {"__metadata__": metadata}
    data = bytearray()
    # Widest elements first, so that each tensor is aligned.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        content = tensor.contiguous().numpy().tobytes()
        table[name] = {
            "dtype": from_torch(tensor.dtype).safetensors,
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(table, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(data)
