"""`llama-export verify`: proves a bundle, law by law."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llama_artifacts.codec import encode
from llama_artifacts.errors import VerificationError
from llama_artifacts.manifest import Format
from llama_export.cli import errors, output
from llama_export.cli.options import (
    OPTIONS,
    Command,
    bundle_argument,
    formats_option,
    json_option,
    option,
)

if TYPE_CHECKING:
    from llama_export.report import Reporter
    from llama_export.samples import Sample
    from llama_export.verify import CheckResult

EXAMPLES = (
    ("Every program:", "llama-export verify smollm2-135m"),
    ("Native code only:", "llama-export verify smollm2-135m --format aoti"),
    (
        "Against another implementation, with samples of both:",
        "llama-export verify smollm2-135m --against transformers",
    ),
)
MAX_SHOWN_CHARS = 48


@click.command(cls=Command, examples=EXAMPLES)
@bundle_argument
@formats_option(
    "A format to check; repeat it for several.", group=OPTIONS, show_default="all it has"
)
@option(
    "--against",
    type=click.Choice(["transformers"]),
    show_default="the plain model alone",
    help="Compare every program with this implementation too, in float32, and keep greedy samples"
    " of both in the bundle, as samples.json.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    bundle: Path,
    formats: tuple[Format, ...],
    against: str | None,
    as_json: bool,
) -> None:
    """Check that a bundle computes what it must.

    BUNDLE is the folder that `llama-export build` wrote.

    Runs every program and checks its laws, each with a figure and the most it may be: that it
    agrees with the plain model in float32 (parity), that a token changes nothing before it
    (causal), that a prompt in chunks equals the prompt whole (chunks), and so on.

    The exit status is 1 if any check fails.
    """
    from llama_export.verify import verify

    with output.reporter() as reporter:
        results = verify(bundle, reporter=reporter, formats=formats or None)
        samples: Sequence[Sample] = ()
        if against is not None and _failure(bundle, results) is None:
            more, samples = _compare(bundle, reporter, formats or None)
            results = (*results, *more)
    failure = _failure(bundle, results)
    if as_json:
        report = {"bundle": str(bundle), "passed": failure is None, "checks": encode(results)}
        if against is not None:
            report["samples"] = encode(samples)
        error = {} if failure is None else {"error": errors.to_dict(failure)}
        output.write_json({**report, **error})
    else:
        _show(results)
        _show_samples(samples)
    if failure is not None:
        errors.show(failure, as_json=False)
        ctx.exit(errors.EXIT_FAILURE)


def _compare(
    bundle: Path, reporter: Reporter, formats: Sequence[Format] | None
) -> tuple[Sequence[CheckResult], Sequence[Sample]]:
    """Checks against the reference, and samples where they passed."""
    from llama_export.reference import Reference, check
    from llama_export.samples import write_samples

    with reporter.step("load transformers"):
        reference = Reference.load(bundle, reporter=reporter)
    results = check(bundle, reference, reporter=reporter, formats=formats)
    if not all(result.passed for result in results):
        return results, ()
    return results, write_samples(bundle, reference, reporter=reporter, formats=formats)


def _failure(bundle: Path, results: Sequence[CheckResult]) -> VerificationError | None:
    if not results:
        return VerificationError("no program was checked", where=bundle)
    failed = [result for result in results if not result.passed]
    if not failed:
        return None
    first = failed[0]
    named = " ".join(part for part in (first.law, first.entry, first.format) if part)
    detail = f" ({first.detail})" if first.detail else ""
    return VerificationError(
        f"{len(failed)} of {len(results)} checks failed; the first: {named}{detail}",
        where=bundle,
        hint="do not use the bundle; build it again",
    )


def _show(results: Sequence[CheckResult]) -> None:
    if not results:
        return
    rows = [
        (
            result.law,
            result.entry,
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
