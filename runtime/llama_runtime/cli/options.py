"""What commands share: grouped options, examples in the help, arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from llama_artifacts.errors import ChoiceError, LlamaExportError
from llama_runtime.cli import errors, output

F = TypeVar("F", bound=Callable[..., Any])
Example = tuple[str, str]

CONTEXT: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "show_default": True,
}
OPTIONS = "Options"


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
