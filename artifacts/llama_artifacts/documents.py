"""A single file that a command writes for its user: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file beside its place and moves it there; what a link leads to is replaced, not it.

    A pipe or device takes the bytes as they come, and stays what it is.

    Raises:
        OSError: the file cannot be written; then it is as it was.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    target = path.resolve()
    staged = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        staged.write_bytes(data)
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)
