"""Measures: every method in turn, A B A B, and the machine between them."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np

from llama_artifacts.errors import VerificationError
from llama_artifacts.manifest import Format, Manifest
from llama_export.bench import figures, remote
from llama_export.bench.figures import Cost, spread
from llama_export.bench.machine import cpu_name
from llama_export.bench.methods import Setup
from llama_export.bench.remote import Logits, Remote, Run
from llama_export.bench.setting import Setting
from llama_export.bench.tokens import MARGINS, agreement
from llama_export.page.timings import Machine, Timing, Timings, Workload
from llama_export.report import Reporter

Start = Callable[[str, Setup], Remote]
StartMachine = Callable[[int], Remote]


@dataclass
class _Method:
    """A method and what was measured of it."""

    setup: Setup
    process: Remote
    label: str = ""
    disk_bytes: int = 0
    peak_bytes: int = 0
    runs: list[Run] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)


def measure(
    setting: Setting,
    scratch: Path,
    *,
    reporter: Reporter,
    start: Start = remote.start,
    start_machine: StartMachine = remote.start_machine,
) -> Timings:
    """Times the bundle, and its peers, on one prompt.

    Args:
        setting: what to measure; any workload but `serve`.
        scratch: a folder for files that peers need.
        reporter: told about each method.
        start: starts the process of a method.
        start_machine: starts the one that measures the machine.

    Raises:
        CompatibilityError: a peer is not installed, or the machine cannot run the bundle.
        VerificationError: a method says something else than the bundle.
    """
    prompt = setting.prompt()
    versions: dict[str, str] = {}
    rates = []
    with contextlib.ExitStack() as stack:
        methods = []
        for setup in _setups(setting, scratch):
            with reporter.step(f"start {setup.method} {setup.format or ''}".rstrip()):
                folder = setting.bundle.folder
                methods.append(_opened(setup, folder, prompt, start, stack, versions))
        machine = start_machine(setting.threads)
        stack.callback(machine.close)
        notes, differences = _agreements(setting, prompt, methods)
        if setting.name == "load":
            for method in methods:
                method.loads.clear()  # the first start may have read from the disk
        for number in range(setting.runs):
            with reporter.step(f"run {number + 1} of {setting.runs}"):
                rates.append(machine.call("measure"))
                for method in methods:
                    _run(setting, method, prompt, start)
        for method in methods:
            peak = method.process.call("peak")["peak_memory_bytes"]
            method.peak_bytes = max(method.peak_bytes, peak)
    best = Machine(
        cpu_name(),
        setting.threads,
        **{name: median(rate[name] for rate in rates) for name in rates[0]},
    )
    rows = [
        replace(_row(setting, method, best), notes=note, max_logit_difference=difference)
        for method, note, difference in zip(methods, notes, differences, strict=True)
    ]
    return Timings(
        tuple(rows), today(), versions, best, workload(setting, _cost(setting, setting.manifest))
    )


def today() -> str:
    """The day, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def workload(setting: Setting, cost: Cost | None) -> Workload:
    """The setting as `bench.json` has it."""
    return Workload(
        name=setting.name,
        prompt_len=setting.prompt_len,
        new_tokens=setting.new_tokens,
        runs=setting.runs,
        rows=1 if setting.requests else setting.manifest.batch,
        requests=setting.requests,
        concurrency=setting.concurrency,
        alone=setting.alone if setting.concurrency > 1 else 0,
        step_bytes=cost.step_bytes if cost else None,
        prompt_flops=cost.prompt_flops if cost else None,
    )


def setup_of(setting: Setting, scratch: Path, method: str, format: Format | None = None) -> Setup:
    """What a method is opened with."""
    return Setup(
        method=method,
        folder=setting.bundle.folder,
        scratch=scratch,
        threads=setting.threads,
        positions=setting.prompt_len + setting.new_tokens,
        format=format,
        weights_dir=setting.weights_dir,
    )


def _setups(setting: Setting, scratch: Path) -> list[Setup]:
    own = [setup_of(setting, scratch, "bundle", format) for format in setting.formats]
    others = [replace(setup, folder=folder) for folder in setting.beside for setup in own]
    return [*own, *others, *(setup_of(setting, scratch, peer) for peer in setting.peers)]


def _opened(
    setup: Setup,
    folder: Path,
    prompt: tuple[int, ...],
    start: Start,
    stack: contextlib.ExitStack,
    versions: dict[str, str],
) -> _Method:
    """A started process that has said its first token; a bundle beside `folder` by its name."""
    if setup.method != "bundle":
        start("prepare", setup).close()
    process = start("method", setup)
    stack.callback(lambda: method.process.close())
    method = _Method(setup, process)
    _load(method, prompt)
    answer = process.call("describe")
    method.label, method.disk_bytes = answer["label"], answer["disk_bytes"]
    if setup.folder != folder:
        method.label += f" of {setup.folder.name}"
    versions.update(answer["versions"])
    return method


def _load(method: _Method, prompt: tuple[int, ...]) -> None:
    remote.generate(method.process, prompt, 1)
    method.process.mark_loaded()
    method.loads.append(method.process.load_s)


def _run(setting: Setting, method: _Method, prompt: tuple[int, ...], start: Start) -> None:
    if setting.name == "load":
        peak = method.process.call("peak")["peak_memory_bytes"]
        method.peak_bytes = max(method.peak_bytes, peak)
        method.process.close()
        method.process = start("method", method.setup)
        _load(method, prompt)
        return
    method.runs.append(remote.generate(method.process, prompt, setting.new_tokens))


def _agreements(
    setting: Setting, prompt: tuple[int, ...], methods: Sequence[_Method]
) -> tuple[list[str], list[float | None]]:
    """A run of each method that is not timed, compared with the first one's.

    Returns:
        For each method how far its tokens agree, and the largest difference of a logit after the
        prompt; the first has neither, and an engine that keeps its logits no difference.

    Raises:
        VerificationError: a method says something else.
    """
    first = methods[0].process
    expected = remote.generate(first, prompt, setting.new_tokens).tokens
    own = remote.logits(first, prompt)
    limit = MARGINS[setting.manifest.dtype]

    def margin(num_equal: int, token: int) -> float:
        logits = remote.logits(first, prompt + expected[:num_equal])
        assert logits is not None  # a bundle tells them
        return float(logits.max() - logits[token])

    notes: list[str] = [""]
    differences: list[float | None] = [None]
    for method in methods[1:]:
        actual = remote.generate(method.process, prompt, setting.new_tokens).tokens
        found = agreement(expected, actual, limit, margin)
        if not found.is_good:
            raise VerificationError(
                f"expected the tokens of the bundle or a tie within {limit}, got {found}",
                where=method.label,
                hint="a figure of another text says nothing; check the bundle with "
                "`llama-export verify --against transformers`",
            )
        notes.append(f"tokens equal: {found}{_rows_note(setting, method)}")
        differences.append(_difference(remote.logits(method.process, prompt), own))
    return notes, differences


def _difference(one: Logits | None, other: Logits | None) -> float | None:
    return None if one is None or other is None else float(np.abs(one - other).max())


def _is_peer(method: _Method) -> bool:
    return method.setup.method != "bundle"


def _rows_note(setting: Setting, method: _Method) -> str:
    rows = setting.manifest.batch
    return f"; one row, the bundle has {rows}" if rows > 1 and _is_peer(method) else ""


def _row(setting: Setting, method: _Method, machine: Machine) -> Timing:
    loads = spread(method.loads)
    row = Timing(
        method=f"{method.label}, {setting.threads} thread{'s' if setting.threads > 1 else ''}",
        load_s=loads.median,
        load_s_range=loads.range if len(method.loads) > 1 else (),
        peak_memory_bytes=method.peak_bytes,
        disk_bytes=method.disk_bytes,
    )
    if method.runs:
        ttft = spread([1000 * run.ttft_s for run in method.runs])
        row = replace(row, ttft_ms=ttft.median, ttft_ms_range=ttft.range)
    if rates := [run.tok_s for run in method.runs if run.tok_s is not None]:
        rate = spread(rates)
        row = replace(row, decode_tok_s=rate.median, decode_tok_s_range=rate.range)
    # A peer has one text, whatever number of rows the bundle was built for.
    batch = 1 if _is_peer(method) else setting.manifest.batch
    cost = _cost(setting, replace(setting.manifest, batch=batch))
    return replace(row, roofline_share=_share(setting, row, machine, cost))


def _cost(setting: Setting, manifest: Manifest) -> Cost:
    return figures.cost(
        manifest,
        setting.step,
        setting.places,
        prompt_len=setting.prompt_len,
        new_tokens=setting.new_tokens,
    )


def _share(setting: Setting, row: Timing, machine: Machine, cost: Cost) -> float | None:
    """The share of the limit that the workload is about: reading for steps, products for prompts."""
    if setting.name == "prefill" and row.ttft_ms is not None:
        flop_s = machine.f32_flop_s if setting.manifest.dtype == "f32" else machine.bf16_flop_s
        return cost.prompt_flops / (row.ttft_ms / 1000) / flop_s
    if setting.name == "decode" and row.decode_tok_s is not None:
        return cost.step_bytes * row.decode_tok_s / machine.read_bytes_s
    return None
