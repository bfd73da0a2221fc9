"""A recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_export.recipe import Recipe


@pytest.fixture
def recipe(tiny_checkpoint: Path, tmp_path: Path) -> Recipe:
    """One small program, quickly built, to be varied."""
    return Recipe(str(tiny_checkpoint), tmp_path / "out", ("decode",), ("pt2",), max_seq=16)
