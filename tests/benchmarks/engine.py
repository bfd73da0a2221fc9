"""Times the paged engine against the same requests one at a time, on the same programs.

    python -m tests.benchmarks.engine BUNDLE [--requests N] [--in-flight N] [--prompt A-B] [--new N]

Prints tokens per second of both, the share of a step that is not the program, time to the first
token, time between tokens, and the most pages in use.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field

import torch

import llama_runtime
from llama_runtime.engine import Engine, Request
from llama_runtime.sampling import SamplingParams

PERCENTILES = (50, 95, 99)


@dataclass
class Run:
    """What one run took, in seconds."""

    total: float = 0.0
    programs: float = 0.0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    most_pages: int = 0
    texts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.texts.values())) / self.total


def time_programs(engine: Engine, run: Run) -> None:
    original = engine._programs.run

    def timed(plan):  # type: ignore[no-untyped-def]
        start = time.perf_counter()
        logits = original(plan)
        run.programs += time.perf_counter() - start
        return logits

    engine._programs.run = timed  # type: ignore[method-assign]


def drive(engine: Engine, requests: list[Request], in_flight: int) -> Run:
    """Keeps so many requests in the engine until all are done."""
    run, queue, before = Run(), list(reversed(requests)), {}
    time_programs(engine, run)
    begin = time.perf_counter()
    while queue or engine.has_work:
        while queue and len(before) < in_flight:
            request = queue.pop()
            engine.add(request)
            before[request.id] = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        run.most_pages = max(run.most_pages, engine.stats.pages_used)
        for output in outputs:
            if output.error is not None:
                raise output.error
            text = run.texts.setdefault(output.request_id, [])
            (run.between if text else run.first).append(now - before[output.request_id])
            if output.token is not None:
                text.append(output.token)
            before[output.request_id] = now
            if output.finish_reason is not None:
                del before[output.request_id]
    run.total = time.perf_counter() - begin
    return run


def report(name: str, run: Run) -> None:
    sys.stdout.write(
        f"{name}: {run.tokens_per_second:.1f} tokens/s, {run.total:.1f} s, "
        f"{100 * (1 - run.programs / run.total):.1f} % outside the programs, "
        f"{run.most_pages} pages at most\n"
    )
    for label, values in (("first token", run.first), ("between tokens", run.between)):
        if values:
            points = torch.tensor(values).quantile(torch.tensor(PERCENTILES) / 100).tolist()
            shown = ", ".join(
                f"p{p} {1e3 * value:.0f}" for p, value in zip(PERCENTILES, points, strict=True)
            )
            sys.stdout.write(f"  {label} ms: {shown}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bundle")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--prompt", default="128-512")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--token-budget", type=int, default=512)
    chosen = parser.parse_args()
    low, high = map(int, chosen.prompt.split("-"))
    bundle, rng = llama_runtime.load(chosen.bundle), random.Random(0)
    vocab_size = bundle.manifest.model.vocab_size
    requests = [
        Request(
            str(number),
            tuple(rng.randrange(vocab_size) for _ in range(rng.randint(low, high))),
            SamplingParams(temperature=chosen.temperature, top_p=0.95, seed=number),
            chosen.new,
        )
        for number in range(chosen.requests)
    ]
    runs = {}
    for name, in_flight in (("together", chosen.in_flight), ("one at a time", 1)):
        engine = Engine(bundle, token_budget=chosen.token_budget, has_prefix_cache=False)
        warm_up = Request("warm-up", requests[0].prompt[:16], SamplingParams(), 2)
        drive(engine, [warm_up], 1)
        engine = Engine(bundle, token_budget=chosen.token_budget, has_prefix_cache=False)
        runs[name] = drive(engine, requests, in_flight)
        report(name, runs[name])
    ratio = runs["together"].tokens_per_second / runs["one at a time"].tokens_per_second
    same = sum(runs["together"].texts[r.id] == runs["one at a time"].texts[r.id] for r in requests)
    sys.stdout.write(f"{ratio:.2f} times as fast; {same} of {len(requests)} texts the same\n")


if __name__ == "__main__":
    main()
