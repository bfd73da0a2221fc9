"""What compilers and writers of archives raise, as one line."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

from llama_artifacts.errors import BuildError

MAX_REASON_CHARS = 300
_SPACE = "is there space in the output folder and in TMPDIR?"
_QUESTIONS = (
    ("No space", _SPACE),
    ("Killed", "was there memory enough? --jobs 1 makes one program at a time;"),
    ("error:", "does another compiler take the code? The environment variable CXX names one;"),
    ("", _SPACE),
)
"""What the user can look into, by what stands in the reason; a full disk shows in many ways."""


@contextlib.contextmanager
def known_failures(step: str, folder: Path) -> Iterator[None]:
    """What compilers and writers of archives raise for a full disk and the like, as one line."""
    try:
        yield
    except OSError as cause:
        name = cause.filename
        inside = isinstance(name, str) and Path(name).absolute().is_relative_to(folder.absolute())
        if inside or cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # the output folder's own error, which `staging` tells
        raise _cannot_be_made(step, cause) from cause
    except (RuntimeError, subprocess.SubprocessError) as cause:
        raise _cannot_be_made(step, cause) from cause


def _cannot_be_made(step: str, cause: Exception) -> BuildError:
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line or "No space" in line]
    reason = (*telling, *lines, type(cause).__name__)[0]
    question = next(text for part, text in _QUESTIONS if part in reason)
    return BuildError(
        f"cannot be made: {reason[:MAX_REASON_CHARS]}",
        where=step,
        hint=f"{question} LLAMA_EXPORT_DEBUG=1 tells more",
    )
