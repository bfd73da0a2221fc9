"""The only place that prints: results to stdout; notes, progress and errors to stderr."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from llama_artifacts.documents import write_whole
from llama_artifacts.errors import LlamaExportError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_UNLIMITED = 100_000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NUMBER = re.compile(r"[-+]?[\d,]+(\.\d+)?(e[-+]\d+)?( ?[kMGT]?B| s)?|-|inf|nan|")
_BOLD_RED, _CYAN = "1;31", "36"


class OutputError(LlamaExportError):
    """Standard output cannot be written."""


def prepare() -> None:
    """Makes stdout and stderr take any text: what they cannot encode comes escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(text: str) -> str:
    """The text with control characters escaped, so that a file cannot steer the terminal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


# Results


def write(text: str) -> None:
    """Text to stdout, at once.

    Raises:
        BrokenPipeError: the reader went away.
        OutputError: the disk is full, or the like.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as cause:
        drop_stdout()
        message = f"cannot be written: {cause.strerror or cause}"
        raise OutputError(message, where="standard output") from cause


def write_file(text: str, path: Path | None, *, bundle: Path) -> None:
    """A document about a bundle: to a file, whole or not at all; to stdout where None.

    Raises:
        OutputError: the file cannot be written, or would become an unlisted file of the bundle.
    """
    if path is None:
        write(text)
        return
    if path.absolute().parent.resolve() == bundle.resolve():
        hint = "choose a file outside of the bundle"
        raise OutputError("a bundle holds its own files only", where=path, hint=hint)
    try:
        write_whole(path, text.encode())
    except OSError as cause:
        message = f"cannot be written: {cause.strerror or cause}"
        raise OutputError(message, where=path, hint="choose another file with -o") from cause


def write_piece(text: str) -> None:
    """A piece of generated text: as it is to a file, with control characters escaped to a terminal."""
    write(printable(text) if is_terminal(sys.stdout) else text)


def drop_stdout() -> None:
    """Discards what stdout still holds, which the interpreter would try to write at its end."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def write_json(value: dict[str, Any]) -> None:
    """One JSON object; numbers that JSON lacks become null."""
    write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def write_title(text: str) -> None:
    """A heading."""
    from rich.text import Text

    _render(Text(printable(text), style="bold"))


def write_table(
    rows: Sequence[Sequence[str]], *, columns: Sequence[str] = (), indent: int = 0
) -> None:
    """Rows in columns; long cells fold. A column of numbers is aligned to the right."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=bool(columns), pad_edge=False)
    for index in range(len(columns) or len(rows[0])):
        cells = [row[index] for row in rows]
        is_numeric = bool(columns) and all(map(_NUMBER.fullmatch, cells)) and any(cells)
        table.add_column(
            columns[index].upper() if columns else "",
            justify="right" if is_numeric else "left",
            header_style="dim",
            style="" if columns or index else "dim",
            overflow="fold",
            no_wrap=is_numeric,
        )
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    _render(Padding(table, (0, 0, 0, indent), expand=False))


# Everything else


def tell(text: str) -> None:
    """A line to stderr."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def tell_error(text: str, hint: str | None) -> None:
    """`error: ...` on one line, and the hint on the next."""
    tell(f"{_styled('error:', _BOLD_RED)} {printable(' '.join(text.split()))}")
    if hint:
        tell(f"{_styled('hint:', _CYAN)} {printable(' '.join(hint.split()))}")


@contextlib.contextmanager
def waiting(name: str) -> Iterator[None]:
    """On a terminal, shows what is being waited for, without leaving a trace."""
    if not is_terminal(sys.stderr):
        yield
        return
    with progress_bar() as progress:
        progress.add_task(name, total=None)
        yield


def progress_bar() -> Progress:
    """What shows steps of work on a terminal; it leaves no trace."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=_console(sys.stderr, like=sys.stderr),
        transient=True,
        redirect_stdout=False,  # it would send results to stderr
    )


def _render(renderable: Any) -> None:
    text = io.StringIO()
    _console(text, like=sys.stdout).print(renderable)
    write("\n".join(line.rstrip(" ") for line in text.getvalue().split("\n")))


def _console(file: TextIO, *, like: TextIO) -> Console:
    """A console that writes to a file what suits a stream: its width, its colours."""
    from rich.console import Console

    is_wide = not is_terminal(like) and "COLUMNS" not in os.environ
    return Console(
        file=file,
        force_terminal=is_terminal(like),
        color_system="auto" if _has_color(like) else None,
        width=_UNLIMITED if is_wide else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _styled(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if _has_color(sys.stderr) else text


def _has_color(stream: TextIO | None) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person may be looking, on something that can move its cursor."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
