"""FP8 checkpoints: which schemes are read, and that file and scheme must agree."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llama_artifacts.errors import BuildError, CheckpointError
from llama_artifacts.safetensors import read_header
from llama_export.checkpoint.config import read_hf_config
from llama_export.checkpoint.hf import HfCheckpoint
from llama_export.checkpoint.layout import expected_tensors, linear_shapes, parameter_count
from llama_export.checkpoint.open import open_checkpoint
from llama_export.checkpoint.schemes import Fp8Scheme
from llama_export.pack import ALIGNMENT, plan_weights, write_weights
from llama_export.recipe import Recipe
from llama_runtime.weights import map_weights
from tests.tiny import tiny_config, write_tiny
from tests.tiny_fp8 import ACTIVATIONS, WEIGHTS, decoded, scheme, write_tiny_fp8

SUPPORTED = (
    "supported: gptq, awq, compressed-tensors pack-quantized, compressed-tensors float-quantized"
    " (FP8 dynamic)"
)
Q0, GATE1, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj", "lm_head"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def covered(**quantization: Any) -> set[str]:
    """The linear layers of the tiny network that a scheme names as FP8."""
    config = tiny_config(quantization_config=scheme(**quantization))
    found = read_hf_config(config, where="config.json")
    assert isinstance(found.scheme, Fp8Scheme)
    return {name for name in linear_shapes(found.config) if found.scheme.covers(name)}


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        HfCheckpoint.open(folder)
    return caught.value


# --- schemes --------------------------------------------------------------------------------------

METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
    "blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "quant_method 'fp8'"),
    "mxfp4": ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
    "integers": (scheme(format="int-quantized"), "compressed-tensors format 'int-quantized'"),
    "a group's format": (scheme(group={"format": "nvfp4-pack-quantized"}), ".format' = "),
    "weights of 4 bits": (scheme(weights={"num_bits": 4}), "weights.num_bits' = 4"),
    "integer weights": (scheme(weights={"type": "int"}), "weights.type' = int"),
    "no type": (scheme(weights={"type": None}), "weights.type' = "),
    "asymmetric": (scheme(weights={"symmetric": False}), "weights.symmetric' = False"),
    "dynamic weights": (scheme(weights={"dynamic": True}), "weights.dynamic' = True"),
    "groups": (scheme(weights={"strategy": "group"}), "weights.strategy' = group"),
    "group size": (scheme(weights={"group_size": 128}), "weights.group_size' = 128"),
    "block": (scheme(weights={"strategy": "block"}), "weights.strategy' = block"),
    "static activations": (
        scheme(activations={**ACTIVATIONS, "dynamic": False}),
        "FP8_DYNAMIC.input_activations.dynamic' = False",
    ),
    "activations by tensor": (
        scheme(activations={**ACTIVATIONS, "strategy": "tensor"}),
        "input_activations.strategy' = tensor",
    ),
    "local activations": (
        scheme(activations={**ACTIVATIONS, "dynamic": "local"}),
        "input_activations.dynamic' = local",
    ),
    "integer activations": (
        scheme(activations={**ACTIVATIONS, "type": "int"}),
        "input_activations.type' = int",
    ),
    "output activations": (scheme(group={"output_activations": ACTIVATIONS}), "output_activations"),
    "key-value cache": (scheme(kv_cache_scheme=WEIGHTS), "kv_cache_scheme"),
    "sparse": (scheme(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
    "rotated": (scheme(transform_config={"config_groups": {"u": {}}}), "transform_config"),
}


@pytest.mark.parametrize("case", METHODS)
def test_another_scheme_is_refused_by_name_before_any_weight_is_read(
    tmp_path: Path, case: str
) -> None:
    quantization, what = METHODS[case]
    folder = write_tiny(tmp_path / "m", has_tokenizer=False, quantization_config=quantization)
    (folder / "model.safetensors").write_bytes(b"")
    error = refusal(folder)
    assert what in error.message
    assert error.message.endswith(f"is not supported; {SUPPORTED}")
    assert (error.where or "").startswith(f"{folder / 'config.json'}#quantization_config.")


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no groups": (scheme(config_groups={}), "config_groups as an object of at least one group"),
    "groups a list": (scheme(config_groups=[]), "config_groups as an object"),
    "group null": (scheme(config_groups={"a": None}), "config_groups.a as an object"),
    "no weights": (scheme(group={"weights": None}), "weights as an object"),
    "no targets": (scheme(group={"targets": []}), "targets as a list of at least one name"),
    "target a number": (scheme(group={"targets": [3]}), "targets as a list of names"),
    "ignore a name": (scheme() | {"ignore": "lm_head"}, "ignore as a list of names"),
    "bad pattern": (scheme(["re:("]), "`re:(` is no regular expression"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_scheme_is_refused(case: str) -> None:
    quantization, message = MALFORMED[case]
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_hf_config(tiny_config(quantization_config=quantization), where="config.json")


def test_two_schemes_must_be_one() -> None:
    same = tiny_config(quantization_config=scheme(), compression_config=scheme())
    assert read_hf_config(same, where="c").scheme is not None
    other = tiny_config(quantization_config=scheme(), compression_config=scheme([]))
    with pytest.raises(CheckpointError, match="differ"):
        read_hf_config(other, where="c")


ALL = set(linear_shapes(read_hf_config(tiny_config(), where="c").config))
LAYER_1 = {name for name in ALL if ".layers.1." in name}


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"ignore": []}, ALL),
        ({}, ALL - {HEAD}),
        ({"ignore": [HEAD, r"re:.*layers\.1\..*", Q0]}, ALL - LAYER_1 - {HEAD, Q0}),
        ({"ignore": [r"re:layers\.1"]}, ALL),  # patterns match from a name's beginning
        ({"ignore": ["re:model"]}, {HEAD}),
        ({"ignore": ["Linear"]}, set()),
        ({"ignore": ["q_proj", "Embedding"]}, ALL),
        ({"ignore": [], "group": {"targets": [r"re:.*layers\.1\.", HEAD]}}, LAYER_1 | {HEAD}),
        ({"activations": None}, ALL - {HEAD}),
        ({"weights": {"strategy": "tensor"}}, ALL - {HEAD}),
        ({"sparsity_config": {"format": "dense"}, "transform_config": {}}, ALL - {HEAD}),
        ({"group": {"format": "float-quantized"}}, ALL - {HEAD}),
    ],
)
def test_targets_and_ignore_name_the_layers(
    quantization: dict[str, Any], expected: set[str]
) -> None:
    assert covered(**quantization) == expected


def test_several_groups_add_up() -> None:
    groups = {
        name: {"targets": [target], "weights": WEIGHTS}
        for name, target in (("a", Q0), ("b", GATE1))
    }
    assert covered(config_groups=groups) == {Q0, GATE1}


# --- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ["column", "row", "flat", "one", "scalar"])
def test_scales_of_every_shape_become_one_for_each_row(
    tmp_path: Path, scale_dtype: torch.dtype, shape: str
) -> None:
    shapes = {"column": (-1, 1), "row": (1, -1), "flat": (-1,), "one": (1,), "scalar": ()}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.endswith("weight_scale"):
                tensors[name] = tensors[name].reshape(shapes[shape])

    per_row = shape in ("column", "row", "flat")
    folder = write_tiny_fp8(tmp_path, scale_dtype=scale_dtype, per_row=per_row, change=change)
    checkpoint = HfCheckpoint.open(folder)
    stored, expected = load_file(folder / "model.safetensors"), decoded(folder)
    assert checkpoint.dtype == "f32"
    assert any("14 linear layers are FP8" in note for note in checkpoint.notes)
    for name, value in expected.items():
        codes = checkpoint.read(name)
        assert codes.dtype == stored[name].dtype
        scale_name = f"{name}_scale"
        if scale_name not in stored:
            assert torch.equal(codes, value)
            continue
        scale = checkpoint.read(scale_name)
        assert scale.dtype == scale_dtype
        assert scale.shape == (len(codes), 1) == checkpoint.tensors[scale_name].shape
        assert torch.equal(codes.view(torch.uint8), stored[name].view(torch.uint8))
        assert torch.equal(codes.float() * scale.float(), value)


def test_scales_are_no_parameters_and_follow_their_weights(tmp_path: Path) -> None:
    checkpoint = HfCheckpoint.open(write_tiny_fp8(tmp_path))
    names = list(checkpoint.tensors)
    assert names[names.index(f"{Q0}.weight") + 1] == f"{Q0}.weight_scale"
    config = read_hf_config(tiny_config(), where="c").config
    assert parameter_count(checkpoint.config) == parameter_count(config)
    assert [name for name in names if not name.endswith("_scale")] == list(expected_tensors(config))


def test_headers_are_enough_and_layers_can_be_left_out(tmp_path: Path) -> None:
    folder = write_tiny_fp8(tmp_path)
    os.truncate(folder / "model.safetensors", read_header(folder / "model.safetensors").data_start)
    checkpoint = HfCheckpoint.open(folder, headers_only=True, num_layers=1)
    assert sum(name.endswith("_scale") for name in checkpoint.tensors) == 7


def test_a_head_may_be_fp8(tmp_path: Path) -> None:
    folder = write_tiny_fp8(tmp_path, is_fp8=lambda _: True, quantization=scheme([]))
    assert HfCheckpoint.open(folder).tensors["lm_head.weight"].dtype == "f8e4m3"


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: value})


def as_dtype(name: str, dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name].float().to(dtype)})


SCALE = f"{Q0}.weight_scale"
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a target stored as bf16": (
        {"change": as_dtype(f"{Q0}.weight", torch.bfloat16)},
        f"{Q0}.weight",
        "stored as bf16, but quantization_config targets it: expected f8e4m3",
    ),
    "an ignored layer stored as FP8": (
        {"quantization": scheme([HEAD, GATE1])},
        f"{GATE1}.weight",
        "stored as f8e4m3, but quantization_config ignores it: expected no FP8",
    ),
    "an ignored layer with a scale": (
        {"change": put(f"{HEAD}.weight_scale", torch.ones(128, 1))},
        f"{HEAD}.weight_scale",
        "unexpected: there is no FP8 weight",
    ),
    "no scale": ({"change": drop(SCALE)}, SCALE, "missing, but its weight is FP8"),
    "a scale of columns": (
        {"change": put(f"{GATE1}.weight_scale", torch.ones(64))},
        f"{GATE1}.weight_scale",
        "shape [64] is neither one scale nor one for each row of a weight of shape [128, 64]",
    ),
    "an empty scale": ({"change": put(SCALE, torch.ones(0))}, SCALE, "shape [0] is neither"),
    "a scale in f16": (
        {"change": as_dtype(SCALE, torch.float16)},
        SCALE,
        "expected dtype bf16 or f32, got f16",
    ),
    "a scale in FP8": (
        {"change": as_dtype(SCALE, torch.float8_e4m3fn)},
        SCALE,
        "expected dtype bf16 or f32, got f8e4m3",
    ),
    "a static scale of activations": (
        {"change": put(f"{Q0}.input_scale", torch.ones(1))},
        f"{Q0}.input_scale",
        "a static scale of activations is not supported",
    ),
    "E5M2": (
        {"change": as_dtype(f"{Q0}.weight", torch.float8_e5m2)},
        f"{Q0}.weight",
        "dtype f8e5m2 (E5M2) is not supported",
    ),
    "an embedding in FP8": (
        {"change": as_dtype(EMBEDDING, torch.float8_e4m3fn)},
        EMBEDDING,
        "only linear layers can be FP8",
    ),
    "a norm in FP8": (
        {"change": as_dtype(NORM, torch.float8_e4m3fn)},
        NORM,
        "only linear layers can be FP8",
    ),
    "a scale of nothing": (
        {"change": put("model.layers.0.mlp.weight_scale", torch.ones(1))},
        "model.layers.0.mlp.weight_scale",
        "unexpected",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_tensor_that_is_not_what_the_scheme_says_is_refused_by_name(
    tmp_path: Path, case: str
) -> None:
    options, name, message = FAULTS[case]
    error = refusal(write_tiny_fp8(tmp_path, **options))
    assert error.where == f"{tmp_path}#{name}"
    assert message in error.message


def test_fp8_without_a_scheme_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_fp8(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "stored as f8e4m3, but config.json has no quantization_config" in refusal(folder).message


def test_a_misshapen_fp8_weight_is_told_as_such(tmp_path: Path) -> None:
    codes = torch.zeros(64, 60).to(torch.float8_e4m3fn)
    folder = write_tiny_fp8(tmp_path, change=put(f"{Q0}.weight", codes))
    assert "expected shape [64, 64], got [64, 60]" in refusal(folder).message


# --- the bundle's file ----------------------------------------------------------------------------


def pack(folder: Path, output: Path, *, compute: str, keeps_stored: bool) -> Path:
    checkpoint = open_checkpoint(str(folder))
    plan = plan_weights(checkpoint, compute=compute, keeps_stored=keeps_stored)
    write_weights(output, plan, checkpoint, advance=lambda count: None)
    return output


@pytest.mark.parametrize(("compute", "keeps_stored"), [("f32", True), ("bf16", False)])
def test_codes_and_scales_are_the_checkpoints_bit_for_bit(
    tmp_path: Path, compute: str, keeps_stored: bool
) -> None:
    folder = write_tiny_fp8(tmp_path / "m")
    path = pack(folder, tmp_path / "w", compute=compute, keeps_stored=keeps_stored)
    packed, stored = map_weights(path), load_file(folder / "model.safetensors")
    assert packed.keys() == {*stored, "model.rotary_emb.inv_freq"}
    for name, tensor in stored.items():
        if tensor.dtype == torch.float32:
            assert torch.equal(packed[name], tensor.to(packed[name].dtype))
            assert packed[name].dtype == {"f32": torch.float32, "bf16": torch.bfloat16}[compute]
            continue
        assert (packed[name].dtype, packed[name].shape) == (tensor.dtype, tensor.shape)
        assert packed[name].view(torch.uint8).equal(tensor.view(torch.uint8))


def test_what_is_read_together_lies_together_with_its_scales_behind(tmp_path: Path) -> None:
    path = pack(write_tiny_fp8(tmp_path / "m"), tmp_path / "w", compute="f32", keeps_stored=True)
    names = [name for name in map_weights(path) if ".layers.1." in name]
    short = [name.removeprefix("model.layers.1.") for name in names]
    assert short == [
        "input_layernorm.weight",
        *(f"self_attn.{part}_proj.weight" for part in "qkv"),
        *(f"self_attn.{part}_proj.weight_scale" for part in "qkv"),
        "self_attn.o_proj.weight",
        "self_attn.o_proj.weight_scale",
        "post_attention_layernorm.weight",
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up")),
        *(f"mlp.{part}_proj.weight_scale" for part in ("gate", "up")),
        "mlp.down_proj.weight",
        "mlp.down_proj.weight_scale",
    ]


@pytest.mark.parametrize(
    "config",
    [{}, {"intermediate_size": 136}, {"intermediate_size": 7, "vocab_size": 101, "mlp_bias": True}],
)
def test_every_tensor_of_whole_lines_starts_on_a_line(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    path = pack(
        write_tiny_fp8(tmp_path / "m", **config), tmp_path / "w", compute="f32", keeps_stored=True
    )
    for tensor in read_header(path).tensors.values():
        if (tensor.end - tensor.start) % ALIGNMENT == 0:
            assert tensor.start % ALIGNMENT == 0
    for tensor in map_weights(path).values():
        assert tensor.data_ptr() % tensor.element_size() == 0


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_among_the_codes_is_refused_by_name(tmp_path: Path, code: int) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q0}.weight"].view(torch.uint8)[3, 5] = code

    folder = write_tiny_fp8(tmp_path / "m", change=change)
    with pytest.raises(BuildError, match=rf"{Q0}\.weight` holds NaN"):
        pack(folder, tmp_path / "w", compute="f32", keeps_stored=True)


def test_the_recipe_is_exact_unless_told() -> None:
    assert Recipe("m").numerics == "exact"
