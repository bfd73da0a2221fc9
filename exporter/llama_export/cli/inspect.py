"""`llama-export inspect`: what a bundle holds, from its manifest."""

from __future__ import annotations

from pathlib import Path

import click

from llama_artifacts import summary
from llama_artifacts.bundle import open_bundle
from llama_export.cli import output
from llama_export.cli.options import Command, bundle_argument, json_option

EXAMPLES = (
    ("Everything, for people:", "llama-export inspect smollm2-135m"),
    (
        "Bytes of one set of states of each entry:",
        "llama-export inspect smollm2-135m --json | jq '.signatures[] | {entry, bytes: .states.bytes}'",
    ),
)


@click.command(cls=Command, examples=EXAMPLES)
@bundle_argument
@json_option
def command(*, bundle: Path, as_json: bool) -> None:
    """Show what a bundle holds.

    BUNDLE is the folder that `llama-export build` wrote.

    Shows where the model came from, its sizes, the programs, how each entry is called (inputs with
    the values they may hold, outputs, dynamic dimensions with their ranges), the states and their
    bytes, the versions that built it, and the checks it passed. Of programs that several processes
    run together (shards), states are those of one process, and it shows the bytes of weights that
    each binds and the collectives of one call.

    It reads the manifest and compares the sizes of the files; nothing is loaded or run.
    """
    opened = open_bundle(bundle)
    if as_json:
        output.write_json(summary.to_dict(opened))
        return
    output.write_table(summary.facts(opened))
    for table in summary.tables(opened):
        output.write("\n")
        output.write_title(table.title)
        output.write_table(table.rows, columns=table.columns, indent=2)
