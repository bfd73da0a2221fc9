"""What failures look like on the command line, and the exit statuses."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import click

from llama_artifacts.errors import LlamaExportError
from llama_runtime.cli import output

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141
DEBUG_VARIABLE = "LLAMA_EXPORT_DEBUG"


class UsageError(click.UsageError):
    """Wrong usage, with a hint of its own."""

    def __init__(self, message: str, *, ctx: click.Context | None = None, hint: str) -> None:
        super().__init__(message, ctx)
        self.hint = hint


def is_debugging() -> bool:
    """Whether the user asked for the tracebacks of known failures."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def quiet_warnings() -> None:
    """Hides the warnings that libraries direct at programmers, unless someone asked for them."""
    if not sys.warnoptions and not is_debugging():
        warnings.simplefilter("ignore")


def to_dict(error: LlamaExportError) -> dict[str, Any]:
    """A known failure for `--json`."""
    return {
        "kind": type(error).__name__,
        "message": " ".join(error.message.split()),
        "where": error.where,
        "hint": error.hint,
    }


def show(error: LlamaExportError, *, as_json: bool) -> None:
    """One line on stderr and its hint; with `as_json` also an object on stdout."""
    if is_debugging():
        output.tell("".join(traceback.format_exception(error)).rstrip())
    if as_json:
        output.write_json({"error": to_dict(error)})
    output.tell_error(str(error), error.hint)


def exit_with(command: Callable[[], Any]) -> NoReturn:
    """Runs a command without click's own handling and exits with its status.

    Exceptions that nobody expected pass through, with their traceback.
    """
    try:
        status = command()
    except LlamaExportError as error:
        show(error, as_json=False)
        sys.exit(EXIT_FAILURE)
    except click.ClickException as error:
        _show_usage(error)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        output.tell("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def _show_usage(error: click.ClickException) -> None:
    hint = getattr(error, "hint", None)
    ctx = getattr(error, "ctx", None)
    if hint is None and ctx is not None:
        hint = f"see `{ctx.command_path} --help`"
    message = error.format_message().strip().rstrip(".")
    output.tell_error(message[:1].lower() + message[1:], hint)
