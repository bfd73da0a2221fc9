"""How much of the engine's steps goes to choosing tokens, by how they are chosen.

    python -m tests.benchmarks.sampling BUNDLE [--rows N] [--prompt N] [--new N] [--runs N]
        [--text FILE]

Fills so many rows of one engine with the beginning of a text (after random tokens a model is far
less sure than it mostly is, and `top_p` has more to sort) and, once each has its first token, times
the steps. Prints for each kind of parameters the median of a step and the share of it that is in no
program. `llama-export bench --workload serve` measures the whole of serving, greedily.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import llama_runtime
from llama_runtime import SamplingParams
from llama_runtime.engine import Engine, Request
from llama_runtime.loader import LoadedBundle

KINDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top_k": SamplingParams(temperature=0.8, top_k=40, seed=1),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "top_k, top_p, min_p": SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1
    ),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2),
}


def timed_steps(engine: Engine, requests: list[Request]) -> tuple[list[float], float]:
    """Seconds of each step of all rows, and how many of all these seconds are in programs."""
    for request in requests:
        engine.add(request)
    begun: set[str] = set()
    while len(begun) < len(requests):
        begun |= {output.request_id for output in engine.step()}
    seconds, before = [], engine.stats.program_s
    while engine.stats.num_running == len(requests):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    in_programs = engine.stats.program_s - before
    while engine.has_work:
        engine.step()
    return seconds, in_programs


def requests_of(
    bundle: LoadedBundle, chosen: argparse.Namespace, params: SamplingParams
) -> list[Request]:
    prompt = tuple(bundle.tokenizer.encode(chosen.text.read_text())[: chosen.prompt])
    return [Request(str(row), prompt, params, chosen.new) for row in range(chosen.rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bundle")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--text", type=Path, default=Path("README.md"))
    chosen = parser.parse_args()
    bundle = llama_runtime.load(chosen.bundle)
    engine = Engine(bundle, rows=chosen.rows)
    timed_steps(engine, requests_of(bundle, chosen, KINDS["greedy"]))
    found: dict[str, list[tuple[list[float], float]]] = {name: [] for name in KINDS}
    for _ in range(chosen.runs):
        for name, params in KINDS.items():
            found[name].append(timed_steps(engine, requests_of(bundle, chosen, params)))
    for name, runs in found.items():
        step_ms = 1e3 * median(second for seconds, _ in runs for second in seconds)
        share = median(1 - in_programs / sum(seconds) for seconds, in_programs in runs)
        sys.stdout.write(f"{name}: {step_ms:.2f} ms a step, {share:.1%} outside of programs\n")


if __name__ == "__main__":
    main()
