"""How long work tells what it is doing, without knowing who listens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class Reporter:
    """Listens to a build or a check; this one is silent, the command line has one that shows."""

    def note(self, text: str) -> None:
        """One remark, such as an assumed config value."""

    @contextlib.contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """A piece of work, for as long as the block runs.

        Args:
            name: what is done, such as `decode aoti` or `weights`.
            total: how many units `advance` will count (bytes, say), or None if unknown.

        Yields:
            `advance`, to be called with the number of units done since the last call.
        """
        yield lambda count: None
