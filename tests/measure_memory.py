"""Measures what calls of a bundle need on the CPU against what was forecast; prints a table.

`python tests/measure_memory.py BUNDLE` runs every case in a process of its own. The peak is Linux's
VmHWM, set back before the call, after the states were filled and a small call touched the weights.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import llama_runtime
from llama_artifacts import manifest_file
from llama_artifacts.signature import Signature, resolve
from llama_runtime.states import torch_dtype

# Entry, batch, positions, tokens of a call.
CASES = (
    ("decode", 1, 2048, None),
    ("prefill", 1, 2048, 32),
    ("prefill", 1, 2048, 128),
    ("prefill", 1, 2048, 512),
    ("decode_paged", 1, 1024, None),
    ("decode_paged", 16, 1024, None),
    ("decode_paged", 64, 1024, None),
)
FORMATS = ("pt2", "aoti")
MB = 1e6


def status(field: str) -> int:
    """Bytes of a field of this process's status."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def inputs_of(signature: Signature, sizes: Mapping[str, int], position: int) -> dict[str, Any]:
    """Rows that all stand at a position, over pages of their own."""
    inputs = {}
    for spec in signature.inputs:
        shape = resolve(spec.shape, sizes)
        inputs[spec.name] = torch.zeros(shape, dtype=torch_dtype(spec.dtype))
        if spec.name in ("pos", "positions"):
            inputs[spec.name].fill_(position)
        if spec.name == "table":
            pages = torch.arange(1, inputs[spec.name].numel() + 1)
            inputs[spec.name].copy_(pages.reshape(shape))
    return inputs


def measure(
    folder: str, format: Any, entry: str, sizes: Mapping[str, int], position: int
) -> dict[str, int]:
    """Runs one call here: the process's peak, and how much of it the call added."""
    program = llama_runtime.load(folder, format=format).entry(entry)
    signature = program.signature
    pools = {name: size for name, size in sizes.items() if name == "PoolPages"}
    states = program.new_states(**pools)
    for tensor in states.values():
        tensor.fill_(0.5)
    program.run(states, inputs_of(signature, dict.fromkeys(sizes, 1) | pools, 0))
    inputs = inputs_of(signature, sizes, position)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back
    program.run(states, inputs)
    peak = status("VmHWM")
    return {"peak": peak, "added": peak - before}


def compare(folder: str, entry: str, format: Any, numbers: tuple[int, int, int | None]) -> str:
    """A row of the table."""
    from llama_export.footprint.call import Asked
    from llama_export.footprint.forecast import Question, forecast, open_subject

    subject, asked = open_subject(folder, Question(entry, format)), Asked(*numbers)
    call, found = subject.call(asked), forecast(subject, asked)
    case = json.dumps([folder, format, entry, call.sizes, call.position])
    command = [sys.executable, __file__, "--case", case]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    [modelled] = [figure.bytes for figure in found.figures if figure.name == "activations"]
    added, peak = measured["added"], measured["peak"]
    cells = (
        entry,
        f"batch {asked.batch}, {asked.seq_len:,} positions"
        + f", {asked.tokens} tokens" * bool(asked.tokens),
        format,
        f"{modelled / MB:.1f}",
        f"{added / MB:.1f}",
        f"{found.num_bytes / MB:.1f}",
        f"{peak / MB:.1f}",
        f"{found.num_bytes / peak:.3f}",
    )
    return f"| {' | '.join(cells)} |\n"


def main(arguments: list[str]) -> None:
    """Every case in every format that the bundle has, or one case in this process."""
    if arguments[0] == "--case":
        sys.stdout.write(json.dumps(measure(*json.loads(arguments[1]))))
        return
    programs = manifest_file.read(Path(arguments[0])).programs
    there = {(program.entry, program.format) for program in programs}
    sys.stdout.write("| entry | call | format | activations | added | sum | peak | sum/peak |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|---|\n")
    for entry, *numbers in CASES:
        for format in [name for name in FORMATS if (entry, name) in there]:
            sys.stdout.write(
                compare(arguments[0], entry, format, (numbers[0], numbers[1], numbers[2]))
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
