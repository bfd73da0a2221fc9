"""Paged programs that can be run without a model: the next token depends on every token before it.

A program keeps each token and its position in the pool and reads them back through the table, so a
wrong page, slot, position or row changes the logits or is noticed. It behaves as real ones do where
it hurts: what it reads beside a text must be finite, and rows without a piece give NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from llama_export.checkpoint.config import config_from_hf
from llama_export.entries import registry
from llama_export.entries.registry import Sizes
from llama_runtime.engine import Engine, Output, Request
from llama_runtime.entry import Entry
from llama_runtime.sampling import SamplingParams
from tests.bundles import sample_program
from tests.tiny import tiny_config

VOCAB_SIZE = 32
PAGED = ("prefill_paged", "decode_paged", "step_paged")
TAKING_TURNS = PAGED[:2]
NAN_TOKEN = 31
"""The arithmetic overflows at this token, which is never given."""

Hook = Callable[[list[torch.Tensor]], None]


def logits_after(tokens: Sequence[int]) -> torch.Tensor:
    """Logits [V] after a whole text."""
    if NAN_TOKEN in tokens:
        return torch.full((VOCAB_SIZE,), torch.nan)
    seed = [len(tokens), *tokens]
    logits = torch.from_numpy(np.random.default_rng(seed).standard_normal(VOCAB_SIZE)).float()
    logits[NAN_TOKEN] = -torch.inf
    return logits


class FakeProgram:
    """See `llama_runtime.programs.base.Program`."""

    def __init__(self, name: str, hooks: list[Hook], sizes: list[tuple[str, dict[str, int]]]):
        self._name = name
        self._hooks = hooks
        self._sizes = sizes

    def run(
        self, inputs: list[torch.Tensor], states: list[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[torch.Tensor]:
        self._sizes.append((self._name, dict(sizes)))
        pool, arrays = states[0], [tensor.numpy() for tensor in inputs]
        logits: list[torch.Tensor] = []
        if self._name != "decode_paged":
            tokens, positions, rows, slots, last, table = arrays[:6]
            write(pool, slots, tokens, positions)
            logits += [read(pool, table[rows[i]], positions[i]) for i in last]
        if self._name != "prefill_paged":
            tokens, positions = arrays[-2:] if len(arrays) > 3 else arrays[:2]
            table = arrays[5] if len(arrays) > 3 else arrays[2]
            page_size = pool.shape[2]
            at = np.maximum(positions, 0)
            pages = table[np.arange(len(table)), at // page_size]
            slots = np.where(positions < 0, 0, pages * page_size + at % page_size)
            write(pool, slots, tokens[:, 0], positions)
            logits += [read(pool, *pair) for pair in zip(table, positions, strict=True)]
        for hook in self._hooks:
            hook(states)
        return [torch.stack(logits)]


def write(pool: torch.Tensor, slots: Any, tokens: Any, positions: Any) -> None:
    for slot, token, position in zip(slots, tokens, positions, strict=True):
        place = pool[slot // pool.shape[2], 0, slot % pool.shape[2]]
        place[0] = torch.nan if token == NAN_TOKEN else float(token)
        place[1] = float(position)


def read(pool: torch.Tensor, pages: Any, position: int) -> torch.Tensor:
    places = pool[torch.from_numpy(pages).long(), 0].flatten(0, 1)
    if position < 0 or bool(places.isnan().any()):
        return torch.full((VOCAB_SIZE,), torch.nan)
    text = places[: position + 1]
    if text[:, 1].tolist() != list(range(position + 1)):
        return torch.full((VOCAB_SIZE,), torch.nan)
    return logits_after([int(token) for token in text[:, 0].tolist()])


class FakeBundle:
    """Looks like a `LoadedBundle`.

    Attributes:
        hooks: called after each program, with the states.
        calls: entry and sizes of each call.
    """

    folder = Path("fake")

    def __init__(
        self,
        names: Sequence[str] = PAGED,
        max_seq: int = 64,
        page_size: int = 4,
        max_rows: int = 8,
    ) -> None:
        config = config_from_hf(tiny_config(vocab_size=VOCAB_SIZE), where="config.json")
        sizes = Sizes(config, 1, max_seq, "f32", page_size=page_size, max_rows=max_rows)
        self.hooks: list[Hook] = []
        self.calls: list[tuple[str, dict[str, int]]] = []
        self._entries = {name: self._entry(name, sizes) for name in names}
        model = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.manifest: Any = SimpleNamespace(entries=lambda: list(names), model=model)

    def entry(self, name: str) -> Entry:
        return self._entries[name]

    def _entry(self, name: str, sizes: Sizes) -> Entry:
        record = dataclasses.replace(
            sample_program("decode", "pt2", "decode.pt2"),
            entry=name,
            signature=registry.find(name).signature(sizes),
        )
        program = FakeProgram(name, self.hooks, self.calls)
        return Entry(record, program, torch.device("cpu"))


def engine_of(bundle: Any, **options: Any) -> Engine:
    return Engine(bundle, **options)


def request(name: str, prompt: Sequence[int], max_new: int = 5, **fields: Any) -> Request:
    """Greedy unless `params` says otherwise."""
    fields.setdefault("params", SamplingParams())
    return Request(name, tuple(prompt), max_new=max_new, **fields)


def prompt_of(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Seeded tokens that a model of `VOCAB_SIZE` takes without overflow."""
    rng = np.random.default_rng([seed, num_tokens])
    return tuple(int(token) for token in rng.integers(0, NAN_TOKEN, num_tokens))


def greedy(prompt: Sequence[int], max_new: int) -> list[int]:
    """What the fake model says, the whole text computed anew for each token."""
    tokens = list(prompt)
    for _ in range(max_new):
        likeliest = int(logits_after(tokens).argmax())
        tokens.append(likeliest)
    return tokens[len(prompt) :]


def steps(engine: Engine, limit: int = 2000) -> Iterator[list[Output]]:
    """Runs to the end, and checks after each step that no page is lost."""
    for _ in range(limit):
        if not engine.has_work:
            return
        yield engine.step()
        check(engine)
    raise AssertionError(f"no end after {limit} steps")


def finish(engine: Engine) -> dict[str, list[Output]]:
    """Runs to the end; the outputs of each request."""
    outputs: dict[str, list[Output]] = {}
    for step in steps(engine):
        for output in step:
            outputs.setdefault(output.request_id, []).append(output)
    assert engine.stats.pages_used == 0
    assert engine.stats.num_running == engine.stats.num_waiting == 0
    assert engine.step() == []
    for given in outputs.values():
        assert [o.finish_reason is None for o in given] == [True] * (len(given) - 1) + [False]
    return outputs


def check(engine: Engine) -> None:
    """Every page has the holders that it should have, every job lengths in order."""
    scheduler = engine._scheduler
    jobs = [*scheduler.running, *scheduler.waiting]
    scheduler.pool.check([job.pages for job in jobs])
    for job in jobs:
        job.check(scheduler.pool.page_size)
    assert not any(job.pages for job in scheduler.waiting)


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    return [output.token for output in outputs if output.token is not None]


def alone(bundle: Any, one: Request, **options: Any) -> list[Output]:
    """What the request gets in an engine of its own, without a cache."""
    engine = engine_of(bundle, **{"rows": 1, "has_prefix_cache": False, **options})
    engine.add(one)
    return finish(engine)[one.id]
