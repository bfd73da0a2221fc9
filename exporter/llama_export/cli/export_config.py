"""`llama-export export-config`: how a bundle was built, as a file that `build` reruns."""

from __future__ import annotations

from pathlib import Path

import click

from llama_artifacts.bundle import open_bundle
from llama_export.cli import output
from llama_export.cli.options import Command, bundle_argument, option

EXAMPLES = (
    ("Keep it beside the bundle:", "llama-export export-config smollm2-135m -o recipe.json"),
    ("Run it again:", "llama-export build --config recipe.json -o again"),
    (
        "For a local checkpoint, and with one more entry:",
        "llama-export build ./model.gguf --config recipe.json --entry decode --entry forward",
    ),
)


@click.command(cls=Command, examples=EXAMPLES)
@bundle_argument
@option(
    "--output",
    "-o",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    show_default="standard output",
    help="The file to write, or to replace; not inside the bundle, which holds its own files only.",
)
def command(*, bundle: Path, path: Path | None) -> None:
    """Write down how a bundle was built, for a rerun.

    BUNDLE is the folder that `llama-export build` wrote.

    The file is JSON and holds the options of `build` by name, read off the manifest: entries with
    their counts, formats, sizes, variants, dtype, target. Every value is spelled out, so that
    other defaults of a later version change nothing. `build --config FILE` takes it.

    A hub repository comes with its commit. Of a local checkpoint only the name is known: name its
    path when you build.
    """
    from llama_export.rerun import to_json

    output.write_file(to_json(open_bundle(bundle)), path, bundle=bundle)
