"""Proves a bundle: its files are those that were built, its programs compute what they must.

The oracle is the model run eagerly in float32 over the whole sequence, without any state. States
are filled with a large number before use, so that a read of what was never written shows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import llama_runtime
from llama_artifacts.bundle import check_digest, open_bundle
from llama_artifacts.errors import IntegrityError, LlamaExportError, VerificationError
from llama_artifacts.manifest import Check, Format, Manifest, Program
from llama_export.drivers import DRIVERS, EagerOracle, Oracle
from llama_export.report import Reporter
from llama_runtime import compat

LIMITS = {"f32": 1e-4, "f16": 2e-2, "bf16": 1e-1}
"""Largest difference of the logits allowed, as a share of the largest logit, by compute dtype."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckResult:
    """One law on one program: the figure found, the most it may be, and where it was found."""

    law: str
    entry: str
    format: str
    figure: float
    limit: float
    passed: bool
    detail: str


def verify(
    folder: Path,
    *,
    reporter: Reporter | None = None,
    formats: Sequence[Format] | None = None,
) -> tuple[CheckResult, ...]:
    """Checks every file's digest, then runs every program that this machine can run.

    Args:
        folder: the bundle.
        reporter: told about each check.
        formats: only programs of these; None: all.

    Raises:
        ManifestError, IntegrityError: the bundle cannot even be opened.
    """
    reporter = reporter or Reporter()
    results = [_integrity(folder, reporter)]
    if results[0].passed and open_bundle(folder).manifest.weights != "none":
        results += run_programs("parity", folder, EagerOracle, reporter=reporter, formats=formats)
    return tuple(results)


def check_programs(folder: Path, *, reporter: Reporter) -> tuple[Check, ...]:
    """Runs every program that this machine can run, for the manifest's record.

    Raises:
        VerificationError: one is wrong.
    """
    checks = []
    for result in run_programs("parity", folder, EagerOracle, reporter=reporter):
        if not result.passed:
            raise VerificationError(
                f"{result.law} failed: {result.detail}",
                where=f"{result.entry}/{result.format}",
                hint="this is a fault of llama-export or of the compiler it calls; report it",
            )
        format: Format = result.format  # type: ignore[assignment]
        checks.append(Check(result.law, result.entry, format, result.figure, result.limit))
    return tuple(checks)


def _integrity(folder: Path, reporter: Reporter) -> CheckResult:
    bundle = open_bundle(folder)
    files = bundle.manifest.files
    damaged = []
    with reporter.step("integrity", sum(file.bytes for file in files.values())) as advance:
        for name, file in files.items():
            try:
                check_digest(bundle, name)
            except IntegrityError as cause:
                damaged.append(str(cause))
            advance(file.bytes)
    detail = damaged[0] if damaged else f"{len(files)} files"
    return CheckResult("integrity", "", "", len(damaged), 0, not damaged, detail)


def run_programs(
    law: str,
    folder: Path,
    make_oracle: Callable[[Path, Manifest], Oracle],
    *,
    reporter: Reporter,
    formats: Sequence[Format] | None = None,
) -> list[CheckResult]:
    """Compares every program that this machine can run with an oracle.

    Args:
        law: what the results are called.
        folder: the bundle.
        make_oracle: called at most once, when a program is there to be run.
        reporter: told about each program.
        formats: only programs of these; None: all.
    """
    manifest = open_bundle(folder).manifest
    oracle = None
    results = []
    for program in manifest.programs:
        if formats is not None and program.format not in formats:
            continue
        name = f"{program.entry} {program.format}"
        if program.entry not in DRIVERS:
            reporter.note(f"{name}: an entry that this version does not know, not run here")
            continue
        if not compat.fits(program, device=_device(program), allow_native=True):
            reporter.note(f"{name}: made for another machine, not run here")
            continue
        with reporter.step(f"check {name}"):
            oracle = oracle or make_oracle(folder, manifest)
            results.append(_compared(law, folder, program, oracle))
    return results


def _device(program: Program) -> str:
    if program.target.device == "cuda" and not torch.cuda.is_available():
        return "cpu"
    return program.target.device


def _compared(law: str, folder: Path, program: Program, oracle: Oracle) -> CheckResult:
    limit = LIMITS[program.dtype]
    try:
        actual, expected = _run(folder, program, oracle)
    except Exception as cause:  # a wrong program may fail in any way, and every way is a verdict
        if isinstance(cause, LlamaExportError):
            reason = str(cause)
        else:
            reason = next(iter(str(cause).splitlines()), "") or type(cause).__name__
        _log.debug("%s %s failed", program.entry, program.format, exc_info=cause)
        detail = f"cannot be run: {reason:.300}"
        return CheckResult(law, program.entry, program.format, math.nan, limit, False, detail)
    difference = (actual.float().cpu() - expected).abs()
    largest = float(difference.max())  # NaN if any is
    figure = largest / float(expected.abs().max())
    passed = figure <= limit  # False for NaN too
    worst = difference.isnan() if math.isnan(largest) else difference == largest
    place = tuple(int(i) for i in torch.nonzero(worst)[0])
    detail = f"max diff {largest:.3g} at {place}, relative limit {limit:g}"
    return CheckResult(law, program.entry, program.format, figure, limit, passed, detail)


def _run(folder: Path, program: Program, oracle: Oracle) -> tuple[torch.Tensor, torch.Tensor]:
    """What the program gives, and what it must give."""
    bundle = llama_runtime.load(folder, device=program.target.device, format=program.format)
    entry = bundle.entry(program.entry)
    actual, expected = DRIVERS[program.entry](entry, oracle)
    if actual.shape != expected.shape:
        raise VerificationError(f"expected {list(expected.shape)}, got {list(actual.shape)}")
    return actual, expected
