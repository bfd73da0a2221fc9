"""Modules as native code, by themselves: compiled for an instruction set, and called."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, aoti_load_package

from llama_export.lower import aoti
from llama_runtime.machine import X86_ISAS, cpu_flags

Call = Callable[..., list[Tensor]]
NUM_THREADS = (1, 2, 7)
BEST, *OTHERS = sorted(X86_ISAS, key=lambda isa: not set(X86_ISAS[isa][2]) <= cpu_flags())
"""The ISAs of native code: the best of this machine, and those that take as long again."""
ISAS = [BEST, *(pytest.param(isa, marks=pytest.mark.long) for isa in OTHERS)]


def compile_native(
    module: nn.Module, arguments: tuple[Any, ...], isa: str, folder: Path, dims: Any = None
) -> Path:
    """The package of a module that is called with such arguments; skips where the CPU lacks the ISA.

    `dims` are the sizes that stay open, as `torch.export` takes them.
    """
    if not set(X86_ISAS[isa][2]) <= cpu_flags():
        pytest.skip(f"this CPU has no {isa}")
    options, _ = aoti._options("cpu", isa)
    # Compiling the headers for an ISA of few programs takes longer than it spares.
    options["aot_inductor.precompile_headers"] = isa == BEST
    archive = io.BytesIO()
    with aoti.compiler(options):
        exported = torch.export.export(module, arguments, dynamic_shapes=dims)
        aoti_compile_and_package(exported, package_path=archive)
    package = folder / "module.pt2"
    package.write_bytes(archive.getvalue())
    return package


def load_native(package: Path, module: nn.Module | None = None) -> Call:
    """The package as a function, over the parameters of the module."""
    run: Any = aoti_load_package(str(package))
    if module is not None:
        weights = dict(module.named_parameters())
        run.load_constants(weights, check_full_update=True, user_managed=True)
    return run


def call_by_threads(run: Call, *arguments: Any) -> list[Tensor]:
    """What a call gives, the same to the bit however many threads share the work."""
    results = []
    for num_threads in NUM_THREADS:
        torch.set_num_threads(num_threads)
        results.append(run(*arguments))
    torch.set_num_threads(1)
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert torch.equal(one, other)
    return results[0]


def kernel_sources(package: Path) -> str:
    """The C++ code that was compiled."""
    with zipfile.ZipFile(package) as archive:
        names = [name for name in archive.namelist() if name.endswith(".kernel.cpp")]
        return "\n".join(archive.read(name).decode() for name in names)
