"""A command in the processes that `torchrun` started: the first one leads, the others follow it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import click

from llama_artifacts.errors import LlamaExportError
from llama_runtime.cli import errors, signals

if TYPE_CHECKING:
    from llama_runtime import LoadedBundle
    from llama_runtime.group import Link

RANK_VARIABLE = "RANK"
_LEADER = "0"
_END_SECONDS = 5.0
"""How long a process may take to end by itself when the group has lost another."""


def is_follower() -> bool:
    """Whether this is one of several processes that `torchrun` started, and not the first."""
    return os.environ.get(RANK_VARIABLE, _LEADER) != _LEADER


class Ranks:
    """This process and the others; alone it only loads bundles."""

    def __init__(self, link: Link | None) -> None:
        self._link = link

    def load(self, *args: Any, **settings: Any) -> LoadedBundle | None:
        """`llama_runtime.load`; None in a process that has followed the leader to its end.

        Raises:
            LlamaExportError: as `llama_runtime.load`, and what failed first in the group.
        """
        import llama_runtime

        if self._link is None:
            return llama_runtime.load(*args, **settings)
        from llama_runtime.group import follow, lead

        loaded = llama_runtime.load(*args, **settings, group=self._link.group)
        if not self._link.is_leader:
            follow(loaded, self._link)
            return None
        lead(loaded, self._link)
        return loaded

    def fault(self) -> LlamaExportError | None:
        """What failed first in the group; None while all goes well."""
        return None if self._link is None else self._link.reason()


@contextlib.contextmanager
def joined(device: str, timeout: float) -> Iterator[Ranks]:
    """This process among the others for as long as the block runs.

    What fails first, wherever that is, is raised at the end of the block in the leader; in the
    others it ends the command without a word, if the leader is there to say it.

    Raises:
        CompatibilityError, InputError, GroupError: as `llama_runtime.shards.join` and `Link`.
    """
    if RANK_VARIABLE not in os.environ:
        yield Ranks(None)
        return
    from llama_runtime import shards
    from llama_runtime.group import Link

    group = shards.join(device, timeout=timeout)
    link = Link(group, timeout=timeout, on_end=_end_soon)
    if not link.is_leader:
        # The leader ends at a signal, in its own time; this one ends with it.
        signals.ignore()
    try:
        yield Ranks(link)
    except BaseException as cause:
        _end(link, cause)
    finally:
        link.close()
    shards.leave()


def _end(link: Link, cause: BaseException) -> NoReturn:
    """Raises what is to be told of a command that failed."""
    if link.is_leader:
        # A signal may be what torchrun sends when a process is gone.
        reason = link.reason(wait=0.5 if isinstance(cause, RuntimeError) else 0.0)
        raise cause if reason is None else reason from cause
    if isinstance(cause, Exception):
        link.failure(cause)
    if not link.is_speaker and isinstance(cause, LlamaExportError):
        raise click.exceptions.Exit(errors.EXIT_FAILURE) from cause
    raise cause


def _end_soon(link: Link, error: LlamaExportError | None) -> None:
    """The last resort for a process that hangs in what the others no longer answer."""
    timer = threading.Timer(_END_SECONDS, _end_now, [link, error])
    timer.daemon = True
    timer.start()


def _end_now(link: Link, error: LlamaExportError | None) -> NoReturn:
    if error is not None and link.is_speaker:
        errors.show(error, as_json=False)
    signals.leave(0 if error is None else errors.EXIT_FAILURE)
