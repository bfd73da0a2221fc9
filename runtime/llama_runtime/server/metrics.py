"""What `/metrics` tells: the engine's figures at this moment, and times and counts of requests."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama_runtime.engine import Output, Stats
from llama_runtime.server.worker import Worker

_PREFIX = "llama_export"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAUGES = (
    ("requests_waiting", "num_waiting", "Requests that wait for a row or for pages."),
    ("requests_running", "num_running", "Requests in the batch."),
    ("pages", "pages_total", "Pages of the pool."),
    ("pages_used", "pages_used", "Pages that requests hold."),
    ("pages_cached", "pages_cached", "Pages that are kept for prompts that begin alike."),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Tokens of prompts."),
    ("generated_tokens", "generated_tokens", "Tokens that were generated."),
    ("prefix_hit_tokens", "prefix_hit_tokens", "Tokens of prompts that were found in the cache."),
    ("preemptions", "num_preemptions", "Requests that gave their pages up and began again."),
    ("steps", "num_steps", "Steps of the engine."),
)


class Metrics:
    """A server's metrics, in a registry of its own."""

    def __init__(self, worker: Worker, *, num_rows: int) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineFigures(worker, num_rows))
        self._requests = Counter(
            f"{_PREFIX}_http_requests",
            "Answers by route and status.",
            ("path", "status"),
            registry=self._registry,
        )
        self.first_token = self._histogram("time_to_first_token", "From the request to its token.")
        self.between_tokens = self._histogram("inter_token_latency", "Between tokens of a choice.")

    def _histogram(self, name: str, text: str) -> Histogram:
        name = f"{_PREFIX}_{name}_seconds"
        return Histogram(name, text, buckets=_SECONDS, registry=self._registry)

    def count(self, path: str, status: int) -> None:
        """Counts an answer."""
        self._requests.labels(path, str(status)).inc()

    def timer(self) -> Timer:
        """Times the tokens of a call that has just begun."""
        return Timer(self)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class Timer:
    """When the last token of each of a call's requests came."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._started = time.perf_counter()
        self._last: dict[str, float] = {}

    def see(self, output: Output) -> None:
        """Takes an output at the moment in which it comes."""
        if output.token is None:
            return
        now = time.perf_counter()
        last = self._last.get(output.request_id)
        if last is None:
            self._metrics.first_token.observe(now - self._started)
        else:
            self._metrics.between_tokens.observe(now - last)
        self._last[output.request_id] = now


class _EngineFigures(Collector):
    """Reads the engine's figures when they are asked for."""

    def __init__(self, worker: Worker, num_rows: int) -> None:
        self._worker = worker
        self._num_rows = num_rows

    def collect(self) -> Iterator[Metric]:
        stats: Stats = self._worker.stats
        yield GaugeMetricFamily(f"{_PREFIX}_rows", "Rows of the batch.", self._num_rows)
        for name, field, text in _GAUGES:
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, getattr(stats, field))
        for name, field, text in _COUNTERS:
            yield CounterMetricFamily(f"{_PREFIX}_{name}", text, getattr(stats, field))


class Counting:
    """ASGI middleware that counts the answers of known routes."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Anyone can ask for any path; only known ones become labels.
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count(path, message["status"])
            await send(message)

        await self._app(scope, receive, counting_send)
