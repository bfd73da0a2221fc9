"""The page's file: whole or not at all."""

from __future__ import annotations

from pathlib import Path

from llama_artifacts.documents import write_whole
from llama_artifacts.errors import BuildError

_HINT = "choose another file with -o"


def write_page(path: Path, text: str, *, overwrites: bool) -> int:
    """Writes the page as `write_whole` does; returns its bytes.

    Raises:
        BuildError: it exists and is not to be replaced, or cannot be written.
    """
    data = text.encode()
    try:
        if path.is_dir() or (path.exists() and not overwrites):
            hint = "replace it with --overwrite, or choose another with -o"
            raise BuildError("the output exists", where=path, hint=hint)
        write_whole(path, data)
    except OSError as cause:
        message = f"cannot be written: {cause.strerror or cause}"
        raise BuildError(message, where=path, hint=_HINT) from cause
    return len(data)
