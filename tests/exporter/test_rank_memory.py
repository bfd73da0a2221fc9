"""What a process needs that runs a program together with others, measured on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_artifacts.bundle import open_bundle
from llama_artifacts.per_rank import rank_weights
from llama_artifacts.weights import stored_tensors
from llama_export.build import build
from llama_export.recipe import Recipe
from tests.benchmarks.random_checkpoint import write_random
from tests.measure_ranks import ALLOWED, allowed, measure_all
from tests.tiny import tiny_config

# Some 670 MB in bf16, and 130 MB of states: twice what may come on top.
CONFIG = tiny_config(
    vocab_size=32_768,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=16,
    max_position_embeddings=2048,
    torch_dtype="bfloat16",
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    model = write_random(folder / "model", CONFIG)
    recipe = Recipe(
        str(model), folder / "bundle", ("decode",), ("aoti",), max_seq=2048, shards=(1, 2, 4)
    )
    return build(recipe).folder


@pytest.mark.long
@pytest.mark.parametrize("num_shards", [2, 4])
def test_each_process_needs_its_part_and_the_embedding(bundle: Path, num_shards: int) -> None:
    found = measure_all(bundle, num_shards, "aoti", "decode", {})
    assert len(found) == num_shards
    whole = open_bundle(bundle).manifest.programs[0].signature.state_bytes
    for memory in found:
        assert memory.states == whole // num_shards
        assert memory.peak <= allowed(bundle, num_shards, memory.states)
    # The measure would show a process that held all weights.
    stored = sum(
        found.end - found.start for _, found in stored_tensors(open_bundle(bundle)).values()
    )
    assert stored > allowed(bundle, num_shards, whole // num_shards) - ALLOWED + 100e6


@pytest.mark.long
def test_columns_are_all_that_a_process_copies(bundle: Path) -> None:
    opened = open_bundle(bundle)
    stored = {name: found.end - found.start for name, (_, found) in stored_tensors(opened).items()}
    weights = rank_weights(opened.manifest, stored, 2)
    layer = (1024 * 1024 + 1024 * 4096) * 2
    assert weights.copied == 16 * layer // 2
    for memory in measure_all(bundle, 2, "aoti", "decode", {}):
        beside = memory.own - memory.states - weights.copied
        assert beside <= ALLOWED
