"""Twelve layers, whose names in the order of text are not in the order of the network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import llama_runtime
from llama_artifacts.manifest import Format
from llama_export.build import build
from llama_export.recipe import Recipe
from tests.runtime.loading import POISON, poisoned, random_tokens, reference, snapshot, written
from tests.tiny import write_tiny

pytestmark = pytest.mark.slow  # it builds bundles of its own

NUM_LAYERS, NUM_TOKENS = 12, 9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers") / "m"
    return write_tiny(folder, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    recipe = Recipe(
        str(checkpoint), checkpoint.with_name("b"), ("decode",), ("pt2", "onnx"), max_seq=16
    )
    return build(recipe).folder


@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_every_layer_keeps_its_own_keys_and_values(
    checkpoint: Path, bundle: Path, format: Format
) -> None:
    decode = llama_runtime.load(bundle, format=format).entry("decode")
    tokens = random_tokens(1, NUM_TOKENS)
    states = poisoned(decode)
    for position in range(NUM_TOKENS):
        before = snapshot(states)
        logits = decode.run(states, {"tokens": tokens[:, [position]], "pos": position})[0]
        changed = written(before, states)
        assert len(changed) == 2 * NUM_LAYERS
        assert all(places == {(0, position)} for places in changed.values())
    with torch.no_grad():
        result = reference(checkpoint)(tokens.long(), use_cache=True)
    torch.testing.assert_close(logits, result.logits[:, -1], atol=1e-5, rtol=0)
    for layer, cache in enumerate(result.past_key_values.layers):
        for name, expected in (("key", cache.keys), ("value", cache.values)):
            state = states[f"cache.{layer}.{name}"]
            torch.testing.assert_close(state[:, :, :NUM_TOKENS], expected, atol=1e-5, rtol=0)
            assert (state[:, :, NUM_TOKENS:] == POISON).all()
