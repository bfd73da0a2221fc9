"""Models of real sizes, run by several processes together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.errors import BuildError
from llama_export import presets
from llama_export.build import build
from llama_export.cache import ProgramCache
from llama_export.recipe import Recipe
from tests.benchmarks.random_checkpoint import write_random
from tests.processes import torchrun

pytestmark = pytest.mark.long

F32_LIMIT, BF16_LIMIT = 1e-5, 0.05
"""Of a difference between one process and several, relative to the largest value."""
HANGS_SECONDS = 1800
WORKER = Path(__file__).parents[1] / "shards_worker.py"


def recipe(model: Path, output: Path, count: int, **changes: Any) -> Recipe:
    return Recipe(
        *(str(model), output, ("prefill", "decode"), ("pt2",)),
        max_seq=128,
        shards=(1, count),
        **changes,
    )


def largest_difference(bundle: Path, num_processes: int) -> float:
    found = json.loads(torchrun(num_processes, WORKER, bundle, bundle, timeout=HANGS_SECONDS))
    assert len(found) == 2
    return float(max(found.values()))


def test_smollm2_is_refused_for_two_processes(smollm2_gguf: Path, tmp_path: Path) -> None:
    message = "2 shards divide, got query heads 9, key/value heads 3$"
    with pytest.raises(BuildError, match=message):
        build(recipe(smollm2_gguf, tmp_path / "bundle", 2))


def test_three_processes_run_smollm2(smollm2_gguf: Path, tmp_path: Path) -> None:
    choices = recipe(smollm2_gguf, tmp_path / "bundle", 3, dtype="f32")
    bundle = build(choices, cache=ProgramCache()).folder
    assert largest_difference(bundle, 3) <= F32_LIMIT


def test_two_processes_run_the_shape_of_smollm2_1_7b(tmp_path: Path) -> None:
    preset = presets.find("smollm2-1.7b-instruct")
    assert preset is not None
    model = write_random(tmp_path / "model", dict(preset.config))
    choices = recipe(model, tmp_path / "bundle", 2, weights="link")
    bundle = build(choices, cache=ProgramCache()).folder
    assert largest_difference(bundle, 2) <= BF16_LIMIT
