"""Whether a bundle can be built again, byte for byte."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from llama_artifacts.bundle import open_bundle
from llama_artifacts.diff import Change, compare
from llama_artifacts.integrity import check_whole
from llama_export.build import build
from llama_export.recipe import Recipe
from llama_export.report import Reporter

RECORDS = frozenset({"samples.json", "bench.json"})
"""Files that commands add to a bundle after it was built."""


def differences(
    recipe: Recipe, folder: Path, *, reporter: Reporter | None = None
) -> tuple[Change, ...]:
    """Builds a recipe once more, in a scratch folder and without the cache, and compares.

    What commands record in a bundle later is left out: figures of checks and `RECORDS`.

    Args:
        recipe: how the bundle was built; its `output` is not used.
        folder: the bundle.
        reporter: told about each step.

    Returns:
        What differs, `before` being the bundle; nothing where every file is the same.

    Raises:
        LlamaExportError: the bundle is not whole, or the recipe cannot be built.
    """
    bundle = check_whole(folder)
    with tempfile.TemporaryDirectory(prefix="llama-export-") as scratch:
        again = replace(recipe, output=Path(scratch) / "bundle")
        result = build(again, reporter=reporter)
        changes = compare(bundle, open_bundle(result.folder))
    return tuple(change for change in changes if not _is_record(change))


def _is_record(change: Change) -> bool:
    return change.area == "checks" or (change.area == "files" and change.name in RECORDS)
