"""Measures building: one program of the bundle, made anew and taken from the cache, by the command."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from llama_artifacts.codes import kept_codes
from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import BuildError, CompatibilityError, IntegrityError
from llama_artifacts.manifest import Format
from llama_artifacts.safetensors import read_header
from llama_export.bench import remote
from llama_export.bench.figures import spread
from llama_export.bench.machine import cpu_name
from llama_export.bench.memory import watched
from llama_export.bench.rounds import StartMachine, today, workload
from llama_export.bench.setting import Setting
from llama_export.checkpoint.layout import expected_tensors
from llama_export.laws.oracle import model_config
from llama_export.model.llama import INV_FREQ
from llama_export.page.timings import Machine, Timing, Timings
from llama_export.report import Reporter
from llama_export.rerun import VERSION, VERSION_KEY, choices
from llama_runtime.machine import version

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
WAYS = ("made", "from the cache")


@dataclass(frozen=True)
class Built:
    """One run of `llama-export build`.

    Attributes:
        seconds: of the process, from its start to its end.
        program_s: of these, to make the program or to copy it.
        program_bytes: size of its file.
        is_cached: whether it was copied.
        peak_bytes: most memory of the process and those that it started, compilers for example.
    """

    seconds: float
    program_s: float
    program_bytes: int
    is_cached: bool
    peak_bytes: int


Build = Callable[[Path, Path], Built]
"""Of a folder with a model and its recipe, and a folder for the cache."""


def measure(
    setting: Setting,
    scratch: Path,
    *,
    reporter: Reporter,
    build: Build | None = None,
    start_machine: StartMachine = remote.start_machine,
) -> Timings:
    """Builds the program of a step `setting.runs` times with an empty cache, each time twice.

    The model is the bundle's configuration with weights that have no data, since a build of
    programs alone reads none.

    Raises:
        CompatibilityError: the bundle has no `config.json`, or programs of several builds.
        BuildError: the command fails.
    """
    format = setting.formats[0] or _format(setting)
    write_model(setting, scratch)
    write_recipe(setting, scratch, format)
    build = build or (lambda folder, cache: run_build(folder, cache, setting.threads))
    runs: dict[str, list[Built]] = {way: [] for way in WAYS}
    rates = []
    machine = start_machine(setting.threads)
    try:
        for number in range(setting.runs):
            rates.append(machine.call("measure"))
            for way in WAYS:
                with reporter.step(f"run {number + 1} of {setting.runs}, {way}"):
                    built = build(scratch, scratch / f"cache-{number}")
                if built.is_cached != (way != WAYS[0]):
                    raise BuildError(f"expected a program {way}, got another", where=scratch)
                runs[way].append(built)
    finally:
        machine.close()
    best = {name: median(rate[name] for rate in rates) for name in rates[0]}
    rows = tuple(_row(f"{setting.step.entry} {format}, {way}", runs[way]) for way in WAYS)
    kept = Machine(cpu_name(), setting.threads, **best)
    return Timings(rows, today(), _versions(), kept, workload(setting, None))


def write_model(setting: Setting, folder: Path) -> None:
    """A checkpoint of the bundle's network whose weights are a hole in a file.

    Raises:
        CompatibilityError: the bundle has no `config.json`, or keeps integers of its checkpoint,
            whose file is none of this kind.
    """
    if kept_codes(setting.bundle):
        raise CompatibilityError(
            "expected weights that a safetensors checkpoint holds, got a GGUF file's integers",
            where=setting.bundle.folder,
            hint="measure a bundle that is built without --quantize stored",
        )
    if CONFIG_NAME not in setting.manifest.files:
        raise CompatibilityError(
            f"expected `{CONFIG_NAME}` in the bundle, to build from, found none",
            where=setting.bundle.folder,
            hint="build the bundle from a checkpoint that has one",
        )
    (folder / CONFIG_NAME).write_bytes(setting.bundle.path(CONFIG_NAME).read_bytes())
    header, end = {}, 0
    for name, (dtype, shape) in _tensors(setting).items():
        kind = from_name(dtype)
        start, end = end, end + kind.num_bytes * math.prod(shape)
        header[name] = {
            "dtype": kind.safetensors,
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    data = json.dumps(header).encode()
    with (folder / WEIGHTS_NAME).open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + end)


def write_recipe(setting: Setting, folder: Path, format: str) -> None:
    """The choices of the bundle's build, for one program and no weights."""
    own = choices(setting.bundle)
    one = {"entries": [setting.step.entry], "formats": [format], "variants": ["none"]}
    recipe = {**own, **one, "model": str(folder), "weights": "none", VERSION_KEY: VERSION}
    if format != "aoti":
        recipe.pop("isa", None)
    _recipe(folder).write_text(json.dumps(recipe))


def run_build(folder: Path, cache: Path, threads: int) -> Built:
    """Runs the command, with no cache but the one that is given.

    Raises:
        BuildError: it fails; its last line of output is told.
    """
    words = ["build", folder, "--config", _recipe(folder), "-o", folder / "bundle", "--overwrite"]
    words += ["--cache-dir", cache / "programs", "--json"]
    compiled = cache / "compiler"
    compiled.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "llama_export", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    with watched(process.pid) as peak:
        answer, log = process.communicate()
    seconds = time.perf_counter() - started
    if process.returncode:
        lines = [line for line in log.splitlines() if line.startswith("error: ")] or log.split("\n")
        raise BuildError(f"the build fails: {lines[-1].removeprefix('error: '):.300}", where=folder)
    (made,) = json.loads(answer)["programs"]
    return Built(seconds, made["seconds"], made["bytes"], made["is_cached"], peak.num_bytes)


def _format(setting: Setting) -> Format:
    """Of the step's programs the one that takes longest to build: native code where there is some."""
    found = {p.format for p in setting.manifest.programs if p.entry == setting.step.entry}
    return "aoti" if "aoti" in found else setting.step.format


def _tensors(setting: Setting) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of the checkpoint, in which what the build rounded was not yet."""
    manifest = setting.manifest
    if manifest.quantized is not None:
        shapes = expected_tensors(model_config(manifest))
        return {name: (manifest.dtype, shape) for name, shape in shapes.items()}
    return {
        name: (tensor.dtype, tuple(tensor.shape))
        for path in setting.places.values()
        for name, tensor in read_header(path, error=IntegrityError).tensors.items()
        if name != INV_FREQ
    }


def _row(method: str, runs: list[Built]) -> Timing:
    times = spread([run.seconds for run in runs])
    program = median(run.program_s for run in runs)
    return Timing(
        method=method,
        build_s=times.median,
        build_s_range=times.range,
        peak_memory_bytes=max(run.peak_bytes for run in runs),
        disk_bytes=runs[-1].program_bytes,
        notes=f"the program alone {program:.2f} s",
    )


def _versions() -> dict[str, Any]:
    found = {name: version(name) for name in ("torch", "onnx", "onnxscript")}
    return {name: text for name, text in found.items() if text is not None}


def _recipe(folder: Path) -> Path:
    return folder / "recipe.json"
