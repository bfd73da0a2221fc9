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
    checked_text,
    formats_option,
    json_option,
    option,
)
from llama_export.laws.registry import LAWS, NAMES

if TYPE_CHECKING:
    from llama_export.verify import CheckResult

EXAMPLES = (
    ("Every law on every program:", "llama-export verify smollm2-135m"),
    ("Native code only:", "llama-export verify smollm2-135m --format aoti"),
    ("One law, one entry:", "llama-export verify smollm2-135m --law pages --entry decode_paged"),
    ("As on the machine that built it:", "llama-export verify smollm2-135m --vectors"),
)


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
    "--vectors",
    "uses_vectors",
    is_flag=True,
    show_default=False,
    help="Hold the programs against the test vectors in the bundle; no law unless --law names one.",
)
@option(
    "--record",
    "is_recorded",
    is_flag=True,
    show_default=False,
    help="Write the results into the manifest if all of them are good.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    bundle: Path,
    laws: tuple[str, ...],
    formats: tuple[Format, ...],
    entries: tuple[str, ...],
    uses_vectors: bool,
    is_recorded: bool,
    as_json: bool,
) -> None:
    """Check that a bundle computes what it must.

    BUNDLE is the folder that `llama-export build` wrote.

    Runs every program and checks its laws, each with a figure and the most it may be: that it
    agrees with the plain model in float32 (parity), that a token changes nothing before it
    (causal), that a prompt in chunks equals the prompt whole (chunks), and so on.

    The exit status is 1 if any check fails.
    """
    from llama_export.verify import record, verify

    with output.reporter() as reporter:
        results = verify(
            bundle,
            reporter=reporter,
            formats=formats or None,
            laws=laws or None,
            entries=entries or None,
            uses_vectors=uses_vectors,
        )
    failure = _failure(bundle, results)
    if is_recorded and failure is None:
        record(bundle, results)
    if as_json:
        report = {"bundle": str(bundle), "passed": failure is None, "checks": encode(results)}
        error = {} if failure is None else {"error": errors.to_dict(failure)}
        output.write_json({**report, **error})
    else:
        _show(results)
    if failure is not None:
        errors.show(failure, as_json=False)
        ctx.exit(errors.EXIT_FAILURE)


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
