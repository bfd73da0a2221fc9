"""Lowers to an AOTInductor package: native code for one machine, weights outside."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import math
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch._inductor import aoti_compile_and_package, aoti_load_package
from torch._inductor import config as inductor_config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.export.passes import move_to_device_pass

import llama_export.lower.cached  # noqa: F401  # a lowering that Inductor finds by its operator
from llama_artifacts.codec import encode
from llama_artifacts.errors import BuildError
from llama_artifacts.manifest import Target
from llama_export.checkpoint.source import TensorInfo
from llama_export.lower.archive import write_archive
from llama_export.lower.backend import MAX_INLINED, Lowered, Place, needed_capability
from llama_export.lower.bitcasts import vector_bitcasts
from llama_export.lower.exponentials import short_exponentials
from llama_export.lower.file_names import without_file_names
from llama_export.lower.processes import processes
from llama_export.lower.products import MAX_ROWS
from llama_export.lower.small_loops import small_loops_serial
from llama_export.model.formulation import Formulation
from llama_export.model.llama import INV_FREQ
from llama_export.trace import Job, as_kind, torch_dtype, trace, without_stack_traces
from llama_runtime.machine import X86_ISAS, architecture, cpu_flags, minor, version
from llama_runtime.shards import NATIVE_GROUP

# Pairs of bf16 are multiplied by kernels of ours, whatever the number of rows.
_ANY_ROWS = 1 << 31

# Of the environment of a compiler, what changes no code.
_NO_MATTER = ("TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS")


class AotiBackend:
    """AOTInductor; see `Backend`."""

    def check(self, device: str, isa: str | None) -> None:
        _options(device, isa)

    def compute_dtype(self, dtype: str, place: Place) -> str:
        return dtype

    def formulation(self, dtype: torch.dtype, place: Place, num_shards: int = 1) -> Formulation:
        form = Formulation(
            dtype,
            reads_positions=place.device == "cpu",
            numerics=place.numerics,
            num_shards=num_shards,
            group=NATIVE_GROUP,
        )
        if place.device == "cpu":
            has_pairs = dtype == torch.bfloat16 and _isa(place.isa) == "avx512"
            return replace(form, max_fused_rows=_ANY_ROWS if has_pairs else MAX_ROWS)
        has_units = torch.cuda.get_device_capability() >= (8, 9)
        return replace(form, max_fused_rows=MAX_ROWS, device="cuda", has_fp8_units=has_units)

    def facts(self, job: Job, place: Place) -> dict[str, Any]:
        options, target = _options_for(job, place)
        return {
            "torch": torch.__version__,
            "triton": version("triton"),
            "compiler": _compiler(place.device),
            "options": {name: str(value) for name, value in options.items()},
            "target": encode(target),
            "inlined": _inlined(job, place),
            "environment": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(("TORCHINDUCTOR_", "CXX", "OMP_")) and name not in _NO_MATTER
            },
        }

    def lower(self, job: Job, place: Place) -> Lowered:
        options, target = _options_for(job, place)
        program = trace(job)
        for name, info in job.weights.items():
            tensor = _value(name, info, job, place)
            program.state_dict[name] = as_kind(program.state_dict[name], tensor)
        if place.device == "cuda":
            from llama_export.lower.cuda import with_kernels  # where Triton is

            program = with_kernels(move_to_device_pass(program, "cuda"))
        file = f"{job.stem}.{target.device}-{target.isa or target.capability}.pt2"
        archive = io.BytesIO()
        with compiler(options), short_exponentials(job.form.dtype), processes(job.form):
            aoti_compile_and_package(program, package_path=archive)
        write_archive(place.folder / file, archive)
        bound = set(aoti_load_package(str(place.folder / file)).get_constant_fqns())
        constants = tuple(name for name in job.weights if name in bound)
        requires = {"torch": minor(torch.__version__), **needed_capability(program)}
        return Lowered(file, target, requires, constants)


def _value(name: str, info: TensorInfo, job: Job, place: Place) -> torch.Tensor:
    """A weight for the compiler; of parts, which differ from process to process, a stand-in."""
    if name in job.cuts and math.prod(info.shape) <= MAX_INLINED:
        raise BuildError(
            f"`{name}` is too small to be cut: {math.prod(info.shape)} elements of it are left",
            hint="choose fewer --shards, or build --format pt2",
        )
    if place.weights is None or name in job.cuts:
        return _stand_in(name, info, place)
    return place.weights[name]


def _stand_in(name: str, info: TensorInfo, place: Place) -> torch.Tensor:
    """Compiling reads shapes and addresses of constants: memory that is never touched will do.

    The exception are vectors of up to 8 elements, whose values Inductor writes into the code.
    """
    if name == INV_FREQ:
        return place.inv_freq
    if math.prod(info.shape) <= MAX_INLINED:
        raise BuildError(
            f"`{name}` is too small to compile without its values", hint="use --weights copy"
        )
    return torch.empty(info.shape, dtype=torch_dtype(info.dtype))


def _inlined(job: Job, place: Place) -> str:
    """A digest of the weights whose values may be written into the code."""
    digest = hashlib.sha256()
    for name, info in job.weights.items():
        if math.prod(info.shape) <= MAX_INLINED:
            tensor = _value(name, info, job, place)
            digest.update(
                name.encode() + b"\0" + bytes(tensor.reshape(-1).view(torch.uint8).numpy())
            )
    return digest.hexdigest()


@functools.cache
def _compiler(device: str) -> str:
    """The compiler that Inductor will call, with its version."""
    if device == "cuda":
        return f"cuda {torch.version.cuda}"
    name = get_cpp_compiler()
    found = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
    return found.stdout.partition("\n")[0]


@contextlib.contextmanager
def compiler(options: dict[str, Any]) -> Iterator[None]:
    """Inductor compiles in the block as this project needs it."""
    with (
        warnings.catch_warnings(),
        inductor_config.patch(options),
        vector_bitcasts(),
        without_file_names(),
        small_loops_serial(),
        without_stack_traces(),
    ):
        warnings.simplefilter("ignore")
        yield


def _options_for(job: Job, place: Place) -> tuple[dict[str, Any], Target]:
    options, target = _options(place.device, place.isa)
    if job.form.is_sharded:
        # A thread of Gloo holds on to the tensors of a collective for a moment after it. To let go
        # of one that became a result, which Python has seen, it needs Python's lock, which the next
        # call keeps while it waits for that thread: no such tensor may become a result.
        options |= {"allow_buffer_reuse": False, "inplace_buffers": False}
    return options, target


def _options(device: str, isa: str | None) -> tuple[dict[str, Any], Target]:
    options: dict[str, Any] = {
        "aot_inductor.package_constants_in_so": False,
        # The wrapper only calls kernels; optimising it costs most of the build for nothing.
        "aot_inductor.compile_wrapper_opt_level": "O0",
        # Otherwise the build machine's thread count is baked in; the number is for decisions alone.
        "cpp.dynamic_threads": True,
        "cpp.threads": 16,
    }
    if device == "cuda":
        if not torch.cuda.is_available():
            raise BuildError(
                "aoti programs for CUDA are compiled where a CUDA device is; there is none here",
                hint="run this build on the GPU machine, or build --format pt2 here",
            )
        major, minor_ = torch.cuda.get_device_capability()
        return options, Target("cuda", architecture(), capability=f"{major}.{minor_}")
    _check_compiler()
    return _cpu_options(options, isa)


def _cpu_options(options: dict[str, Any], isa: str | None) -> tuple[dict[str, Any], Target]:
    machine = architecture()
    if machine != "x86_64":
        if isa is not None:
            raise BuildError(
                f"--isa {isa} is for x86-64, this machine is {machine}", hint="omit it"
            )
        return options, Target("cpu", machine, "native", tuple(sorted(cpu_flags())))
    isa = _isa(isa)
    if isa is None:
        raise BuildError("aoti programs need a CPU with AVX2", hint="build --format pt2 or onnx")
    march, width, flags = X86_ISAS[isa]
    if not cpu_flags().issuperset(flags):
        raise BuildError(
            f"--isa {isa} cannot be built here: this CPU lacks "
            f"{', '.join(sorted(set(flags) - cpu_flags()))}",
            hint="build on a machine that has it, or choose another --isa",
        )
    options |= {"cpp.march": march, "cpp.simdlen": width}
    with inductor_config.patch(options):
        vector_flags = _cpuinfo_names(pick_vec_isa().build_arch_flags())
    return options, Target("cpu", machine, isa, tuple(sorted({*flags, *vector_flags})))


def _isa(isa: str | None) -> str | None:
    """The instruction set that is asked for, or the best of this machine; None: it has none."""
    fitting = (name for name, (_, _, flags) in X86_ISAS.items() if cpu_flags().issuperset(flags))
    return isa or next(fitting, None)


def _cpuinfo_names(arch_flags: str) -> set[str]:
    """The flags of /proc/cpuinfo for a compiler's `-m` flags."""
    spelled = {"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}
    names = {flag.removeprefix("-m").replace("-", "_") for flag in arch_flags.split()}
    return {spelled.get(name, name) for name in names}


def _check_compiler() -> None:
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        raise BuildError(
            "aoti programs are compiled with g++, and there is none on PATH",
            hint="install g++, or leave --format aoti out",
        )
