"""`llama-export report`: a page that shows a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from llama_artifacts.bundle import open_bundle
from llama_artifacts.summary import show_bytes
from llama_export.cli import output
from llama_export.cli.options import Command, bundle_argument, json_option, option

EXAMPLES = (
    ("The page, beside the bundle:", "llama-export report smollm2-135m -o report.html"),
    (
        "In the place of an older one:",
        "llama-export report smollm2-135m -o report.html --overwrite",
    ),
)


@click.command(cls=Command, examples=EXAMPLES)
@bundle_argument
@option(
    "-o",
    "--output",
    "page",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The HTML file to write.",
)
@option(
    "--overwrite",
    "overwrites",
    is_flag=True,
    show_default=False,
    help="Replace a file that is there.",
)
@json_option
def command(*, bundle: Path, page: Path, overwrites: bool, as_json: bool) -> None:
    """Write a page that shows a bundle.

    BUNDLE is the folder that `llama-export build` wrote.

    One self-contained HTML file: programs and signatures, states and their memory by batch and
    positions, weights by layer and dtype, the graph of each entry's portable program by module
    with equal layers folded, laws with their figures, and timings where the bundle has a
    bench.json. It fetches nothing, and text of the bundle cannot run as a script.

    It reads the manifest, the header of the weights and the portable programs; nothing is loaded
    or run.
    """
    from llama_export.page.files import write_page
    from llama_export.page.render import render

    opened = open_bundle(bundle)
    with output.reporter() as reporter:
        text = render(opened, reporter=reporter)
    num_bytes = write_page(page, text, overwrites=overwrites)
    if as_json:
        output.write_json({"bundle": str(bundle), "page": str(page), "bytes": num_bytes})
    else:
        output.write(f"{page}: {show_bytes(num_bytes)}\n")
