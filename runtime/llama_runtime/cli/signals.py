"""Ctrl-C, SIGTERM and SIGHUP end a command promptly and let it clean up behind itself."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

_GRACE_SECONDS = {int(signal.SIGINT): 1.5, int(signal.SIGTERM): 8.0, int(signal.SIGHUP): 8.0}
"""How long a command may take to end; a native call that does not return is then cut off."""


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handles the signals while the block runs, except those that the parent chose to ignore.

    The first signal is passed on to the processes that the command started (compilers), and
    raises KeyboardInterrupt or SystemExit in the main thread; later ones are ignored, so that
    they do not interrupt the clean-up. When the block has ended, so has the process: the exit
    handlers of libraries, which may wait for their threads, do not run.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        received.append(number)
        for other in _GRACE_SECONDS:
            signal.signal(other, signal.SIG_IGN)
        _send(signal.SIGTERM)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    _start_watch()
    for number in _GRACE_SECONDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        if received:
            _end(received[0])


def ignore() -> None:
    """From now on the signals do not reach this process, which another one ends."""
    for number in _GRACE_SECONDS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def left_to_command() -> Iterator[None]:
    """Lets a command with handlers of its own take its time to end; to be used within `handled`."""
    watched = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(watched)


def _start_watch() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # The interpreter writes the number here at once, even while the main thread is in native code.
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read_end,), daemon=True).start()


def _watch(read_end: int) -> None:
    number = 0
    while number not in _GRACE_SECONDS:
        number = os.read(read_end, 1)[0]
    time.sleep(_GRACE_SECONDS[number])
    _send(signal.SIGKILL)
    os._exit(128 + number)


def _end(number: int) -> NoReturn:
    _send(signal.SIGKILL)
    leave(128 + number)


def leave(status: object) -> NoReturn:
    """Ends the process as `sys.exit(status)` would, but without the exit handlers of libraries."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def _send(number: signal.Signals) -> None:
    for process in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _descendants(ancestor: int) -> list[int]:
    """Every living process that this one started, and those started by them."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent ...; the name may hold anything, parentheses included
            fields = path.read_bytes().rpartition(b")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [ancestor]
    for process in found:
        found += children.get(process, [])
    return found[1:]
