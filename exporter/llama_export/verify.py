"""Proves a bundle: its files are those that were built, its programs keep the laws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from llama_artifacts.bundle import check_digest, open_bundle, rewrite_manifest
from llama_artifacts.errors import IntegrityError, VerificationError
from llama_artifacts.manifest import Check, Format, Manifest, Program, vectors_name
from llama_export import ranks
from llama_export.checks import CheckResult, Task, check, judge
from llama_export.laws import parity, registry
from llama_export.laws.bench import Bench, device_of, is_known, limit_of, runs_here
from llama_export.laws.oracle import Oracle
from llama_export.laws.registry import Law
from llama_export.report import Reporter
from llama_runtime import vectors
from llama_runtime.places import find_weights

__all__ = ("CheckResult", "check_against", "check_programs", "record", "verify")


def verify(
    folder: Path,
    *,
    reporter: Reporter | None = None,
    formats: Sequence[Format] | None = None,
    laws: Sequence[str] | None = None,
    entries: Sequence[str] | None = None,
    uses_vectors: bool = False,
    weights_dir: Path | None = None,
) -> tuple[CheckResult, ...]:
    """Checks every file's digest, then the laws on every program that this machine can run.

    Args:
        folder: the bundle.
        reporter: told about each check.
        formats: only programs of these; None: all.
        laws: only these; None: all, or none where vectors are used.
        entries: only programs of these; `generate` stands for `generate<32>`; None: all.
        uses_vectors: also holds every program against the bundle's test vectors.
        weights_dir: the checkpoint's folder, for a bundle that refers to its weights.

    Raises:
        ManifestError, IntegrityError: the bundle cannot even be opened.
        VerificationError: a law, an entry or a format does not exist, or a law asked for applies to
            nothing.
        CompatibilityError: weights that are elsewhere cannot be had.
    """
    reporter = reporter or Reporter()
    bundle = open_bundle(folder)
    manifest = bundle.manifest
    programs = _chosen(manifest, formats, entries)
    asked = () if laws is None and uses_vectors else laws
    chosen = registry.LAWS if asked is None else registry.find(asked)
    results = [_integrity(folder, reporter)]
    if results[0].passed and manifest.weights != "none":
        find_weights(bundle, weights_dir=weights_dir)
        bench = Bench(folder, manifest, weights_dir=weights_dir)
        found = list(_run(bench, chosen, programs, reporter))
        results += sorted(found, key=lambda result: registry.NAMES.index(result.law))
        if uses_vectors:
            results += _vectors(bench, programs, reporter)
    for name in laws or ():
        if results[0].passed and name not in {result.law for result in results}:
            raise VerificationError(
                f"the law `{name}` applies to nothing here",
                where=folder,
                hint="`llama-export inspect` shows the programs; some laws need two of them",
            )
    return tuple(results)


def check_programs(
    folder: Path, *, reporter: Reporter, weights_dir: Path | None = None
) -> tuple[Check, ...]:
    """Runs every program that this machine can run under the quick laws, for the manifest's record.

    Args:
        folder: the bundle, or what is going to be one.
        reporter: told about each check.
        weights_dir: the checkpoint's folder, for a bundle that refers to its weights.

    Raises:
        VerificationError: one is wrong.
    """
    manifest = open_bundle(folder).manifest
    quick = tuple(law for law in registry.LAWS if law.is_quick)
    checks = []
    bench = Bench(folder, manifest, weights_dir=weights_dir)
    for result in _run(bench, quick, manifest.programs, reporter):
        if not result.passed:
            raise VerificationError(
                result.detail,
                where=result.place,
                hint="this is a fault of llama-export or of the compiler it calls; report it",
            )
        checks.append(_as_check(result))
    return tuple(checks)


def check_against(
    law: str,
    bench: Bench,
    oracle: Oracle,
    *,
    reporter: Reporter,
    formats: Sequence[Format] | None = None,
    entries: Sequence[str] | None = None,
) -> list[CheckResult]:
    """Holds every program that this machine can run against another oracle; as `parity` does.

    Args:
        law: what the results are called.
        bench: of the bundle.
        oracle: on the bench's sequences.
        reporter: told about each program.
        formats: only programs of these; None: all.
        entries: only programs of these; None: all.
    """
    results: list[CheckResult] = []
    programs = _chosen(bench.manifest, formats, entries)
    if any(program.shards > 1 for program in programs):
        reporter.note(f"programs of several shards: not held against {law}")
    for program in programs:
        if is_known(program) and runs_here(program) and program.shards == 1:
            with reporter.step(f"check {program.label} {program.format} {law}"):
                find = partial(parity.against, bench, program, oracle)
                found = judge(law, program.label, program.format, find, limit_of(program))
                results += [] if found is None else [found]
    return results


def record(folder: Path, results: Sequence[CheckResult]) -> None:
    """Writes results into the manifest, in place of earlier ones of the same law and program.

    Raises:
        VerificationError: one of them did not pass; nothing is recorded then.
        IntegrityError: the bundle changed meanwhile.
        BuildError: the manifest cannot be written.
    """
    failed = next((result for result in results if not result.passed), None)
    if failed is not None:
        raise VerificationError(failed.detail, where=failed.place, hint="nothing was recorded")
    bundle = open_bundle(folder)
    known = (*bundle.manifest.checks, *map(_as_check, results))
    checks = {(c.law, c.entry, c.format, c.shards): c for c in known}
    rewrite_manifest(bundle, replace(bundle.manifest, checks=tuple(checks.values())))


def _as_check(result: CheckResult) -> Check:
    format: Any = result.format
    return Check(
        *(result.law, result.entry, format, result.figure, result.limit), shards=result.shards
    )


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


def _vectors(
    bench: Bench, programs: Sequence[Program], reporter: Reporter
) -> Iterator[CheckResult]:
    """Every program of one shard against the vectors that travel with it, without any model."""
    if not any(vectors_name(program.entry) in bench.manifest.files for program in programs):
        raise VerificationError(
            "there are no test vectors", where=bench.folder, hint="build the bundle again"
        )
    wanted = {(program.entry, program.format) for program in programs if program.shards == 1}
    if any(program.shards > 1 for program in programs):
        reporter.note("programs of several shards: not held against test vectors")
    for device in dict.fromkeys(map(device_of, programs)):
        with reporter.step(f"check vectors on {device}"):
            results = vectors.check(bench.folder, device=device, weights_dir=bench.weights_dir)
        for found in results:
            if (found.entry, found.format) in wanted:
                yield CheckResult(
                    *("vectors", found.entry, found.format, found.figure, found.limit),
                    *(found.passed, found.detail),
                )


def _chosen(
    manifest: Manifest, formats: Sequence[Format] | None, entries: Sequence[str] | None
) -> tuple[Program, ...]:
    for name in entries or ():
        if not any(name in _names(program) for program in manifest.programs):
            hint = f"it has {', '.join(manifest.entries())}"
            raise VerificationError(f"the bundle has no entry `{name}`", hint=hint)
    programs = tuple(
        program
        for program in manifest.programs
        if not entries or _names(program).intersection(entries)
    )
    for format in formats or ():
        if not any(program.format == format for program in programs):
            hint = f"it has {', '.join(dict.fromkeys(program.format for program in programs))}"
            raise VerificationError(f"the bundle has no such program in {format}", hint=hint)
    return tuple(program for program in programs if not formats or program.format in formats)


def _names(program: Program) -> set[str]:
    return {program.label, program.entry, registry.kind(program.entry)}


def _run(
    bench: Bench, laws: Sequence[Law], programs: Sequence[Program], reporter: Reporter
) -> Iterator[CheckResult]:
    """The laws of the bundle, then of programs for one process, then for each number of them."""
    for law in laws:
        if law.scope == "bundle":
            with reporter.step(f"check {law.name}"):
                yield from _some(judge(law.name, "", "", partial(law.load(), bench), 0))
    runnable = [program for program in programs if _can_run(program, reporter)]
    whole = [program for program in runnable if program.shards == 1]
    yield from _check_whole(bench, laws, whole, reporter)
    for num_shards in sorted({program.shards for program in runnable} - {1}):
        sharded = [program for program in runnable if program.shards == num_shards]
        tasks = _tasks([law for law in laws if law.takes_shards], sharded, whole)
        yield from ranks.check(bench, num_shards, tasks, reporter)


def _check_whole(
    bench: Bench, laws: Sequence[Law], programs: Sequence[Program], reporter: Reporter
) -> Iterator[CheckResult]:
    """The laws of each program, format by format, then across formats."""
    tasks = _tasks(laws, programs)
    for format in dict.fromkeys(program.format for program in programs):
        for program in programs:
            own = [task for task in tasks if task.programs == (program,)]
            if program.format == format and own:
                with reporter.step(f"check {program.label} {format}"):
                    for task in own:
                        yield from _some(check(task, bench))
        bench.drop(format)
    for task in tasks:
        if task.law.scope == "entry":
            with reporter.step(f"check {task.title}"):
                yield from _some(check(task, bench))


def _tasks(
    laws: Sequence[Law], programs: Sequence[Program], others: Sequence[Program] = ()
) -> list[Task]:
    """What is to be checked of programs, those of a format together, what compares them last.

    Args:
        laws: which ones.
        programs: of one number of shards.
        others: programs of one shard that they are held against.
    """
    single = [
        Task(law, (program,))
        for format in dict.fromkeys(program.format for program in programs)
        for program in programs
        for law in laws
        if program.format == format and law.scope == "program" and law.applies(program.entry)
    ]
    alike = {
        label: (*_reference(label, others, programs), *(p for p in programs if p.label == label))
        for label in dict.fromkeys(program.label for program in programs)
    }
    return single + [
        Task(law, together)
        for law in laws
        for together in alike.values()
        if law.scope == "entry" and law.applies(together[-1].entry)
    ]


def _reference(
    label: str, others: Sequence[Program], programs: Sequence[Program]
) -> tuple[Program, ...]:
    """The program of one shard that those of several are held against; of a format of theirs."""
    formats = {program.format for program in programs}
    found = [other for other in others if other.label == label]
    found.sort(key=lambda program: program.format not in formats)
    return tuple(found[:1])


def _some(result: CheckResult | None) -> Iterator[CheckResult]:
    if result is not None:
        yield result


def _can_run(program: Program, reporter: Reporter) -> bool:
    name = f"{program.title} {program.format}"
    if not is_known(program):
        reporter.note(
            f"{name}: an entry or a variant that this version does not know, not run here"
        )
        return False
    if not runs_here(program):
        reporter.note(f"{name}: made for another machine, not run here")
        return False
    return True
