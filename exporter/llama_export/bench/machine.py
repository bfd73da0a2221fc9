"""What this machine can do at most: read memory, and multiply matrices."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

READ_BYTES = 512 * 2**20
GEMM_SIZE = 2048
NUM_TRIES = 3


@dataclass(frozen=True)
class Rates:
    """Bytes read per second by a sum; operations per second of square matrix products."""

    read_bytes_s: float
    bf16_flop_s: float
    f32_flop_s: float


class Machine:
    """Holds what the measurements need, so that they can be taken between runs."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._memory = torch.ones(READ_BYTES // 4)
        square = torch.randn(GEMM_SIZE, GEMM_SIZE)
        self._squares = {torch.float32: square, torch.bfloat16: square.bfloat16()}

    def measure(self) -> Rates:
        """The best of a few tries: what disturbs only slows down."""
        flops = 2 * GEMM_SIZE**3
        gemm = {
            dtype: flops / _shortest(lambda square=square: square @ square)  # type: ignore[misc]
            for dtype, square in self._squares.items()
        }
        read = READ_BYTES / _shortest(self._memory.sum)
        return Rates(read, gemm[torch.bfloat16], gemm[torch.float32])


def _shortest(call: Callable[[], object]) -> float:
    """Seconds of the shortest of a few calls after one that is not counted."""
    call()
    times = []
    for _ in range(NUM_TRIES):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def cpu_name() -> str:
    """The processor's name, as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
