"""The page's file: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from llama_artifacts.errors import BuildError

_HINT = "choose another file with -o"


def write_page(path: Path, text: str, *, is_replacing: bool) -> int:
    """Writes the page beside its place and moves it there; returns its bytes.

    Raises:
        BuildError: it exists and is not to be replaced, or cannot be written.
    """
    data = text.encode()
    staged = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        if path.is_dir() or (path.exists() and not is_replacing):
            hint = "replace it with --force, or choose another with -o"
            raise BuildError("the output exists", where=path, hint=hint)
        staged.write_bytes(data)
        staged.replace(path)
    except OSError as cause:
        message = f"cannot be written: {cause.strerror or cause}"
        raise BuildError(message, where=path, hint=_HINT) from cause
    finally:
        staged.unlink(missing_ok=True)
    return len(data)
