"""Measures how long all seventeen entries of a preset take to trace from headers alone, and the memory it needs.

    python -m tests.benchmarks.tracing [--preset NAME ...]

Each preset is traced in a process of its own, one entry after the other; with two presets and two
cores, one core each.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

from llama_export import presets
from llama_export.bench.worker import peak_bytes
from llama_export.blueprint import draw
from llama_export.programs import Maker
from llama_export.recipe import Recipe
from llama_export.trace import trace
from tests.end_to_end.test_without_weights import PRESETS, write_headers


def main() -> None:
    """Prints seconds per entry and a line for each preset."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", action="append", choices=presets.names())
    names = parser.parse_args().preset or PRESETS
    spawning = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(names), mp_context=spawning) as pool:
        for line in pool.map(measure, names):
            sys.stdout.write(line + "\n")


def measure(name: str) -> str:
    """Traces every entry of one preset as a pt2 program."""
    preset = presets.find(name)
    assert preset is not None
    with tempfile.TemporaryDirectory() as scratch:
        headers = write_headers(Path(scratch) / "headers", preset.config)
        recipe = Recipe(
            str(headers), Path(scratch) / "out", ("all",), ("pt2",), preset.max_seq, weights="none"
        )
        started = time.perf_counter()
        blueprint = draw(recipe)
        maker = Maker(blueprint, Path(scratch), None)
        seconds = {}
        for draft in blueprint.drafts:
            since = time.perf_counter()
            trace(maker.job(draft))
            seconds[draft.label] = time.perf_counter() - since
        total = time.perf_counter() - started
    peak = peak_bytes() / 2**30
    each = ", ".join(f"{label} {taken:.1f}" for label, taken in seconds.items())
    return f"{name}: {len(seconds)} programs, {total:.0f} s, peak {peak:.2f} GiB ({each})"


if __name__ == "__main__":
    main()
