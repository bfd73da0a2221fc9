"""Programs that several processes run together, against those that one runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import llama_runtime
from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import CompatibilityError, InputError, IntegrityError
from llama_export.build import build
from llama_export.cache import ProgramCache
from llama_runtime import shards
from llama_runtime.places import find_weights
from llama_runtime.shards import Group
from llama_runtime.weights import bundle_weights
from tests.conftest import sharded_recipe
from tests.processes import torchrun
from tests.tiny import write_tiny
from tests.tiny_fp8 import write_tiny_fp8

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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a tied head, and small enough that a row does not fill 64 bytes."""
    folder = tmp_path_factory.mktemp("checkpoint") / "untied"
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "head_dim": 16}
    return write_tiny(folder, **EIGHT_HEADS, **sizes)


@pytest.fixture(scope="module")
def only_two(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two entries for two processes alone, without weights of its own to run."""
    output = tmp_path_factory.mktemp("bundle") / "two"
    changes = {"entries": ("decode", "hidden_packed"), "shards": (2,), "weights": "reference"}
    return built(checkpoint, output, **changes)


# --- which programs -------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_process_alone_is_told_how_to_start_two(only_two: Path, checkpoint: Path) -> None:
    with pytest.raises(CompatibilityError) as caught:
        llama_runtime.load(only_two, weights_dir=checkpoint)
    assert "expected 2 processes, for which the bundle has programs, got 1" in str(caught.value)
    assert "torchrun --standalone --nproc-per-node 2 -m llama_runtime" in str(caught.value.hint)


@pytest.mark.slow
def test_another_number_of_processes_is_refused(only_two: Path, checkpoint: Path) -> None:
    with pytest.raises(CompatibilityError, match=r"expected 2 processes.*, got 3"):
        llama_runtime.load(only_two, weights_dir=checkpoint, group=Group(0, 3))


def test_who_was_not_started_by_torchrun_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(CompatibilityError, match="several processes, but RANK is not set"):
        shards.join()


@pytest.mark.parametrize(("device", "timeout"), [("meta", 1.0), ("cpu", 0.0), ("cpu", -1.0)])
def test_what_cannot_be_joined_is_refused(device: str, timeout: float) -> None:
    with pytest.raises(InputError):
        shards.join(device, timeout=timeout)


# --- which weights --------------------------------------------------------------------------------


def parts_of(folder: Path, weights_dir: Path, rank: int) -> tuple[Any, Any, Any]:
    """Cuts, whole weights, and those of one of two processes."""
    bundle = open_bundle(folder)
    places = find_weights(bundle, weights_dir=weights_dir)
    own = bundle_weights(bundle.manifest, places, Group(rank, 2))
    return bundle.manifest.cuts, bundle_weights(bundle.manifest, places), own


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_binds_its_part_of_each_tensor(
    only_two: Path, checkpoint: Path, rank: int
) -> None:
    cuts, whole, own = parts_of(only_two, checkpoint, rank)
    assert {cut.axis for cut in cuts.values()} == {"rows", "columns"}
    for name, tensor in own.items():
        expected = whole[name]
        if name in cuts:
            expected = expected.chunk(2, 0 if cuts[name].axis == "rows" else 1)[rank]
        assert torch.equal(tensor, expected), name
        assert tensor.is_contiguous()


@pytest.mark.slow
def test_parts_begin_where_compiled_code_expects_it(only_two: Path, checkpoint: Path) -> None:
    cuts, _, own = parts_of(only_two, checkpoint, 1)
    assert all(own[name].data_ptr() % 64 == 0 for name in cuts)


@pytest.mark.slow
def test_what_does_not_divide_is_refused(only_two: Path, checkpoint: Path) -> None:
    bundle = open_bundle(only_two)
    places = find_weights(bundle, weights_dir=checkpoint)
    with pytest.raises(IntegrityError, match=r"does not divide into \w+ for 3 processes"):
        bundle_weights(bundle.manifest, places, Group(0, 3))


# --- results --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_compute_what_one_does(sharded_bundle: Path) -> None:
    found = differences(2, sharded_bundle, sharded_bundle)
    assert len(found) == NUM_ENTRIES
    assert max(found.values()) <= LIMIT, found


@pytest.mark.slow
def test_four_processes_compute_what_one_does(
    sharded_bundle: Path, sharded_checkpoint: Path, tmp_path: Path
) -> None:
    entries = ("decode", "generate", "loss_packed")
    parts = built(sharded_checkpoint, tmp_path / "bundle", entries=entries, shards=(4,))
    found = differences(4, sharded_bundle, parts)
    assert len(found) == len(entries)
    assert max(found.values()) <= LIMIT, found


@pytest.mark.slow
def test_two_processes_run_native_code(
    sharded_bundle: Path, sharded_checkpoint: Path, tmp_path: Path
) -> None:
    changes = {"entries": ("generate",), "formats": ("aoti",), "shards": (2,)}
    found = differences(
        2, sharded_bundle, built(sharded_checkpoint, tmp_path / "bundle", **changes)
    )
    assert list(found) == ["generate<4> aoti"]
    assert max(found.values()) <= LIMIT, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["int4", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("fp8", "int8"))]
)
def test_codes_and_their_scales_are_cut(tmp_path: Path, kind: str) -> None:
    if kind == "fp8":
        model, changes = write_tiny_fp8(tmp_path / "model", **EIGHT_HEADS), {}
    else:
        model = write_tiny(tmp_path / "model", **EIGHT_HEADS, tie_word_embeddings=True)
        changes = {"quantize": kind, "group_size": "32"}
    bundle = built(model, tmp_path / "bundle", entries=("decode",), **changes)
    found = differences(2, bundle, bundle)
    assert max(found.values()) <= LIMIT, found


@pytest.mark.slow
def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "mlp_bias": True}
    model = write_tiny(tmp_path / "model", **EIGHT_HEADS, **sizes)
    bundle = built(model, tmp_path / "bundle", entries=("loss_packed",))
    assert float(torchrun(2, WORKER.with_name("gradients_worker.py"), bundle)) <= LIMIT


@pytest.mark.slow
def test_a_tied_head_has_no_gradients_in_a_group(
    sharded_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "check_same", lambda *_: None)
    bundle = llama_runtime.load(sharded_bundle, group=Group(0, 2))
    with pytest.raises(CompatibilityError, match=r"`lm_head.weight` is tied to `model.embed"):
        bundle.trainable("loss_packed")


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
