"""What this machine can run: architecture, instruction sets, versions of the engines."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

# Instruction sets by short name: the level of the psABI that a compiler is told, the width of a
# vector in bits, and the flags of /proc/cpuinfo that the level stands for.
_V2 = ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
X86_ISAS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "avx512": ("x86-64-v4", 512, _V4),
    "avx2": ("x86-64-v3", 256, _V3),
}


def architecture() -> str:
    """The machine's architecture, such as `x86_64` or `aarch64`."""
    return platform.machine()


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The features that the kernel reports for this CPU; empty where it reports none."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def version(package: str) -> str | None:
    """The installed version of a package, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def minor(release: str) -> str:
    """`2.13` of `2.13.0+cpu`."""
    return ".".join(release.split("+")[0].split(".")[:2])
