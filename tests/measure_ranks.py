"""Measures the memory of each process that runs a bundle's programs of several shards, on the CPU.

    python tests/measure_ranks.py BUNDLE --shards 2

starts that many processes, lets each run a step at the last position of states that are full, and
prints a table. Counted is what Linux calls resident: everything that the process has touched, its own
and mapped, pages of the weights file and of torch's libraries among them although the processes share
those (VmHWM, the peak). Beside it the proportional share (Pss), in which what N processes share
counts as an N-th, and its anonymous part, which nobody shares.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import llama_runtime
from llama_artifacts.bundle import open_bundle
from llama_artifacts.per_rank import EMBEDDING
from llama_artifacts.signature import resolve
from llama_artifacts.weights import stored_tensors
from llama_runtime import shards
from tests.measure_memory import inputs_of, status

ALLOWED = 300 * 10**6
"""Bytes that a process may have beside its weights and states: torch itself, for the most part."""
NUM_STEPS = 3
TIMEOUT = 300.0
_FIELD = re.compile(r"^(Pss|Pss_Anon):\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Memory:
    """Bytes of one process.

    Attributes:
        idle: resident when it had joined the others, before any bundle.
        peak: the most that was resident.
        shared: the proportional share at the end.
        own: the anonymous part of that.
        states: of its set of states.
    """

    idle: int
    peak: int
    shared: int
    own: int
    states: int


def measure(folder: Path, format: Any, entry: str, sizes: dict[str, int]) -> Memory:
    """Runs steps in this process, one of those that `torchrun` started."""
    with shards.joined(timeout=TIMEOUT) as group:
        idle = status("VmRSS")
        program = llama_runtime.load(folder, format=format, group=group).entry(entry)
        signature = program.signature
        pools = {name: size for name, size in sizes.items() if name == "PoolPages"}
        states = program.new_states(**pools)
        for tensor in states.values():
            tensor.fill_(0.5)
        shape = resolve(signature.states[0].shape, pools)
        positions = shape[2] - 2 if not pools else sizes["Pages"] * shape[2] - 1
        inputs = inputs_of(signature, sizes, positions)
        for _ in range(NUM_STEPS):
            program.run(states, inputs)
        rollup = Path("/proc/self/smaps_rollup").read_text()
        found = {name: int(size) * 1024 for name, size in _FIELD.findall(rollup)}
        num_bytes = sum(tensor.nbytes for tensor in states.values())
        peak = status("VmHWM")
        return Memory(idle, peak, found["Pss"], found["Pss_Anon"], num_bytes)


def measure_all(
    folder: Path, num_shards: int, format: str, entry: str, sizes: dict[str, int]
) -> list[Memory]:
    """What each of so many processes needs, by rank."""
    with tempfile.TemporaryDirectory() as out:
        case = json.dumps([str(folder), format, entry, sizes, out])
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_shards), "--module", "tests.measure_ranks"]
        done = subprocess.run(
            [*command, "--case", case],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=2 * TIMEOUT,
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        found = sorted(Path(out).iterdir(), key=lambda path: int(path.name))
        return [Memory(**json.loads(path.read_text())) for path in found]


def allowed(folder: Path, num_shards: int, states: int) -> int:
    """What a process may need whose own states have so many bytes."""
    tensors = {name: found for name, (_, found) in stored_tensors(open_bundle(folder)).items()}
    whole = sum(found.end - found.start for found in tensors.values())
    embedding = tensors[EMBEDDING].end - tensors[EMBEDDING].start
    return whole // num_shards + embedding + states + ALLOWED


def main() -> None:
    """Prints the table, or measures this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--format", choices=("pt2", "aoti"), default="aoti")
    parser.add_argument("--entry", default="decode")
    parser.add_argument("--size", nargs=2, action="append", default=[], metavar=("DIM", "N"))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case:
        folder, format, entry, sizes, out = json.loads(chosen.case)
        found = measure(Path(folder), format, entry, sizes)
        (Path(out) / os.environ["RANK"]).write_text(json.dumps(asdict(found)))
        return
    sizes = {name: int(size) for name, size in chosen.size}
    write = sys.stdout.write
    write(
        "| rank | idle | peak | allowed | proportional share | its own |\n|---|---|---|---|---|---|\n"
    )
    ranks = measure_all(chosen.bundle, chosen.shards, chosen.format, chosen.entry, sizes)
    for number, found in enumerate(ranks):
        limit = allowed(chosen.bundle, chosen.shards, found.states)
        parts = (found.idle, found.peak, limit, found.shared, found.own)
        write(f"| {number} | {' | '.join(f'{part / 1e6:,.0f} MB' for part in parts)} |\n")


if __name__ == "__main__":
    main()
