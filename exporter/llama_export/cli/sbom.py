"""`llama-export sbom`: the bill of materials of a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from llama_artifacts.bundle import open_bundle
from llama_export.cli import output
from llama_export.cli.options import Command, bundle_argument, option

EXAMPLES = (
    ("To a file beside the bundle:", "llama-export sbom smollm2-135m -o smollm2-135m.cdx.json"),
    (
        "What it was built with:",
        "llama-export sbom smollm2-135m | jq -r '.metadata.tools.components[].purl'",
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
    """Write a bundle's bill of materials.

    BUNDLE is the folder that `llama-export build` wrote.

    It is a CycloneDX 1.6 document (JSON): the model as a component with a model card, where it
    came from, its licence where the checkpoint names one, every file with its digest, and the
    versions that built it. One bundle gives one text; set SOURCE_DATE_EPOCH for a time stamp.

    Needs `pip install 'llama-export[sbom]'`.
    """
    from llama_export.sbom import to_json

    text = to_json(open_bundle(bundle))
    output.write_file(text, path, bundle=bundle)
