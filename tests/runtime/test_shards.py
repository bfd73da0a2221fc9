"""Programs that several processes run together, against those that one runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llama_export.build import build
from llama_export.cache import ProgramCache
from tests.conftest import sharded_recipe
from tests.processes import torchrun
from tests.tiny import write_tiny
from tests.tiny_fp8 import write_tiny_fp8

pytestmark = pytest.mark.slow

LIMIT = 1e-5
NUM_ENTRIES = 17
EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
WORKER = Path(__file__).parents[1] / "shards_worker.py"


def differences(num_processes: int, whole: Path, parts: Path) -> dict[str, float]:
    """Of every program, from one process."""
    found: dict[str, float] = json.loads(torchrun(num_processes, WORKER, whole, parts))
    return found


def built(checkpoint: Path, output: Path, **changes: Any) -> Path:
    return build(sharded_recipe(checkpoint, output, **changes), cache=ProgramCache()).folder


# --- results --------------------------------------------------------------------------------------


def test_two_processes_compute_what_one_does(sharded_bundle: Path) -> None:
    found = differences(2, sharded_bundle, sharded_bundle)
    assert len(found) == NUM_ENTRIES
    assert max(found.values()) <= LIMIT, found


def test_four_processes_compute_what_one_does(
    sharded_bundle: Path, sharded_checkpoint: Path, tmp_path: Path
) -> None:
    entries = ("decode", "generate", "loss_packed")
    parts = built(sharded_checkpoint, tmp_path / "bundle", entries=entries, shards=(4,))
    found = differences(4, sharded_bundle, parts)
    assert len(found) == len(entries)
    assert max(found.values()) <= LIMIT, found


def test_two_processes_run_native_code(
    sharded_bundle: Path, sharded_checkpoint: Path, tmp_path: Path
) -> None:
    changes = {"entries": ("generate",), "formats": ("aoti",), "shards": (2,)}
    found = differences(
        2, sharded_bundle, built(sharded_checkpoint, tmp_path / "bundle", **changes)
    )
    assert list(found) == ["generate<4> aoti"]
    assert max(found.values()) <= LIMIT, found


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_codes_and_their_scales_are_cut(tmp_path: Path, kind: str) -> None:
    if kind == "fp8":
        model, changes = write_tiny_fp8(tmp_path / "model", **EIGHT_HEADS), {}
    else:
        model = write_tiny(tmp_path / "model", **EIGHT_HEADS, tie_word_embeddings=True)
        changes = {"quantize": kind, "group_size": "32"}
    bundle = built(model, tmp_path / "bundle", entries=("decode",), **changes)
    found = differences(2, bundle, bundle)
    assert max(found.values()) <= LIMIT, found


@pytest.mark.long
@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize("format", ["pt2", "aoti"])
def test_every_entry_in_both_formats(
    sharded_bundle: Path, sharded_checkpoint: Path, tmp_path: Path, num_processes: int, format: Any
) -> None:
    changes = {"formats": (format,), "shards": (num_processes,), "variants": ("none",)}
    parts = built(sharded_checkpoint, tmp_path / "bundle", jobs=2, **changes)
    found = differences(num_processes, sharded_bundle, parts)
    assert len(found) == NUM_ENTRIES
    assert max(found.values()) <= LIMIT, found
