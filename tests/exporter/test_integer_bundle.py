"""Bundles of quantised weights in every format, against transformers with the decoded weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig as ReferenceConfig
from transformers import LlamaForCausalLM

import llama_runtime
from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import ChoiceError, CompatibilityError
from llama_artifacts.manifest import Quantized
from llama_artifacts.manifest_file import read
from llama_export import rerun
from llama_export.build import build
from llama_export.rebuild import differences
from llama_export.recipe import Recipe
from llama_export.verify import verify
from llama_runtime.weights import map_weights
from tests.cli.running import invoke
from tests.tiny import write_tiny
from tests.tiny_fp8 import write_tiny_fp8
from tests.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.slow  # it builds bundles of its own

NUM_TOKENS, MAX_SEQ, BATCH = 40, 64, 2
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def recipe(checkpoint: Path, output: Path, **choices: Any) -> Recipe:
    given: dict[str, Any] = {"quantize": "int4", "entries": ("decode",), "formats": ("pt2",)}
    sizes: dict[str, Any] = {"max_seq": MAX_SEQ, "batch": BATCH}
    return Recipe(str(checkpoint), output, **{**given, **sizes, **choices})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose output head is its embedding."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tied"
    return write_tiny(folder, tie_word_embeddings=True, num_hidden_layers=1)


@pytest.fixture(scope="module")
def four_bits(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("int4") / "b"
    entries, formats = ("prefill", "decode", "decode_paged"), ("pt2", "onnx")
    choices: dict[str, Any] = {"entries": entries, "formats": formats, "variants": ()}
    return build(recipe(checkpoint, output, **choices)).folder


@pytest.fixture(scope="module")
def eight_bits(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("int8") / "b"
    choices: dict[str, Any] = {"quantize": "int8", "group_size": "row"}
    return build(recipe(checkpoint, output, formats=("pt2", "onnx"), **choices)).folder


@pytest.fixture(scope="module")
def native(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("native") / "b"
    return build(recipe(checkpoint, output, formats=("aoti",), dtype="bf16")).folder


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """The stored weights in float32, by the words of the format's page."""
    stored = map_weights(folder / "weights.safetensors")
    found = {}
    for name, tensor in stored.items():
        if name.endswith(("_scale", "inv_freq")):
            continue
        wide = tensor.float()
        if tensor.dtype == torch.uint8:
            wide = torch.empty(len(tensor), 2 * tensor.shape[1])
            for place in range(wide.shape[1]):
                byte = tensor[:, place // 32 * 16 + place % 16].int()
                wide[:, place] = (byte % 16 if place % 32 < 16 else byte // 16) - 8
        if f"{name}_scale" in stored:
            scale = stored[f"{name}_scale"].float()
            for place in range(wide.shape[1]):
                wide[:, place] *= scale[:, place * scale.shape[1] // wide.shape[1]]
        found[name] = wide
    return found


def expected(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of transformers over the decoded weights."""
    values = json.loads((folder / "config.json").read_text())
    model = LlamaForCausalLM(ReferenceConfig(**values, attn_implementation="eager")).eval()
    weights = decoded(folder)
    assert not model.load_state_dict({**weights, HEAD: weights[EMBEDDING]}).unexpected_keys
    with torch.no_grad():
        return model(tokens.long()).logits


def draw_tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(128, (BATCH, NUM_TOKENS), generator=generator, dtype=torch.int32)


def steps(folder: Path, format: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] of `decode`, token by token."""
    entry = llama_runtime.load(folder, format=format).entry("decode")
    states = entry.new_states()
    parts = enumerate(tokens.split(1, dim=1))
    found = [entry(states, tokens=token.contiguous(), pos=pos) for pos, token in parts]
    return torch.stack(found, 1)


@pytest.mark.parametrize("format", ["pt2", "onnx"])
@pytest.mark.parametrize("kind", ["four_bits", "eight_bits"])
def test_steps_are_those_of_the_decoded_weights(
    request: pytest.FixtureRequest, kind: str, format: str
) -> None:
    folder, tokens = request.getfixturevalue(kind), draw_tokens()
    actual = steps(folder, format, tokens)
    torch.testing.assert_close(actual, expected(folder, tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_prompts_and_pages_are_those_of_the_decoded_weights(four_bits: Path, format: Any) -> None:
    tokens, loaded = draw_tokens(), llama_runtime.load(four_bits, format=format)
    wanted = expected(four_bits, tokens)
    prefill = loaded.entry("prefill")
    actual = prefill(prefill.new_states(), tokens=tokens, pos=0)
    torch.testing.assert_close(actual, wanted[:, -1], rtol=0, atol=1e-5)
    paged = loaded.entry("decode_paged")
    states = paged.new_states(PoolPages=5)
    table = torch.tensor([[1, 2], [4, 3]], dtype=torch.int32)
    for pos in range(20):
        positions = torch.full((BATCH,), pos, dtype=torch.int32)
        step = tokens[:, pos : pos + 1].contiguous()
        actual = paged(states, tokens=step, positions=positions, table=table)
        torch.testing.assert_close(actual, wanted[:, pos], rtol=0, atol=1e-5)


def test_native_steps_are_those_of_the_decoded_weights(native: Path) -> None:
    tokens = draw_tokens()
    wanted, actual = expected(native, tokens), steps(native, "aoti", tokens)
    error = (actual.float() - wanted).norm() / wanted.norm()
    assert error < 2**-6  # activations are bf16


def test_verify_knows_the_weights(four_bits: Path) -> None:
    results = verify(four_bits, formats=("pt2",), laws=("parity", "layout", "gqa"))
    assert {result.law for result in results} == {"integrity", "parity", "layout", "gqa"}
    assert all(result.passed for result in results)


def test_the_formats_agree(four_bits: Path) -> None:
    results = verify(four_bits, laws=("formats",))
    assert len(results) > 1
    assert all(result.passed for result in results)


def test_the_manifest_and_inspect_say_what_was_done(four_bits: Path, eight_bits: Path) -> None:
    assert read(four_bits).quantized == Quantized("int4", 32)
    assert read(eight_bits).quantized == Quantized("int8")
    assert {program.numerics for program in read(four_bits).programs} == {None}
    shown = invoke("inspect", four_bits).stdout
    assert "int4 in groups of 32; embedding and head int8" in shown
    assert "int8 row by row" in invoke("inspect", eight_bits).stdout
    found = json.loads(invoke("inspect", four_bits, "--json").stdout)
    assert found["quantized"] == {"kind": "int4", "group_size": 32}


def test_four_bits_beside_minima(checkpoint: Path, tmp_path: Path) -> None:
    folder = build(recipe(checkpoint, tmp_path / "b", quantize="uint4")).folder
    assert read(folder).quantized == Quantized("uint4", 32)
    results = verify(folder, laws=("parity",))
    assert results
    assert all(result.passed for result in results)
    assert "uint4 in groups of 32; embedding and head int8" in invoke("inspect", folder).stdout


def test_a_bundle_can_be_built_again(checkpoint: Path, eight_bits: Path, tmp_path: Path) -> None:
    found = rerun.choices(open_bundle(eight_bits))
    assert (found["quantize"], found["group_size"], found["dtype"]) == ("int8", "row", "f32")
    again = {**found, "model": str(checkpoint)}
    assert differences(Recipe(**again), eight_bits) == ()


def test_its_memory_is_that_of_the_codes(four_bits: Path) -> None:
    found = json.loads(invoke("memory", four_bits, "--entry", "decode", "--json").stdout)
    weights = next(figure for figure in found["figures"] if figure["name"] == "weights")
    stored = map_weights(four_bits / "weights.safetensors")
    assert weights["bytes"] == sum(tensor.nbytes for tensor in stored.values())


def test_the_memory_of_a_model_is_that_of_its_bundle(checkpoint: Path, four_bits: Path) -> None:
    asked = ("--entry", "decode", "--format", "pt2", "--json")
    texts = [
        invoke("memory", checkpoint, "--quantize", "int4", *asked).stdout,
        invoke("memory", four_bits, *asked).stdout,
    ]
    one, other = ({f["name"]: f["bytes"] for f in json.loads(t)["figures"]} for t in texts)
    assert one["weights"] == other["weights"]
    assert invoke("memory", four_bits, "--quantize", "int8").exit_code == 2


def test_a_gguf_file_is_rounded_a_second_time(checkpoint: Path, tmp_path: Path) -> None:
    result = invoke(
        "build",
        write_tiny_gguf(tmp_path / "m.gguf", checkpoint, quant="Q8_0"),
        *("-o", tmp_path / "b", "--entry", "forward", "--format", "pt2", "--quantize", "int8"),
    )
    assert result.exit_code == 0, result.stderr
    assert "the checkpoint's q8_0 weights are rounded a second time, to int8" in result.stderr
    assert read(tmp_path / "b").quantized == Quantized("int8", 64)


def test_such_weights_cannot_be_trained(checkpoint: Path, tmp_path: Path) -> None:
    folder = build(recipe(checkpoint, tmp_path / "b", entries=("loss_packed",))).folder
    with pytest.raises(CompatibilityError, match="of eight bits and less cannot be trained"):
        llama_runtime.load(folder).trainable("loss_packed")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"weights": "link"}, "--weights link uses weights as they are stored"),
        ({"weights": "reference"}, "--weights reference uses weights as they are stored"),
        ({"group_size": "128"}, "groups of 128 divide, got 64 of `model.embed_tokens.weight`"),
        ({"quantize": None, "group_size": "64"}, "--group-size 64 is for --quantize"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    checkpoint: Path, tmp_path: Path, choices: dict[str, Any], message: str
) -> None:
    with pytest.raises(ChoiceError, match=message):
        build(recipe(checkpoint, tmp_path / "b", **choices))
    assert not (tmp_path / "b").exists()


def test_fp8_weights_are_not_rounded_again(tmp_path: Path) -> None:
    folder = write_tiny_fp8(tmp_path / "m")
    result = invoke("build", folder, "-o", tmp_path / "b", "--quantize", "int8")
    assert result.exit_code == 2
    assert (
        "--quantize int8 is for unquantised weights, and the checkpoint's are FP8" in result.stderr
    )
