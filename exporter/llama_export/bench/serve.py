"""Many requests through one engine, at most so many in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

import llama_runtime
from llama_export.bench.methods import Setup
from llama_export.bench.worker import peak_bytes
from llama_runtime import SamplingParams
from llama_runtime.engine import Engine, Request

NUM_TOP = 8
"""Likeliest tokens that are asked for where two ways of serving differ."""


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

    def serve(
        self, prompts: Sequence[Sequence[int]], num_new: int, concurrency: int
    ) -> dict[str, Any]:
        """Serves every prompt, in order, a new one as soon as fewer than `concurrency` are under way.

        Returns:
            `seconds` of the whole; `ttft_ms` of each request from when it was handed to the
            engine; `token_ms`, all times from one token of a request to its next; `pages_peak` and
            `pages_total`; `tokens` of each request.
        """
        engine = self._make_engine(concurrency)
        queue = deque(enumerate(prompts))
        tokens: list[list[int]] = [[] for _ in prompts]
        last: dict[int, float] = {}
        ttft_ms: list[float] = []
        token_ms: list[float] = []
        pages_peak = 0
        started = time.perf_counter()
        while queue or engine.has_work:
            while queue and len(last) < concurrency:
                index, prompt = queue.popleft()
                engine.add(self._make_request(str(index), prompt, num_new))
                last[index] = time.perf_counter()
            outputs = engine.step()
            now = time.perf_counter()
            pages_peak = max(pages_peak, engine.stats.pages_used)
            for output in outputs:
                index = int(output.request_id)
                if output.error is not None:
                    raise output.error
                if output.token is not None:
                    waits = token_ms if tokens[index] else ttft_ms
                    waits.append(1000 * (now - last[index]))
                    tokens[index].append(output.token)
                    last[index] = now
                if output.finish_reason is not None:
                    del last[index]
        return {
            "seconds": time.perf_counter() - started,
            "ttft_ms": ttft_ms,
            "token_ms": token_ms,
            "pages_peak": pages_peak,
            "pages_total": engine.stats.pages_total,
            "tokens": tokens,
        }

    def margin(self, tokens: Sequence[int], token: int) -> dict[str, Any]:
        """How much lower a token's logit is than the largest after some tokens, served alone.

        Of tokens that are not among the likeliest only a bound is known; it is given.
        """
        engine = self._make_engine(1)
        engine.add(self._make_request("margin", tokens, 1, num_logprobs=NUM_TOP))
        top: list[tuple[int, float]] = []
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                top = list(output.top_logprobs) or top
        found = dict(top)
        return {"margin": top[0][1] - found.get(token, float("-inf"))}
