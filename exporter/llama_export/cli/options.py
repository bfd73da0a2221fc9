"""What the commands share: grouped options, examples in the help, arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from llama_artifacts.errors import ChoiceError, LlamaExportError
from llama_artifacts.manifest import FORMATS, IntegerKind
from llama_export.cli import errors, output
from llama_export.entries.registry import DEFAULT_PAGE_SIZE
from llama_export.recipe import GroupSize

F = TypeVar("F", bound=Callable[..., Any])
Example = tuple[str, str]

CONTEXT: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "show_default": True,
}
OPTIONS = "Options"
DTYPES = ("bf16", "f16", "f32")
"""Of weights and arithmetic."""


class Option(click.Option):
    """An option that the help lists under a heading."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class Command(click.Command):
    """A command whose help groups its options and ends with examples.

    Known failures end it with exit status 1, a choice that does not fit the checkpoint with 2; with
    `--json` they are printed as JSON, too.
    """

    def __init__(self, *args: Any, examples: Sequence[Example] = (), **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", CONTEXT)
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                groups.setdefault(getattr(param, "group", OPTIONS), []).append(record)
        for group, records in groups.items():
            is_rest = group == OPTIONS and len(groups) > 1
            with formatter.section("Other options" if is_rest else group):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(formatter, self.examples)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LlamaExportError as error:
            errors.show(error, as_json=bool(ctx.params.get("as_json")))
            is_usage = isinstance(error, ChoiceError)
            ctx.exit(errors.EXIT_USAGE if is_usage else errors.EXIT_FAILURE)
        except BrokenPipeError:
            output.drop_stdout()
            ctx.exit(errors.EXIT_BROKEN_PIPE)


def write_examples(formatter: click.HelpFormatter, examples: Iterable[Example]) -> None:
    """A section of commands, never broken into lines, each under what it does."""
    with formatter.section("Examples"):
        for remark, command in examples:
            indent = " " * formatter.current_indent
            formatter.write(f"{indent}{remark}\n{indent}  $ {command}\n")


def checked_text(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Callback of text options: a shell can pass any bytes, also some that are no text."""
    try:
        "".join(value or ()).encode()
    except UnicodeEncodeError as cause:
        raise click.BadParameter("expected UTF-8 text", ctx, param) from cause
    return value


def option(*names: str, group: str = OPTIONS, **settings: Any) -> Callable[[F], F]:
    """`click.option` under a heading of the help."""
    return click.option(*names, cls=Option, group=group, **settings)


bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))
"""A folder; whether it is a bundle is found out by opening it."""

json_option = option(
    "--json",
    "as_json",
    is_flag=True,
    show_default=False,
    help="Print one JSON object instead, also when it fails.",
)

weights_dir_option = option(
    "--weights-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    show_default="the hub's cache, or a download",
    help="The checkpoint's folder, for a bundle that refers to its weights.",
)


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
    choice = click.Choice(get_args(IntegerKind))
    shown = "nothing is rounded"
    return option("--quantize", group=group, type=choice, show_default=shown, help=text)


def group_size_option(*, group: str) -> Callable[[F], F]:
    """`--group-size`."""
    return option(
        "--group-size",
        group=group,
        type=click.Choice(get_args(GroupSize)),
        show_default="64 in int8, 32 in int4",
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
