"""`build --config`: the choices of a file, under those of the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from llama_artifacts.errors import BuildError
from llama_export.cli.options import option
from llama_export.recipe import Recipe
from llama_export.rerun import from_json

CHOICES = {field.name for field in dataclasses.fields(Recipe)} - {"output"}


def _apply(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    """Makes the file's choices the defaults of the other options, which click then checks."""
    if value is None:
        return
    try:
        data = value.read_bytes()
    except OSError as cause:
        hint = "`llama-export export-config` writes such files"
        message = f"cannot be read: {cause.strerror}"
        raise BuildError(message, where=value, hint=hint) from cause
    ctx.default_map = from_json(data, where=value, known=CHOICES)


config_option = option(
    "--config",
    group="What to build",
    type=click.Path(path_type=Path),
    metavar="FILE",
    show_default="none",
    is_eager=True,
    expose_value=False,
    callback=_apply,
    help="Choices written by export-config; options on the command line come before them.",
)
"""`--config FILE`, whose values become the defaults of the command's other options."""
