"""How the memory of a process grows with the entries it runs: `python resident.py BUNDLE`.

Prints [resident bytes, peak bytes] after the load, a prefill, and a decode, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import llama_runtime


def resident() -> tuple[int, int]:
    """Resident bytes of this process now, and at most so far."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    names = ("RssAnon", "RssFile", "RssShmem", "VmHWM")
    sizes = {name: 1024 * int(fields[name].split()[0]) for name in names}
    return sum(sizes[name] for name in names[:3]), sizes["VmHWM"]


def main(folder: str) -> None:
    torch.ones(64, 64) @ torch.ones(64, 64)  # what the first product of a process allocates
    bundle = llama_runtime.load(folder, format="aoti", threads=1)
    figures = [resident()]
    prefill = bundle.entry("prefill")
    states = prefill.new_states()
    prefill(states, tokens=[[1, 9690, 198]], pos=0)
    figures.append(resident())
    bundle.entry("decode")(states, tokens=[[33]], pos=3)
    figures.append(resident())
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
