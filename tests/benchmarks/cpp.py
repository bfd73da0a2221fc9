"""The C++ program against the Python one, in turn, on one bundle with native programs.

    python -m tests.benchmarks.cpp BUNDLE LLAMA_RUN [--rounds 5] [--threads 2]

Prints the medians: seconds from the start of the process to the first printed token (warm page
cache), tokens per second of decoding 128 tokens, and the most memory that was resident.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_NEW = 128
PROMPT = (1, 9690, 198)


@dataclass(frozen=True)
class Run:
    """One process: what it printed, and what that took."""

    tokens: list[int]
    first_s: float
    processor_s: float
    tokens_per_s: float
    peak_mb: float


def run(command: Sequence[str], prompt: Sequence[int], *, max_new: int, threads: int) -> Run:
    """Runs a program of the two to its end."""
    tokens = " ".join(map(str, prompt))
    command = [*command, "--tokens", tokens, "--max-new", str(max_new)]
    command += ["--threads", str(threads), "--stats"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        output = os.read(process.stdout.fileno(), 1)
        first_s = time.perf_counter() - started
        peak_kb = 0
        while piece := os.read(process.stdout.fileno(), 4096):
            output += piece
            peak_kb = max(peak_kb, _peak_kb(process.pid))
        stats = process.stderr.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    speed = re.search(r"decode\s+([0-9.]+) tokens/s", stats)
    if process.returncode or speed is None:
        raise SystemExit(f"{command[0]} failed: {stats}")
    return Run(
        tokens=list(map(int, output.split())),
        first_s=first_s,
        processor_s=usage.ru_utime + usage.ru_stime,
        tokens_per_s=float(speed[1]),
        peak_mb=peak_kb * 1024 / 1e6,
    )


def _peak_kb(pid: int) -> int:
    """The most that was resident so far; 0 of a process that is ending.

    What `wait4` says would include the memory of this process, from before the other's `exec`.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) if found else 0


def _median(runs: list[Run], field: str) -> float:
    return statistics.median(getattr(run, field) for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("llama_run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    commands = {
        "llama-run": [options.llama_run, options.bundle],
        "python": [sys.executable, "-m", "llama_export", "run", "--format", "aoti", options.bundle],
    }
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for round_ in range(options.rounds + 1):
        for name, command in commands.items():
            done = run(command, PROMPT, max_new=MAX_NEW, threads=options.threads)
            if round_:  # the first fills the page cache
                runs[name].append(done)
    sys.stdout.write("program    first token  decoding       processor  peak memory\n")
    for name, found in runs.items():
        sys.stdout.write(
            f"{name:9}  {_median(found, 'first_s'):7.2f} s  "
            f"{_median(found, 'tokens_per_s'):7.1f} tokens/s  {_median(found, 'processor_s'):5.2f} s"
            f"  {_median(found, 'peak_mb'):8.1f} MB\n"
        )
    first = {name: _median(found, "first_s") for name, found in runs.items()}
    sys.stdout.write(f"the start is {first['python'] / first['llama-run']:.1f} times as fast\n")
    same = {tuple(run.tokens) for found in runs.values() for run in found}
    sys.stdout.write(f"the same {MAX_NEW} tokens each time: {'yes' if len(same) == 1 else 'NO'}\n")


if __name__ == "__main__":
    main()
