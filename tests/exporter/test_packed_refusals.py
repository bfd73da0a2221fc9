"""GPTQ, AWQ and packed compressed-tensors checkpoints that are refused, by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_artifacts.errors import BuildError, CheckpointError, ChoiceError
from llama_export.blueprint import draw
from llama_export.checkpoint.config import read_hf_config
from llama_export.checkpoint.hf import HfCheckpoint
from llama_export.recipe import Recipe
from tests.tiny import tiny_config
from tests.tiny_packed import HEAD, O0, Q0, Change, packed, put, scheme, write_tiny_packed

GPTQ = "quantization_config."


def weights_of(**changes: Any) -> dict[str, Any]:
    """A scheme of compressed-tensors whose weights are described otherwise."""
    found = scheme("pack-quantized")
    found["config_groups"]["group_0"]["weights"] |= changes
    return found


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bits of gptq": (scheme("gptq", bits=3), f"'{GPTQ}bits' = 3 is not supported"),
    "bits of awq": (scheme("awq", bits=8), f"'{GPTQ}bits' = 8 is not supported"),
    "marlin": (scheme("gptq", checkpoint_format="marlin"), "gptq format 'marlin'"),
    "two formats": (scheme("gptq", format="gptq_v2"), "gptq format"),
    "marlin by flag": (scheme("gptq", is_marlin_format=True), "is_marlin_format' = True"),
    "a rule for a layer": (scheme("gptq", dynamic={"-:.*up.*": {}}), "dynamic' = "),
    "an adapter": (scheme("gptq", adapter={"name": "lora"}), "adapter' = "),
    "rotated": (scheme("gptq", rotation="hadamard"), "rotation' = hadamard"),
    "packed otherwise": (scheme("gptq", pack_dtype="int16"), "pack_dtype' = int16"),
    "gemv": (scheme("awq", version="gemv"), "awq version 'gemv'"),
    "marlin of awq": (scheme("awq", version="marlin"), "awq version 'marlin'"),
    "llm-awq": (scheme("awq", backend="llm-awq"), "awq backend 'llm-awq'"),
    "activations": (
        scheme(
            "pack-quantized",
            config_groups={
                "a": {
                    **scheme("pack-quantized")["config_groups"]["group_0"],
                    "input_activations": {"num_bits": 8},
                }
            },
        ),
        "input_activations' = ",
    ),
    "floats": (weights_of(type="float"), "weights.type' = float"),
    "blocks": (weights_of(strategy="block"), "weights.strategy' = block"),
    "tensors": (weights_of(strategy="tensor", group_size=None), "weights.strategy' = tensor"),
    "no group size": (weights_of(group_size=None), "weights.group_size' = "),
    "two kinds": (
        scheme(
            "pack-quantized",
            config_groups={
                "a": scheme("pack-quantized")["config_groups"]["group_0"],
                "b": scheme("pack-quantized", bits=8)["config_groups"]["group_0"],
            },
        ),
        "groups of weights that differ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_the_numbers_is_refused_by_name(case: str) -> None:
    quantization, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        read_hf_config(tiny_config(quantization_config=quantization), where="c")
    assert "is not supported; supported: gptq, awq, " in caught.value.message


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (scheme("gptq", group_size=None), "quantization_config.group_size as a positive integer"),
        (scheme("gptq", group_size=0), "quantization_config.group_size as a positive integer"),
        (scheme("gptq", sym="yes"), "quantization_config.sym as true or false"),
        (scheme("gptq", modules_in_block_to_quantize="q"), "a list of names, or of lists of names"),
        (scheme("awq", modules_to_not_convert="q"), "modules_to_not_convert as a list of names"),
    ],
)
def test_a_malformed_scheme_is_refused(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_hf_config(tiny_config(quantization_config=quantization), where="c")


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no codes": (
        {"change": drop(f"{Q0}.qweight")},
        f"{Q0}.qweight",
        "missing, but quantization_config says gptq, 4 bits, groups of 32",
    ),
    "no scales": ({"change": drop(f"{Q0}.scales")}, f"{Q0}.scales", "missing"),
    "no zeros": ({"change": drop(f"{Q0}.qzeros")}, f"{Q0}.qzeros", "missing"),
    "no groups": (
        {"change": drop(f"{Q0}.g_idx"), "is_ordered": True},
        f"{Q0}.g_idx",
        "missing, but quantization_config says gptq, 4 bits, groups of 32, in activation order",
    ),
    "codes of another shape": (
        {"change": put(f"{Q0}.qweight", words(64, 8))},
        f"{Q0}.qweight",
        "expected shape [8, 64], got [64, 8]",
    ),
    "zeros of another shape": (
        {"change": put(f"{Q0}.qzeros", words(2, 9))},
        f"{Q0}.qzeros",
        "expected shape [2, 8], got [2, 9]",
    ),
    "codes of another dtype": (
        {"change": put(f"{Q0}.qweight", words(8, 64).short())},
        f"{Q0}.qweight",
        "expected dtype i32, got i16",
    ),
    "scales of another dtype": (
        {"scale_dtype": torch.float32},
        f"{Q0}.scales",
        "expected dtype f16 or bf16, got f32",
    ),
    "a layer stored plain": (
        {"is_packed": lambda module: module not in (Q0, HEAD)},
        f"{Q0}.weight",
        "stored as f16, but quantization_config targets it",
    ),
    "a layer stored packed": (
        {"is_packed": lambda _: True},
        f"{HEAD}.qweight",
        "stored packed, but quantization_config leaves it out",
    ),
    "a layer stored twice": (
        {"change": put(f"{Q0}.weight", torch.zeros(64, 64).half())},
        f"{Q0}.weight",
        "stored a second time",
    ),
    "groups that do not divide": (
        {"quantization": {"group_size": 48}},
        f"{Q0}.qweight",
        "expected a width that groups of 48 divide, got 64",
    ),
    "groups too small": (
        {"group_size": 16},
        f"{Q0}.qweight",
        "expected groups that blocks of 32 codes divide, got groups of 16",
    ),
    "rows that fill no int32": (
        {"intermediate_size": 132},
        "model.layers.0.mlp.gate_proj.qweight",
        "expected rows that fill int32 of 8 codes, got 132",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_a_tensor_that_is_not_what_the_scheme_says_is_refused_by_name(
    tmp_path: Path, case: str
) -> None:
    options, name, message = FAULTS[case]
    with pytest.raises(CheckpointError) as caught:
        HfCheckpoint.open(write_tiny_packed(tmp_path, **options))
    assert caught.value.where == f"{tmp_path}#{name}"
    assert message in caught.value.message


def test_a_part_of_nothing_is_unused(tmp_path: Path) -> None:
    folder = write_tiny_packed(tmp_path, change=put("model.layers.0.mlp.qzeros", words(1, 1)))
    with pytest.raises(CheckpointError, match=r"unused tensor: `model.layers.0.mlp.qzeros`"):
        HfCheckpoint.open(folder)


def indices(*values: int) -> Change:
    """Groups of 64 columns, 0 but for the first ones."""
    groups = torch.tensor((*values, *[0] * (64 - len(values))), dtype=torch.int32)
    return put(f"{O0}.g_idx", groups)


VALUES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "a group too high": (
        {"change": indices(2), "is_ordered": True},
        "weight",
        f"{O0}.g_idx",
        "expected groups from 0 to 1, got 2",
    ),
    "a group below 0": (
        {"change": indices(-1), "is_ordered": True},
        "weight_order",
        f"{O0}.g_idx",
        "expected groups from 0 to 1, got -1",
    ),
    "groups that are not of one size": (
        {"change": indices(1, 1), "is_ordered": True},
        "weight",
        f"{O0}.g_idx",
        "expected 32 columns in each group, got 62 in group 0",
    ),
    "an order that nobody told of": (
        {"change": indices(*[1, 0] * 32)},
        "weight",
        f"{O0}.g_idx",
        "expected groups of 32 adjacent columns, got an activation order",
    ),
    "zeros that are not symmetric": (
        {"change": put(f"{O0}.qzeros", packed(np.full((2, 64), 3), 4)), "is_symmetric": True},
        "weight_scale",
        f"{O0}.qzeros",
        "expected symmetric codes, whose zeros are all 8, got 4",
    ),
    "another shape": (
        {"form": "pack-quantized", "change": put(f"{O0}.weight_shape", torch.tensor([64, 60]))},
        "weight",
        f"{O0}.weight_shape",
        "expected [64, 64], got [64, 60]",
    ),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_that_are_not_what_the_scheme_says_are_refused_by_name(
    tmp_path: Path, case: str
) -> None:
    options, kind, name, message = VALUES[case]
    checkpoint = HfCheckpoint.open(write_tiny_packed(tmp_path, **options))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(f"{O0}.{kind}")
    assert caught.value.where == f"{tmp_path}#{name}"
    assert message in caught.value.message


def test_choices_that_do_not_fit_are_refused_with_a_hint(tmp_path: Path) -> None:
    folder = write_tiny_packed(tmp_path / "m", is_ordered=True)
    recipe = Recipe(str(folder), tmp_path / "b", ("decode",), ("pt2",), max_seq=16)
    with pytest.raises(ChoiceError, match="the checkpoint's are integers already"):
        draw(replace(recipe, quantize="int4"))
    with pytest.raises(ChoiceError, match="--numerics fast is for FP8 weights"):
        draw(replace(recipe, numerics="fast"))
    with pytest.raises(ChoiceError, match=r"stored packed into int32 and has to be converted"):
        draw(replace(recipe, weights="link"))
    with pytest.raises(BuildError, match=r"got those of `.*o_proj` in activation order"):
        draw(replace(recipe, shards=(2,)))
