"""Keeps loops over little data, a norm of one row say, on one thread."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch._inductor.codegen.cpp import CppKernel, ParallelDepth

MIN_PARALLEL = 1 << 14
"""Elements: below, starting threads and waiting for them takes longer than the loop."""


@contextlib.contextmanager
def small_loops_serial() -> Iterator[None]:
    """C++ that Inductor writes in the block starts no threads for loops below `MIN_PARALLEL`.

    Where the number of threads is not known at build time, Inductor makes every loop parallel.
    """
    original: Any = CppKernel.decide_parallel_depth

    def decide(kernel: Any, max_parallel_depth: ParallelDepth, threads: int) -> ParallelDepth:
        sizes = kernel.call_ranges
        is_known = all(isinstance(size, int) or size.is_number for size in sizes)
        if is_known and math.prod(map(int, sizes)) < MIN_PARALLEL:
            return ParallelDepth(parallel_depth=0, start_depth=max_parallel_depth.start_depth)
        return original(kernel, max_parallel_depth, threads)

    with mock.patch.object(CppKernel, "decide_parallel_depth", decide):
        yield
