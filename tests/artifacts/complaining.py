"""Everything that can be found wrong with a bundle without running it."""

from __future__ import annotations

from pathlib import Path

from llama_artifacts import integrity
from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import LlamaExportError


def complaint(folder: Path) -> LlamaExportError | None:
    """The first known error of opening a bundle, reading its weights' header and hashing its files."""
    try:
        bundle = open_bundle(folder)
        integrity.check_index(bundle)
        return integrity.check(folder).error()
    except LlamaExportError as error:
        return error
