"""GGUF's integers kept as they are: values to the bit, bundles of several kinds, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import llama_runtime
from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import ChoiceError
from llama_artifacts.manifest_file import read
from llama_export import rerun
from llama_export.build import build
from llama_export.checkpoint.gguf import GgufCheckpoint
from llama_export.checkpoint.gguf_codes import CODES
from llama_export.checkpoint.layout import coded_modules
from llama_export.checkpoint.source import TensorInfo
from llama_export.model.integers import decode
from llama_export.rebuild import differences
from llama_export.recipe import Recipe
from llama_export.verify import verify
from llama_runtime.weights import map_weights
from tests.cli.running import invoke
from tests.tiny import write_tiny
from tests.tiny_fp8 import write_tiny_fp8
from tests.tiny_gguf import write_tiny_gguf

TYPES = {
    "*": "Q4_1",
    "token_embd.weight": "Q8_0",
    "blk.0.attn_k.weight": "Q4_0",
    "blk.0.attn_v.weight": "Q5_0",
    "blk.0.ffn_up.weight": "Q8_0",
    "blk.0.ffn_down.weight": "F16",
}
"""Of one layer: three kinds of codes, and two that are decoded."""
EMBEDDING = "model.embed_tokens.weight"
LAYER = "model.layers.0."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder") / "tied"
    return write_tiny(path, tie_word_embeddings=True, num_hidden_layers=1)


@pytest.fixture(scope="module")
def mixed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("mixed") / "m.gguf", folder, quant=TYPES)


def recipe(model: Path, output: Path, **choices: Any) -> Recipe:
    given: dict[str, Any] = {"quantize": "stored", "entries": ("prefill",), "max_seq": 32}
    return Recipe(str(model), output, **{**given, "formats": ("pt2",), "dtype": "f32", **choices})


@pytest.fixture(scope="module")
def kept(mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("kept") / "b"
    return build(recipe(mixed, output, formats=("pt2", "onnx"))).folder


@pytest.fixture(scope="module")
def widened(mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(recipe(mixed, tmp_path_factory.mktemp("wide") / "b", quantize=None)).folder


def logits(bundle: Path, format: Any) -> torch.Tensor:
    entry = llama_runtime.load(bundle, format=format).entry("prefill")
    return entry(entry.new_states(), tokens=[[1, 5, 77, 3, 30, 101, 9]], pos=0)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "a head of its own"])
@pytest.mark.parametrize("kind", CODES)
def test_decoded_codes_are_the_dequantised_values_to_the_bit(
    kind: str, is_tied: bool, tmp_path: Path
) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}
    source = write_tiny(tmp_path / "hf", tie_word_embeddings=is_tied, **wide)
    path = write_tiny_gguf(tmp_path / "m.gguf", source, quant=kind)
    whole, kept = GgufCheckpoint.open(path), GgufCheckpoint.open(path, keeps_codes=True)
    coded = coded_modules(kept.tensors)
    matrices = {name for name, info in whole.tensors.items() if len(info.shape) == 2}
    assert {f"{module}.weight" for module in coded} == matrices
    assert set(coded.values()) == {CODES[kind]}
    for name, info in whole.tensors.items():
        if name not in matrices:
            assert torch.equal(kept.read(name), whole.read(name))
            continue
        module = name.removesuffix(".weight")
        parts = CODES[kind].tensors(module, info.shape)
        found = {part: kept.read(part) for part in parts}
        for part, tensor in found.items():
            assert tuple(tensor.shape) == kept.tensors[part].shape == parts[part].shape
        minimum = found.get(f"{name}_min")
        actual = decode(found[name], found[f"{name}_scale"], minimum, torch.float32)
        assert torch.equal(actual, whole.read(name)), name


def test_what_is_kept_and_what_is_not_is_told(mixed: Path) -> None:
    checkpoint = GgufCheckpoint.open(mixed, keeps_codes=True)
    counts = "1 of q4_0, 3 of q4_1, 2 of q8_0; decoded: 1 of f16, 1 of q5_0"
    assert f"kept as they are stored: {counts}" in checkpoint.notes
    assert checkpoint.tensors[f"{LAYER}self_attn.v_proj.weight"] == TensorInfo("q5_0", (32, 64))


# --- a bundle -------------------------------------------------------------------------------------


def test_a_bundle_holds_the_codes_before_their_factors(kept: Path, mixed: Path) -> None:
    stored, checkpoint = map_weights(kept / "weights.safetensors"), GgufCheckpoint.open(mixed)
    query = f"{LAYER}self_attn.q_proj.weight"
    assert stored[query].dtype == torch.uint8
    assert stored[f"{query}_scale"].dtype == stored[f"{query}_min"].dtype == torch.float16
    assert stored[EMBEDDING].dtype == torch.int8
    assert stored[f"{LAYER}self_attn.v_proj.weight"].dtype == torch.float32
    wide = decode(stored[query], stored[f"{query}_scale"], stored[f"{query}_min"], torch.float32)
    assert torch.equal(wide, checkpoint.read(query))
    assert read(kept).quantized is None


@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_logits_are_those_of_the_widened_bundle(kept: Path, widened: Path, format: str) -> None:
    torch.testing.assert_close(logits(kept, format), logits(widened, "pt2"), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_native_logits_are_those_of_the_widened_bundle(
    mixed: Path, widened: Path, tmp_path: Path
) -> None:
    folder = build(recipe(mixed, tmp_path / "b", formats=("aoti",), entries=("decode",))).folder
    entry = llama_runtime.load(folder, format="aoti").entry("decode")
    states = entry.new_states()
    for pos, token in enumerate([1, 5, 77, 3, 30, 101, 9]):
        found = entry(states, tokens=[[token]], pos=pos)
    torch.testing.assert_close(found, logits(widened, "pt2"), rtol=0, atol=1e-5)


def test_its_laws_hold_over_the_decoded_weights(kept: Path) -> None:
    results = verify(kept, laws=("parity", "layout", "formats"))
    assert {result.law for result in results} == {"integrity", "parity", "layout", "formats"}
    assert all(result.passed for result in results)


def test_inspect_counts_the_ways(kept: Path) -> None:
    line = "3 x int4 in groups of 32 with f16 scales and minima; 2 x int8 in groups of 32 with"
    assert line in invoke("inspect", kept).stdout
    found = json.loads(invoke("inspect", kept, "--json").stdout)
    assert found["quantized"] is None
    assert sorted(found["kept_codes"].values()) == [1, 2, 3]


def test_it_can_be_built_again(kept: Path, mixed: Path) -> None:
    found = rerun.choices(open_bundle(kept))
    assert (found["quantize"], found["dtype"]) == ("stored", "f32")
    assert differences(Recipe(**{**found, "model": str(mixed)}), kept) == ()


def test_the_memory_of_the_file_is_that_of_its_bundle(kept: Path, mixed: Path) -> None:
    asked = ("--entry", "prefill", "--format", "pt2", "--json")
    choices = ("--quantize", "stored", "--dtype", "f32", "--seq-len", "32")
    texts = [
        invoke("memory", mixed, *choices, *asked).stdout,
        invoke("memory", kept, *asked).stdout,
    ]
    one, other = ({f["name"]: f["bytes"] for f in json.loads(t)["figures"]} for t in texts)
    assert one["weights"] == other["weights"]


def test_the_memory_of_a_bundle_without_weights_is_not_guessed(mixed: Path, tmp_path: Path) -> None:
    bundle = build(recipe(mixed, tmp_path / "b", weights="none")).folder
    assert rerun.choices(open_bundle(bundle))["quantize"] == "stored"
    result = invoke("memory", bundle, "--entry", "prefill")
    assert result.exit_code == 1
    assert "sizes are with the weights" in result.stderr


# --- refusals -------------------------------------------------------------------------------------


def refused(model: Path, tmp_path: Path, **choices: Any) -> str:
    with pytest.raises(ChoiceError) as got:
        build(recipe(model, tmp_path / "b", **choices))
    assert not (tmp_path / "b").exists()
    return f"{got.value} ({got.value.hint})"


def test_a_checkpoint_without_codes(folder: Path, tmp_path: Path) -> None:
    plain = write_tiny_gguf(tmp_path / "m.gguf", folder, quant="F16")
    for model in (folder, plain):
        assert "q4_1 and q4_k, got none (use --quantize int8" in refused(model, tmp_path)


def test_fp8_is_always_kept(tmp_path: Path) -> None:
    found = refused(write_tiny_fp8(tmp_path / "m"), tmp_path)
    assert "the codes of this checkpoint are always kept (leave --quantize out)" in found


@pytest.mark.parametrize("weights", ["link", "reference"])
def test_the_file_itself_is_no_part_of_a_bundle(mixed: Path, tmp_path: Path, weights: str) -> None:
    found = refused(mixed, tmp_path, weights=weights)
    assert "--quantize stored lays them out anew (use --weights copy)" in found


def test_a_group_size_is_not_chosen(mixed: Path, tmp_path: Path) -> None:
    found = refused(mixed, tmp_path, group_size="64")
    assert "--group-size 64 is for --quantize int8, int4 and uint4" in found


def test_a_preset_is_no_gguf_file() -> None:
    result = invoke("memory", "smollm2-135m", "--entry", "decode", "--quantize", "stored")
    assert result.exit_code == 2
    assert "got none" in result.stderr
