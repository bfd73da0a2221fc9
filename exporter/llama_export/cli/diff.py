"""`llama-export diff`: what changed between two bundles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from llama_artifacts.bundle import open_bundle
from llama_artifacts.codec import encode
from llama_artifacts.diff import Change, compare
from llama_export.cli import output
from llama_export.cli.options import Command, json_option
from llama_runtime.cli import errors

EXAMPLES = (
    ("What is new in a release:", "llama-export diff smollm2-135m-v1 smollm2-135m-v2"),
    (
        "Names of the tensors that changed:",
        "llama-export diff v1 v2 --json | jq -r '.changes[] | select(.area == \"weights\").name'",
    ),
)
MAX_SHOWN_CHARS = 60

_folder = click.Path(path_type=Path)


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("first", metavar="A", type=_folder)
@click.argument("second", metavar="B", type=_folder)
@json_option
def command(*, first: Path, second: Path, as_json: bool) -> None:
    """Show what changed between two bundles.

    A and B are folders that `llama-export build` wrote.

    Compares the source, the model's configuration, the toolchain, signatures, programs, weights
    tensor by tensor, the other files and the recorded checks. Files are compared by the digests in
    the manifests, which `llama-export verify --integrity` proves; nothing is run.

    The exit status is 0 if nothing differs and 1 if something does; a failure has status 1 and an
    `error:` line.
    """
    changes = compare(open_bundle(first), open_bundle(second))
    show_changes(changes, (first, second), as_json=as_json)


def show_changes(changes: Sequence[Change], sides: tuple[object, object], *, as_json: bool) -> None:
    """Prints what differs, and ends the command with status 1 where anything does."""
    if as_json:
        report = {"first": str(sides[0]), "second": str(sides[1]), "same": not changes}
        output.write_json({**report, "changes": encode(changes)})
    elif changes:
        rows = [
            (change.area, change.name, _shown(change.before), _shown(change.after))
            for change in changes
        ]
        output.write_table(rows, columns=("area", "what", "in a", "in b"))
    else:
        output.write("no difference\n")
    if changes:
        click.get_current_context().exit(errors.EXIT_FAILURE)


def _shown(text: str | None) -> str:
    if text is None:
        return "-"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."
