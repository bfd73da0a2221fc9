"""What commands share: grouped options, examples in the help, arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llama_artifacts.errors import ChoiceError, LlamaExportError
from llama_artifacts.manifest import FORMATS, Format
from llama_runtime.cli import errors, output

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound="DataclassInstance")
Example = tuple[str, str]

CONTEXT: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "show_default": True,
}
OPTIONS, PROGRAM = "Options", "Program"


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


def take(kind: type[T], values: dict[str, Any]) -> T:
    """The options that a dataclass has fields for, as one; they leave a command's `values`."""
    names = [field.name for field in fields(kind) if field.name in values]
    return kind(**{name: values.pop(name) for name in names})


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

# --- what `run` and `serve` load ------------------------------------------------------------------


@dataclass(frozen=True)
class LoadOptions:
    """A bundle and how it is loaded: the options below, and `--weights-dir`."""

    bundle: Path
    format: Format | None
    device: str
    threads: int | None
    no_native: bool
    weights_dir: Path | None
    require_signature: Path | None
    timeout: float
    no_cuda_graphs: bool = False

    def settings(self) -> dict[str, Any]:
        """What `llama_runtime.load` takes beside the bundle."""
        return {
            "device": self.device,
            "format": self.format,
            "threads": self.threads,
            "allow_native": not self.no_native,
            "weights_dir": self.weights_dir,
            "require_signature": self.require_signature,
            "cuda_graphs": False if self.no_cuda_graphs else None,
        }


format_option = option(
    "--format",
    group=PROGRAM,
    type=click.Choice(FORMATS),
    show_default="the best that fits this machine",
    help="The format to run.",
)

device_option = option(
    "--device",
    group=PROGRAM,
    default="cpu",
    metavar="DEVICE",
    help="`cpu`, `cuda`, or one GPU such as `cuda:1`.",
)

threads_option = option(
    "--threads",
    group=PROGRAM,
    type=click.IntRange(min=1),
    metavar="N",
    show_default="one per core",
    help="CPU threads.",
)

native_option = option(
    "--no-native",
    group=PROGRAM,
    is_flag=True,
    show_default=False,
    help="Refuse compiled programs (aoti): they are code, and run with your rights.",
)

timeout_option = option(
    "--timeout",
    group=PROGRAM,
    type=click.FloatRange(min=1),
    default=120.0,
    metavar="SECONDS",
    help="Started by torchrun: how long a process waits for another that hangs.",
)

signature_option = option(
    "--require-signature",
    group=PROGRAM,
    type=click.Path(path_type=Path),
    metavar="KEY",
    show_default="unsigned bundles run, too",
    help="Refuse a bundle that is not signed by this public key (a PEM file), or that changed since.",
)
