"""`llama-export verify`: proves a bundle, law by law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llama_artifacts import integrity
from llama_artifacts.codec import encode
from llama_artifacts.errors import LlamaExportError, VerificationError
from llama_artifacts.manifest import Format, show_shards
from llama_artifacts.summary import show_bytes
from llama_export.cli import output, signatures
from llama_export.cli.options import (
    OPTIONS,
    Command,
    bundle_argument,
    checked_text,
    formats_option,
    json_option,
    option,
    take,
    weights_dir_option,
)
from llama_export.laws.registry import LAWS, NAMES
from llama_runtime.cli import errors

if TYPE_CHECKING:
    from llama_export.report import Reporter
    from llama_export.samples import Sample
    from llama_export.verify import CheckResult

EXAMPLES = (
    ("Every law on every program:", "llama-export verify smollm2-135m"),
    ("Native code only:", "llama-export verify smollm2-135m --format aoti"),
    ("One law, one entry:", "llama-export verify smollm2-135m --law pages --entry decode_paged"),
    ("Who signed it, and whether it changed:", signatures.EXAMPLE),
    ("As on the machine that built it:", "llama-export verify smollm2-135m --vectors"),
    ("The files alone, nothing is run:", "llama-export verify smollm2-135m --integrity"),
    (
        "Against another implementation, with samples of both:",
        "llama-export verify smollm2-135m --against transformers",
    ),
)
MAX_SHOWN_CHARS = 48


@dataclass(frozen=True)
class Checks:
    """What is checked of the programs, as the options say; empty where it is all there is."""

    laws: tuple[str, ...]
    formats: tuple[Format, ...]
    entries: tuple[str, ...]
    uses_vectors: bool
    against: str | None
    is_recorded: bool

    def choices(self) -> dict[str, Any]:
        """Which programs, as `verify` and the reference take it."""
        return {"formats": self.formats or None, "entries": self.entries or None}


class VerifyCommand(Command):
    """The command whose help lists the laws."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Laws"):
            formatter.write_dl([(law.name, law.summary) for law in LAWS])
        super().format_epilog(ctx, formatter)


@click.command(cls=VerifyCommand, examples=EXAMPLES)
@bundle_argument
@option(
    "--law",
    "laws",
    type=click.Choice(NAMES),
    metavar="NAME",
    multiple=True,
    show_default="all",
    help="A law to check, from the list below; repeat it for several.",
)
@formats_option(
    "A format to check; repeat it for several.", group=OPTIONS, show_default="all it has"
)
@option(
    "--entry",
    "entries",
    metavar="NAME",
    multiple=True,
    callback=checked_text,
    show_default="all it has",
    help="An entry to check, such as decode or generate; repeat it for several.",
)
@option(
    "--integrity",
    "is_integrity",
    is_flag=True,
    show_default=False,
    help="Compare the files with the manifest instead: extra, missing, changed. Nothing is run.",
)
@option(
    "--vectors",
    "uses_vectors",
    is_flag=True,
    show_default=False,
    help="Hold the programs against the test vectors in the bundle; no law unless --law names one.",
)
@option(
    "--against",
    type=click.Choice(["transformers"]),
    show_default="the plain model alone",
    help="Compare every program with this implementation too, in float32, and keep greedy samples"
    " of both in the bundle, as samples.json.",
)
@option(
    "--record",
    "is_recorded",
    is_flag=True,
    show_default=False,
    help="Write the results into the manifest if all of them are good.",
)
@weights_dir_option
@signatures.options
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    bundle: Path,
    is_integrity: bool,
    weights_dir: Path | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Check that a bundle computes what it must.

    BUNDLE is the folder that `llama-export build` wrote.

    Runs every program and checks its laws, each with a figure and the most it may be: that it
    agrees with the plain model in float32 (parity), that a token changes nothing before it
    (causal), that a prompt in chunks equals the prompt whole (chunks), and so on. Programs of
    several shards are run by as many processes, started here, under parity, room, chain, scratch
    and formats, which also compares them with the program of one. With --signature nothing is run:
    the signature and every file are checked.

    The exit status is 1 if any check fails.
    """
    checks = take(Checks, values)
    is_more = any(vars(checks).values())
    verifier = signatures.verifier(**values)
    if is_integrity:
        if is_more or verifier is not None:
            hint = "verify twice: the files first, then what they compute"
            raise errors.UsageError("--integrity takes only --json with it", ctx=ctx, hint=hint)
        _check_files(ctx, bundle, as_json=as_json)
    elif verifier is not None:
        signatures.check(bundle, verifier, is_more=is_more, as_json=as_json)
    else:
        _check_programs(ctx, bundle, checks, weights_dir=weights_dir, as_json=as_json)


def _check_programs(
    ctx: click.Context, bundle: Path, checks: Checks, *, weights_dir: Path | None, as_json: bool
) -> None:
    """Checks, keeps the results where that is asked, and tells them."""
    results, samples = _run(bundle, checks, weights_dir)
    failure = _failure(bundle, results)
    if checks.is_recorded and failure is None:
        from llama_export.verify import record

        record(bundle, results)
    if as_json:
        report = {"bundle": str(bundle), "passed": failure is None, "checks": encode(results)}
        if checks.against is not None:
            report["samples"] = encode(samples)
        output.write_json({**report, **_error_dict(failure)})
    else:
        _show(results)
        _show_samples(samples)
    _end(ctx, failure)


def _run(
    bundle: Path, checks: Checks, weights_dir: Path | None
) -> tuple[Sequence[CheckResult], Sequence[Sample]]:
    """What every check gave, and samples where the reference was asked for."""
    from llama_export.verify import verify

    if checks.against is not None:  # before minutes of laws
        from llama_export.reference import import_library

        import_library()
    choices = {**checks.choices(), "weights_dir": weights_dir}
    with output.reporter() as reporter:
        results = verify(
            bundle,
            laws=checks.laws or None,
            uses_vectors=checks.uses_vectors,
            reporter=reporter,
            **choices,
        )
        if checks.against is None or _failure(bundle, results) is not None:
            return results, ()
        more, samples = _compare(bundle, reporter, **choices)
    return (*results, *more), samples


def _error_dict(failure: LlamaExportError | None) -> dict[str, Any]:
    return {} if failure is None else {"error": errors.to_dict(failure)}


def _end(ctx: click.Context, failure: LlamaExportError | None) -> None:
    """Tells what failed, once the results are out."""
    if failure is not None:
        errors.show(failure, as_json=False)
        ctx.exit(errors.EXIT_FAILURE)


def _check_files(ctx: click.Context, bundle: Path, *, as_json: bool) -> None:
    with output.reporter() as reporter, reporter.step("hash files") as advance:
        report = integrity.check(bundle, advance=advance)
    failure = report.error()
    if as_json:
        output.write_json({**_integrity_dict(report), **_error_dict(failure)})
    elif report.faults:
        rows = [(fault.file, fault.kind, fault.detail) for fault in report.faults]
        output.write_table(rows, columns=("file", "fault", "detail"))
    else:
        output.write(
            f"{report.num_files} files, {show_bytes(report.num_bytes)}: all as listed, none extra\n"
        )
    _end(ctx, failure)


def _integrity_dict(report: integrity.Report) -> dict[str, Any]:
    return {
        "bundle": str(report.folder),
        "passed": not report.faults,
        "files": report.num_files,
        "bytes": report.num_bytes,
        "faults": encode(report.faults),
    }


def _compare(
    bundle: Path, reporter: Reporter, *, entries: Sequence[str] | None, **choices: Any
) -> tuple[Sequence[CheckResult], Sequence[Sample]]:
    """Checks against the reference, and samples where they passed."""
    from llama_export.reference import Reference, check
    from llama_export.samples import write_samples

    with reporter.step("load transformers"):
        reference = Reference.load(bundle, reporter=reporter, weights_dir=choices["weights_dir"])
    results = check(bundle, reference, reporter=reporter, entries=entries, **choices)
    if not all(result.passed for result in results):
        return results, ()
    return results, write_samples(bundle, reference, reporter=reporter, **choices)


def _failure(bundle: Path, results: Sequence[CheckResult]) -> VerificationError | None:
    if not results:
        return VerificationError("no program was checked", where=bundle)
    failed = [result for result in results if not result.passed]
    if not failed:
        return None
    first = failed[0]
    return VerificationError(
        f"{first.place}: {first.detail}",
        where=bundle,
        hint=f"{len(failed)} of {len(results)} checks failed; do not use the bundle, build it again",
    )


def _show(results: Sequence[CheckResult]) -> None:
    if not results:
        return
    rows = [
        (
            result.law,
            show_shards(result.entry, result.shards),
            result.format,
            f"{result.figure:.3g}",
            f"{result.limit:.3g}",
            "ok" if result.passed else "FAILED",
            result.detail,
        )
        for result in results
    ]
    columns = ("law", "entry", "format", "figure", "limit", "result", "detail")
    output.write_table(rows, columns=columns)
    num_passed = sum(result.passed for result in results)
    output.write(f"\n{num_passed} of {len(results)} checks passed\n")


def _show_samples(samples: Sequence[Sample]) -> None:
    if not samples:
        return
    rows = [
        (
            sample.kind,
            _shortened(sample.prompt),
            _shortened(sample.text),
            f"{sample.num_agreeing} of {max(len(sample.tokens), len(sample.reference_tokens))}",
            sample.format,
        )
        for sample in samples
    ]
    output.write("\n")
    output.write_table(rows, columns=("sample", "prompt", "text", "same tokens", "format"))


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN_CHARS else f"{line[: MAX_SHOWN_CHARS - 3]}..."
