"""Builds that must fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llama_artifacts.errors import BuildError, LlamaExportError
from llama_export.build import build
from llama_export.recipe import Recipe


def refused(recipe: Recipe, kind: type[LlamaExportError] = BuildError, **changes: Any) -> str:
    """The one line of a build that must fail; nothing may stay beside the output."""
    recipe = replace(recipe, **changes)
    assert recipe.output is not None
    parent = recipe.output.parent
    before = sorted(parent.iterdir()) if parent.is_dir() else None
    with pytest.raises(kind) as caught:
        build(recipe)
    after = sorted(parent.iterdir()) if parent.is_dir() else None
    assert before == after
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)
