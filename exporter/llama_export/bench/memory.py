"""The memory of a process and all that it started, watched from outside."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INTERVAL_S = 0.02
_PROC = Path("/proc")


@dataclass
class Peak:
    """Most resident memory of a tree of processes so far; 0 where the kernel does not tell."""

    num_bytes: int = 0


@contextlib.contextmanager
def watched(pid: int) -> Iterator[Peak]:
    """Watches a process and its descendants until the end of the block.

    Memory that processes share, such as mapped files, counts once for each. What lives shorter than
    `INTERVAL_S` may be missed.
    """
    peak, end = Peak(), threading.Event()

    def watch() -> None:
        while not end.wait(INTERVAL_S):
            peak.num_bytes = max(peak.num_bytes, tree_bytes(pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        end.set()
        thread.join()


def tree_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants now; those that are gone count nothing."""
    total, waiting = 0, [pid]
    while waiting:
        folder = _PROC / str(waiting.pop())
        try:
            status = (folder / "status").read_text(encoding="utf-8", errors="replace")
            for children in folder.glob("task/*/children"):
                waiting += map(int, children.read_text(encoding="ascii").split())
        except OSError:
            continue
        sizes = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
        total += sum(map(int, sizes)) * 1024
    return total
