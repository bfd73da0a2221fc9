"""What this command line prints beyond what its runtime prints: the steps of long work."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from llama_export.report import Reporter
from llama_runtime.cli.output import (
    OutputError as OutputError,
)
from llama_runtime.cli.output import (
    drop_stdout as drop_stdout,
)
from llama_runtime.cli.output import (
    is_terminal as is_terminal,
)
from llama_runtime.cli.output import (
    prepare as prepare,
)
from llama_runtime.cli.output import (
    printable as printable,
)
from llama_runtime.cli.output import (
    progress_bar as progress_bar,
)
from llama_runtime.cli.output import (
    tell as tell,
)
from llama_runtime.cli.output import (
    tell_error as tell_error,
)
from llama_runtime.cli.output import (
    waiting as waiting,
)
from llama_runtime.cli.output import (
    write as write,
)
from llama_runtime.cli.output import (
    write_file as write_file,
)
from llama_runtime.cli.output import (
    write_json as write_json,
)
from llama_runtime.cli.output import (
    write_piece as write_piece,
)
from llama_runtime.cli.output import (
    write_table as write_table,
)
from llama_runtime.cli.output import (
    write_title as write_title,
)

if TYPE_CHECKING:
    from rich.progress import Progress


@contextlib.contextmanager
def reporter() -> Iterator[Reporter]:
    """Shows the steps of long work: bars on a terminal, else one line per finished step."""
    if not is_terminal(sys.stderr):
        yield _LineReporter()
        return
    with progress_bar() as progress:
        yield _BarReporter(progress)


class _LineReporter(Reporter):
    def note(self, text: str) -> None:
        tell(f"note: {printable(text)}")

    @contextlib.contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        started = time.monotonic()
        yield lambda count: None
        tell(f"{printable(name)}: {time.monotonic() - started:.1f} s")


class _BarReporter(Reporter):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def note(self, text: str) -> None:
        self._print(f"note: {text}", style="yellow")

    @contextlib.contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        started = time.monotonic()
        task = self._progress.add_task(printable(name), total=total)
        try:
            yield lambda count: self._progress.advance(task, count)
        finally:
            self._progress.remove_task(task)
        self._print(f"{name}: {time.monotonic() - started:.1f} s", style="dim")

    def _print(self, text: str, *, style: str) -> None:
        from rich.text import Text

        self._progress.console.print(Text(printable(text), style=style))
