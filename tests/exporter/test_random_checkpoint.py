"""The checkpoint that benchmarks make where none can be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llama_export import presets
from llama_export.checkpoint.hf import HfCheckpoint
from llama_export.checkpoint.layout import expected_tensors
from tests.benchmarks.random_checkpoint import write_random

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def config_of(name: str) -> dict[str, Any]:
    """A preset's own config, which differs in its sizes alone."""
    preset = presets.find(name)
    assert preset is not None
    return {**preset.config, **SIZES}


@pytest.mark.parametrize("name", presets.names())
def test_it_is_a_checkpoint_of_any_preset(tmp_path: Path, name: str) -> None:
    checkpoint = HfCheckpoint.open(write_random(tmp_path / "m", config_of(name)))
    assert checkpoint.stop_tokens == ()
    assert checkpoint.dtype == "bf16"
    names = {tensor.removesuffix("_scale") for tensor in checkpoint.tensors}
    assert names == set(expected_tensors(checkpoint.config))
    kinds = {info.dtype for info in checkpoint.tensors.values()}
    assert kinds == ({"bf16", "f8e4m3"} if name.endswith("fp8") else {"bf16"})


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b-instruct-fp8"])
def test_its_values_are_as_large_as_trained_ones(tmp_path: Path, name: str) -> None:
    checkpoint = HfCheckpoint.open(write_random(tmp_path / "m", config_of(name)))
    layer = "model.layers.1.mlp.up_proj.weight"
    weight = checkpoint.read(layer).float()
    if name.endswith("fp8"):
        weight *= checkpoint.read(f"{layer}_scale").float()
    assert abs(float(weight.std()) - 0.02) < 0.001
    assert torch.equal(checkpoint.read("model.norm.weight").float(), torch.ones(64))


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    files = [
        write_random(tmp_path / folder, config_of("smollm2-135m"), seed=seed) / "model.safetensors"
        for folder, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    first, again, other = (path.read_bytes() for path in files)
    assert first == again
    assert first != other
