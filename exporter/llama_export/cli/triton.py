"""`llama-export triton`: a model repository for the Triton Inference Server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llama_artifacts.manifest import FORMATS, Format
from llama_artifacts.summary import show_bytes
from llama_export.cli import output
from llama_export.cli.options import Command, bundle_argument, json_option, option
from llama_export.triton.plan import Device, Options

if TYPE_CHECKING:
    from llama_export.triton.repository import Repository

START_SERVER = (
    "docker run --rm --shm-size 1g -p 8000:8000 -v ./model_repository:/models"
    " nvcr.io/nvidia/tritonserver:25.08-py3 bash -c"
    " 'pip install llama-export && tritonserver --model-repository /models'"
)
EXAMPLES = (
    ("All entries:", "llama-export triton smollm2-135m -o model_repository"),
    (
        "More conversations at the same time, in portable programs:",
        "llama-export triton smollm2-135m -o models --max-sequences 64 --format pt2",
    ),
    ("Start the server:", START_SERVER),
)
OUTPUT, PROGRAMS, SEQUENCES = "Output", "Programs", "Sequences"
DEFAULTS = Options()


@click.command(cls=Command, examples=EXAMPLES)
@bundle_argument
@option(
    "-o",
    "--output",
    "repository",
    group=OUTPUT,
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The model repository to write; it must not exist.",
)
@option(
    "--device",
    group=PROGRAMS,
    type=click.Choice(["cpu", "cuda"]),
    show_default="the one that the bundle is for",
    help="Serve the programs for this device.",
)
@option(
    "--format",
    group=PROGRAMS,
    type=click.Choice(FORMATS),
    show_default="the best that fits the server",
    help="The format that the Python backend runs.",
)
@option(
    "--max-sequences",
    group=SEQUENCES,
    type=click.IntRange(min=1),
    default=DEFAULTS.max_sequences,
    metavar="N",
    help="Sequences whose states a model keeps at the same time.",
)
@option(
    "--max-idle",
    "max_idle_s",
    group=SEQUENCES,
    type=click.IntRange(1, 10**6),
    default=DEFAULTS.max_idle_s,
    metavar="SECONDS",
    help="How long a sequence may rest before Triton forgets it.",
)
@option(
    "--pool-pages",
    group=SEQUENCES,
    type=click.IntRange(min=2),
    metavar="N",
    show_default="what the largest page table can name",
    help="Pages of a sequence's pool, page 0 included.",
)
@json_option
def command(
    *,
    bundle: Path,
    repository: Path,
    device: Device | None,
    format: Format | None,
    max_sequences: int,
    max_idle_s: int,
    pool_pages: int | None,
    as_json: bool,
) -> None:
    """Write a model repository for the Triton Inference Server.

    BUNDLE is the folder that `llama-export build` wrote, with its weights.

    An entry without states that is there as ONNX becomes a model of the onnxruntime backend, as it
    is. Entries with states become one model of the Python backend on llama_runtime (`rows` over
    key and value caches, `pool` over pages): a sequence keeps its states from the request with the
    start flag to the one with the end flag, and a request runs the entry whose inputs it brings,
    such as `prefill.tokens` and `prefill.pos`.

    The files are hard links to those of the bundle where the file system allows it.
    """
    from llama_export.triton.repository import write_repository

    options = Options(device, format, max_sequences, max_idle_s, pool_pages)
    with output.reporter() as reporter, reporter.step("model repository"):
        written = write_repository(bundle, repository, options)
    if as_json:
        output.write_json(_to_dict(repository, written))
    else:
        _show(repository, written, max_sequences)


def _to_dict(repository: Path, written: Repository) -> dict[str, object]:
    models = [
        {
            "name": model.name,
            "backend": model.backend,
            "device": model.device,
            "entries": [program.entry for program in model.programs],
            "state_bytes": model.state_bytes,
        }
        for model in written.models
    ]
    return {
        "repository": str(repository),
        "models": models,
        "linked_bytes": written.linked_bytes,
        "copied_bytes": written.copied_bytes,
    }


def _show(repository: Path, written: Repository, max_sequences: int) -> None:
    rows = [
        (
            model.name,
            model.backend,
            model.device,
            ", ".join(program.entry for program in model.programs),
            f"{max_sequences} x {show_bytes(model.state_bytes)}" if model.states else "",
        )
        for model in written.models
    ]
    output.write_table(rows, columns=("model", "backend", "device", "entries", "states, at most"))
    sizes = f"{show_bytes(written.linked_bytes)} linked, {show_bytes(written.copied_bytes)} copied"
    output.write(f"\n{repository}: {sizes}\n")
