"""Processes of ours that are part of another one."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> bool:
    """Lets the kernel kill this process when its parent ends, even if that was killed.

    Returns:
        False where the parent, of this process number, is gone already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
