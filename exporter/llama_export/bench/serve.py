"""Many requests through one engine, at most so many in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import llama_runtime
from llama_export.bench.methods import Setup
from llama_export.bench.worker import peak_bytes
from llama_runtime import SamplingParams
from llama_runtime.engine import Engine, Request

NUM_TOP = 8
"""Likeliest tokens that are asked for where two ways of serving differ."""
WARM_UP_TOKENS = 4
"""New tokens of a request that is not timed."""


class Server:
    """Serves requests with fresh engines over one loaded bundle.

    Args:
        make_engine: of at most so many rows; its prompts share nothing.
        make_request: of an id, a prompt and the most new tokens, greedy.
    """

    def __init__(
        self, make_engine: Callable[[int], Any], make_request: Callable[..., Any], label: str
    ) -> None:
        self._make_engine = make_engine
        self._make_request = make_request
        self._label = label

    @classmethod
    def open(cls, setup: Setup) -> Server:
        """A server of a bundle.

        Raises:
            SessionError: the bundle lacks the entries of an engine.
        """
        bundle = llama_runtime.load(
            setup.folder,
            format=setup.format,
            threads=setup.threads,
            weights_dir=setup.weights_dir,
        )

        def make_engine(rows: int) -> Any:
            return Engine(bundle, rows=rows, has_prefix_cache=False)

        def make_request(name: str, prompt: Sequence[int], num_new: int, **options: Any) -> Any:
            return Request(name, tuple(prompt), SamplingParams(), num_new, **options)

        make_engine(1)  # refuses a bundle that has no such entries
        return cls(make_engine, make_request, bundle.entry("decode_paged").format)

    def describe(self) -> dict[str, Any]:
        """The format that runs, and its versions."""
        return {"label": self._label, "versions": {"torch": torch.__version__}}

    def peak(self) -> dict[str, Any]:
        """Memory of the process."""
        return {"peak_memory_bytes": peak_bytes()}

    def warm_up(self, prompts: Sequence[Sequence[int]], concurrency: int) -> dict[str, Any]:
        """Runs every program of the engine: prompts, prompts beside steps (of two and more), steps."""
        engine = self._make_engine(concurrency)
        for index, prompt in enumerate(prompts):
            engine.add(self._make_request(str(index), prompt, WARM_UP_TOKENS))
            # The next one comes while this one takes steps.
            while engine.has_work and not _checked(engine.step()):
                pass
        while engine.has_work:
            _checked(engine.step())
        return {}

    def serve(
        self, prompts: Sequence[Sequence[int]], num_new: int, concurrency: int
    ) -> dict[str, Any]:
        """Serves every prompt, in order, a new one as soon as fewer than `concurrency` are under way.

        Returns:
            `seconds` of the whole, `step_s` of them in the engine's steps, and `program_s` of
            these in its programs; `ttft_ms` of each request from when it was handed to the
            engine; `token_ms`, all times from one token of a request to its next; `pages_peak` and
            `pages_total`; `tokens` of each request.
        """
        engine = self._make_engine(concurrency)
        queue = deque(enumerate(prompts))
        log = _Log([[] for _ in prompts])
        step_s = 0.0
        started = time.perf_counter()
        while queue or engine.has_work:
            while queue and len(log.last) < concurrency:
                index, prompt = queue.popleft()
                engine.add(self._make_request(str(index), prompt, num_new))
                log.last[index] = time.perf_counter()
            began = time.perf_counter()
            outputs = engine.step()
            now = time.perf_counter()
            step_s += now - began
            log.see(_checked(outputs), now, engine.stats.pages_used)
        seconds = time.perf_counter() - started
        stats = engine.stats
        return {
            "seconds": seconds,
            "step_s": step_s,
            "program_s": stats.program_s,
            "ttft_ms": log.ttft_ms,
            "token_ms": log.token_ms,
            "pages_peak": log.pages_peak,
            "pages_total": stats.pages_total,
            "tokens": log.tokens,
        }

    def margin(self, tokens: Sequence[int], token: int) -> dict[str, Any]:
        """How much lower a token's logit is than the largest after some tokens, served alone.

        Of tokens that are not among the likeliest only a bound is known; it is given.
        """
        engine = self._make_engine(1)
        engine.add(self._make_request("margin", tokens, 1, num_logprobs=NUM_TOP))
        top: list[tuple[int, float]] = []
        while engine.has_work:
            for output in _checked(engine.step()):
                top = list(output.top_logprobs) or top
        found = dict(top)
        return {"margin": top[0][1] - found.get(token, float("-inf"))}


@dataclass
class _Log:
    """What requests got, and when.

    Attributes:
        tokens: of each request.
        last: when the requests under way were handed over, or had their last token.
        ttft_ms: see `Server.serve`; so are the others.
    """

    tokens: list[list[int]]
    last: dict[int, float] = field(default_factory=dict)
    ttft_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)
    pages_peak: int = 0

    def see(self, outputs: Sequence[Any], now: float, pages_used: int) -> None:
        """Takes what a step gave."""
        self.pages_peak = max(self.pages_peak, pages_used)
        for output in outputs:
            index = int(output.request_id)
            if output.token is not None:
                waits = self.token_ms if self.tokens[index] else self.ttft_ms
                waits.append(1000 * (now - self.last[index]))
                self.tokens[index].append(output.token)
                self.last[index] = now
            if output.finish_reason is not None:
                del self.last[index]


def _checked(outputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs of a step, none of which is a failure."""
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs
