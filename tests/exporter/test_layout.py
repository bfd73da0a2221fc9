"""The tensors that a config asks for, and those that a checkpoint has."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llama_artifacts.errors import CheckpointError
from llama_export.checkpoint.config import config_from_hf
from llama_export.checkpoint.layout import (
    check_layout,
    expected_tensors,
    first_layers,
    parameter_count,
)
from llama_export.checkpoint.source import TensorInfo
from tests.exporter.configs import WHERE, read
from tests.tiny import ABSENT, tiny_config, tiny_tensors


def infos(**overrides: Any) -> dict[str, TensorInfo]:
    tensors = tiny_tensors(tiny_config(**overrides))
    return {name: TensorInfo("f32", tuple(tensor.shape)) for name, tensor in tensors.items()}


def layout_refusal(tensors: dict[str, TensorInfo], **overrides: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        check_layout(read(**overrides).config, tensors, where="model")
    assert str(caught.value).startswith("model")
    return caught.value


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
        {"num_key_value_heads": ABSENT, "num_hidden_layers": 12},
    ],
    ids=str,
)
def test_layout_of_every_switch(overrides: dict[str, Any]) -> None:
    config, tensors = read(**overrides).config, infos(**overrides)
    check_layout(config, tensors, where="model")
    assert set(expected_tensors(config)) == set(tensors)
    assert parameter_count(config) == sum(math.prod(info.shape) for info in tensors.values())


def test_biases_are_seven_a_layer() -> None:
    names = expected_tensors(read(attention_bias=True, mlp_bias=True).config)
    assert sum(name.endswith(".bias") for name in names) == 2 * 7


def test_missing_tensor_is_named() -> None:
    tensors = infos()
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    error = layout_refusal(tensors)
    assert error.message == "missing tensor: `model.layers.1.self_attn.v_proj.weight`"


def test_unused_tensors_are_named_and_counted() -> None:
    tensors = infos(attention_bias=True)
    error = layout_refusal(tensors)
    assert error.message.startswith("unused tensors: `model.layers.0.self_attn.q_proj.bias`, ")
    assert error.message.endswith(" and 5 more")


def test_wrong_shape_names_both() -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    error = layout_refusal(infos(), num_key_value_heads=ABSENT)
    assert error.where == f"model#{name}"
    assert error.message == "expected shape [64, 64], got [32, 64]"


@pytest.mark.parametrize(("said", "stored"), [(3, 2), (1, 2), (10**9, 2)])
def test_layer_counts_that_differ_are_refused(said: int, stored: int) -> None:
    error = layout_refusal(infos(num_hidden_layers=stored), num_hidden_layers=said)
    assert error.message == f"config says {said} layers, checkpoint has {stored}"


def test_untied_head_must_be_stored() -> None:
    error = layout_refusal(infos(tie_word_embeddings=True))
    assert error.message == "lm_head.weight missing and tie_word_embeddings is false"


def test_odd_layer_numbers_do_not_hide() -> None:
    tensors = infos() | {"model.layers.01.mlp.up_proj.weight": TensorInfo("f32", (128, 64))}
    assert "unused tensor: `model.layers.01." in layout_refusal(tensors).message


def test_first_layers_keeps_what_is_outside_the_layers() -> None:
    kept = first_layers(infos(), 1)
    check_layout(config_from_hf(tiny_config(), where=WHERE, num_layers=1), kept, where="model")
