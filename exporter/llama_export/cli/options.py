"""What the commands share beyond what those of the runtime share: choices of a build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import click

from llama_artifacts.manifest import FORMATS
from llama_export.entries.registry import DEFAULT_PAGE_SIZE
from llama_export.recipe import GroupSize, Quantize
from llama_runtime.cli.options import (
    CONTEXT as CONTEXT,
)
from llama_runtime.cli.options import (
    OPTIONS as OPTIONS,
)
from llama_runtime.cli.options import (
    Command as Command,
)
from llama_runtime.cli.options import (
    F as F,
)
from llama_runtime.cli.options import (
    Option as Option,
)
from llama_runtime.cli.options import (
    bundle_argument as bundle_argument,
)
from llama_runtime.cli.options import (
    checked_text as checked_text,
)
from llama_runtime.cli.options import (
    json_option as json_option,
)
from llama_runtime.cli.options import (
    option as option,
)
from llama_runtime.cli.options import (
    take as take,
)
from llama_runtime.cli.options import (
    weights_dir_option as weights_dir_option,
)
from llama_runtime.cli.options import (
    write_examples as write_examples,
)

DTYPES = ("bf16", "f16", "f32")
"""Of weights and arithmetic."""


def formats_option(text: str, **settings: Any) -> Callable[[F], F]:
    """Repeatable `--format`, as `formats`."""
    choice = click.Choice(FORMATS)
    return option("--format", "formats", type=choice, multiple=True, help=text, **settings)


def dtype_option(text: str, *, group: str) -> Callable[[F], F]:
    """`--dtype`, of a model that is not built yet."""
    choice = click.Choice(DTYPES)
    return option("--dtype", group=group, type=choice, show_default="the checkpoint's", help=text)


def quantize_option(text: str, *, group: str) -> Callable[[F], F]:
    """`--quantize`."""
    choice = click.Choice(get_args(Quantize))
    shown = "nothing is rounded"
    return option("--quantize", group=group, type=choice, show_default=shown, help=text)


def group_size_option(*, group: str) -> Callable[[F], F]:
    """`--group-size`."""
    return option(
        "--group-size",
        group=group,
        type=click.Choice(get_args(GroupSize)),
        show_default="64 in int8, else 32",
        help="How many values of a row share a scale in quantised weights.",
    )


def page_size_option(*, group: str) -> Callable[[F], F]:
    """`--page-size`."""
    return option(
        "--page-size",
        group=group,
        type=click.IntRange(min=1),
        default=DEFAULT_PAGE_SIZE,
        metavar="N",
        help="Positions of a page, in entries that keep a pool of pages.",
    )
