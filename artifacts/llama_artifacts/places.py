"""Where this project keeps files of its own on a user's machine."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "LLAMA_EXPORT_CACHE"


def cache_folder() -> Path:
    """LLAMA_EXPORT_CACHE, else `llama-export` in XDG_CACHE_HOME or `~/.cache`; it may not exist."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llama-export"
