"""A recipe, and a bundle for laws."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from llama_export.build import build
from llama_export.cache import ProgramCache
from llama_export.recipe import Recipe
from tests.conftest import shared_folder
from tests.exporter.sabotage import BATCH, MAX_SEQ, STEPS


@pytest.fixture
def recipe(tiny_checkpoint: Path, tmp_path: Path) -> Recipe:
    """One small program, quickly built, to be varied."""
    return Recipe(str(tiny_checkpoint), tmp_path / "out", ("decode",), ("pt2",), max_seq=16)


@pytest.fixture(scope="session")
def laws_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every entry as pt2, three rows, 64 positions. Do not write into it."""
    folder = shared_folder(tmp_path_factory)
    output = folder / "laws bundle"
    sizes = {"max_seq": MAX_SEQ, "batch": BATCH, "steps": STEPS, "max_new": STEPS}
    with FileLock(folder / "laws.lock"):
        if not output.exists():
            recipe = Recipe(str(tiny_checkpoint), output, ("all",), ("pt2",), **sizes)  # type: ignore[arg-type]
            build(recipe, cache=ProgramCache())
    return output
