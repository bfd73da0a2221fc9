"""`build --config` and `--check`: the choices of a file or bundle, under those of the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import BuildError
from llama_export.cli.options import option
from llama_export.recipe import Recipe
from llama_export.rerun import choices, from_json

CHOICES = {field.name for field in dataclasses.fields(Recipe)} - {"output", "jobs", "overwrites"}


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


def _apply_bundle(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Makes the choices that a bundle was built with the defaults; a local model is to be named."""
    if value is None:
        return None
    bundle = open_bundle(value)
    found = choices(bundle)
    if bundle.manifest.source.kind != "hub":
        del found["model"]
    ctx.default_map = found
    return value


check_option = option(
    "--check",
    "checked",
    group="Output and target",
    type=click.Path(path_type=Path),
    metavar="BUNDLE",
    show_default="a new bundle",
    is_eager=True,
    callback=_apply_bundle,
    help="Write nothing: build this bundle once more, as it was built, and tell what differs.",
)
"""`--check BUNDLE`, whose choices become the defaults of the command's other options."""

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
