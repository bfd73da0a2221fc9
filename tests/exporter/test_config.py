"""Configs of Hugging Face: sizes, types, defaults, and keys that change the maths."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from llama_artifacts.errors import CheckpointError
from llama_export.checkpoint.config import RopeConfig, config_from_hf, read_hf_config, token_ids
from tests.exporter.configs import WHERE, read, refusal
from tests.tiny import ABSENT, tiny_config


def test_sizes_are_taken_as_written() -> None:
    config = read().config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (128, 64, 128)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.max_position, config.rms_norm_eps) == (16, 256, 1e-5)
    assert config.rope == RopeConfig(10000.0)
    assert read().notes == ()


# --- keys that change the maths -------------------------------------------------------------------

MATHS: dict[str, tuple[object, object]] = {
    "attention_multiplier": (0.015625, 1.0),
    "embedding_multiplier": (12.0, 1.0),
    "residual_multiplier": (0.22, 1),
    "logits_scaling": (8.0, 1.0),
    "logit_scale": (0.0625, None),
    "qk_norm": (True, False),
    "use_qk_norm": (True, False),
    "partial_rotary_factor": (0.5, 1.0),
    "attn_logit_softcapping": (50.0, None),
    "final_logit_softcapping": (30.0, None),
    "layer_types": (["full_attention", "sliding_attention"], ["full_attention"] * 2),
    "no_rope_layers": ([1, 0], [1, 1]),
    "sliding_window": (8, 4096),
    "attention_chunk_size": (8192, None),
    "rope_interleaved": (True, False),
    "is_causal": (False, True),
    "num_local_experts": (8, 0),
    "clip_qkv": (8.0, None),
    "query_pre_attn_scalar": (256, None),
    "pruned_heads": ({"0": [1]}, {}),
    "text_config": ({"vocab_size": 1}, None),
}


@pytest.mark.parametrize("key", MATHS)
def test_key_that_changes_the_maths_is_refused_by_name(key: str) -> None:
    error = refusal(**{key: MATHS[key][0]})
    assert error.message.startswith(f"config key '{key}' = ")
    assert error.message.endswith("changes the maths and is not supported")


@pytest.mark.parametrize("key", MATHS)
def test_neutral_value_of_such_a_key_is_accepted(key: str) -> None:
    hf = read(**{key: MATHS[key][1]})
    assert hf.config == read().config
    assert hf.notes == ()


def test_value_is_shown_in_the_refusal() -> None:
    message = refusal(attention_multiplier=0.015625).message
    expected = "config key 'attention_multiplier' = 0.015625 changes the maths and is not supported"
    assert message == expected


def test_true_is_not_the_neutral_one() -> None:
    assert "embedding_multiplier" in refusal(embedding_multiplier=True).message


def test_granite_is_refused_by_its_multiplier() -> None:
    error = refusal(
        architectures=["GraniteForCausalLM"], model_type="granite", attention_multiplier=0.015625
    )
    assert "'attention_multiplier' = 0.015625" in error.message


@pytest.mark.parametrize(
    "overrides",
    [
        {"sliding_window": None},
        {"sliding_window": 256},
        {"sliding_window": 8, "use_sliding_window": False},
        {"pretraining_tp": 2},
        {"attention_dropout": 0.1, "initializer_range": 0.02, "use_cache": True},
        {"_name_or_path": "x", "transformers_version": "4.45.0"},
        {"original_max_position_embeddings": 8192, "bos_token_id": 1},
        {"hidden_act": "swish"},
        {"model_type": "mistral"},
        {"architectures": ABSENT},
        {"model_type": ABSENT},
    ],
    ids=str,
)
def test_harmless_keys_change_nothing(overrides: dict[str, Any]) -> None:
    hf = read(**overrides)
    assert hf.config == read().config
    assert hf.notes == ()


def test_unknown_key_is_ignored_with_a_note() -> None:
    assert read(frobnication=3).notes == ("ignored unknown config key `frobnication`",)


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["Qwen2ForCausalLM"]}, "'Qwen2ForCausalLM' is not"),
    "no head": ({"architectures": ["LlamaModel"]}, "architecture 'LlamaModel'"),
    "architectures empty": ({"architectures": []}, "a list of names"),
    "architectures a string": ({"architectures": "LlamaForCausalLM"}, "a list of names"),
    "model_type": ({"model_type": "gemma"}, "model_type 'gemma' is not supported"),
    "mistral without architecture": (
        {"model_type": "mistral", "architectures": ABSENT},
        "model_type 'mistral'",
    ),
    "neither": ({"model_type": ABSENT, "architectures": ABSENT}, "without architectures"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "activation a list": ({"hidden_act": ["silu"]}, "hidden_act as a string"),
    "hqq": ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "quant_method 'hqq'"),
    "aqlm": ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method 'aqlm' is not"),
    "bitsandbytes": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
    "fp8 in blocks": ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8'"),
    "mxfp4": ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method 'mxfp4'"),
    "compressed-tensors without a format": (
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        "compressed-tensors format 'unnamed' is not supported",
    ),
    "unnamed method": ({"quantization_config": {"bits": 4}}, "quant_method 'unnamed'"),
    "old compression_config": ({"compression_config": {"quant_method": "sparseml"}}, "'sparseml'"),
    "MLX": ({"quantization": {"group_size": 64, "bits": 4}}, "'quantization' (MLX)"),
    "quantisation a string": ({"quantization_config": "gptq"}, "as an object"),
}


@pytest.mark.parametrize("case", OTHER)
def test_another_model_or_scheme_is_refused(case: str) -> None:
    overrides, message = OTHER[case]
    assert message in refusal(**overrides).message


# --- sizes, types, defaults -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ({"head_dim": 32}, (4, 2, 32)),
        ({"hidden_size": 72, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16}, (5, 1, 16)),
        ({"num_key_value_heads": ABSENT}, (4, 4, 16)),
        ({"num_key_value_heads": None, "head_dim": None}, (4, 4, 16)),
    ],
    ids=["wide heads", "hidden not a multiple", "kv heads absent", "null"],
)  # fmt: skip
def test_heads(overrides: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    config = read(**overrides).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == sizes


HEADS: dict[str, tuple[dict[str, Any], str]] = {
    "kv heads do not divide": (
        {"num_key_value_heads": 3},
        "num_attention_heads (4) must be a multiple of num_key_value_heads (3)",
    ),
    "more kv heads": (
        {"num_key_value_heads": 8},
        "num_attention_heads (4) must be a multiple of num_key_value_heads (8)",
    ),
    "no kv heads": (
        {"num_key_value_heads": 0},
        "num_key_value_heads as a positive integer, got `0`",
    ),
    "hidden does not divide": (
        {"hidden_size": 72, "num_attention_heads": 5, "num_key_value_heads": 1},
        "hidden_size (72) is not a multiple of num_attention_heads (5) and head_dim is absent",
    ),
    "odd head_dim": ({"head_dim": 15}, "an even head_dim (rotary pairs), got 15"),
}


@pytest.mark.parametrize("case", HEADS)
def test_heads_that_do_not_fit_are_refused(case: str) -> None:
    overrides, message = HEADS[case]
    assert message in refusal(**overrides).message


INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "pretraining_tp",
)
NOT_INTEGERS: tuple[object, ...] = (0, -1, 1.5, 64.0, "64", True, [], {}, 2**31, math.nan)


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
def test_integer_fields_take_only_positive_integers(key: str, value: object) -> None:
    error = refusal(**{key: value})
    assert error.where == f"{WHERE}#{key}"
    assert f"expected {key} as a positive integer" in error.message


@pytest.mark.parametrize("value", ["1e-05", 0, -1e-5, math.nan, math.inf, True, [], {}], ids=repr)
def test_epsilon_takes_only_positive_numbers(value: object) -> None:
    error = refusal(rms_norm_eps=value)
    assert error.where == f"{WHERE}#rms_norm_eps"
    assert "as a positive number" in error.message


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("value", [0, 1, "true", [], 1.0], ids=repr)
def test_flags_take_only_booleans(key: str, value: object) -> None:
    assert f"expected {key} as true or false" in refusal(**{key: value}).message


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
)
def test_sizes_that_nothing_tells_are_required(key: str) -> None:
    config = tiny_config()
    del config[key]
    with pytest.raises(CheckpointError, match=f"expected {key} as a positive integer"):
        config_from_hf(config, where=WHERE)


@pytest.mark.parametrize(
    ("key", "note"),
    [
        ("rms_norm_eps", "assumed rms_norm_eps = 1e-06"),
        ("rope_theta", "assumed rope_theta = 10000.0"),
        ("max_position_embeddings", "assumed max_position_embeddings = 2048"),
        ("hidden_act", "assumed hidden_act = silu"),
    ],
)
def test_class_defaults_are_noted(key: str, note: str) -> None:
    assert read(**{key: ABSENT}).notes == (note,)


def test_inner_size_comes_from_the_weights() -> None:
    shapes = {"model.layers.0.mlp.gate_proj.weight": (96, 64)}
    hf = read_hf_config(tiny_config(intermediate_size=ABSENT), where=WHERE, shapes=shapes)
    assert hf.config.intermediate_size == 96
    assert hf.notes[0].startswith("assumed intermediate_size = 96")
    assert "intermediate_size" in refusal(intermediate_size=ABSENT).message


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": ABSENT, "dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float16", "dtype": "float16"}, "f16"),
        ({"torch_dtype": "torch.float32"}, "f32"),
        ({"torch_dtype": ABSENT}, None),
        ({"torch_dtype": "auto"}, None),
        ({"torch_dtype": None}, None),
    ],
    ids=str,
)
def test_dtype(overrides: dict[str, Any], dtype: str | None) -> None:
    assert read(**overrides).dtype == dtype


def test_dtypes_that_differ_are_both_named() -> None:
    error = refusal(dtype="bfloat16", torch_dtype="float16")
    assert error.message == "dtype = bf16 and torch_dtype = f16 differ"


@pytest.mark.parametrize("value", ["int8", "", 16, ["bfloat16"]], ids=repr)
def test_other_dtypes_are_refused(value: object) -> None:
    assert (refusal(torch_dtype=value).where or "").endswith("#torch_dtype")


@pytest.mark.parametrize("num_layers", [1, 2])
def test_fewer_layers_can_be_asked_for(num_layers: int) -> None:
    config = config_from_hf(tiny_config(), where=WHERE, num_layers=num_layers)
    assert config.num_layers == num_layers


@pytest.mark.parametrize("num_layers", [0, -1, 3])
def test_other_layer_counts_are_refused(num_layers: int) -> None:
    with pytest.raises(CheckpointError, match=f"between 1 and 2, got {num_layers}"):
        config_from_hf(tiny_config(), where=WHERE, num_layers=num_layers)


@pytest.mark.parametrize(
    ("value", "ids"), [(None, ()), (2, (2,)), ([2, 5], (2, 5)), ([], ()), (0, (0,))], ids=repr
)
def test_token_ids(value: object, ids: tuple[int, ...]) -> None:
    assert token_ids(value, where=WHERE) == ids


@pytest.mark.parametrize("value", ["2", -1, True, 2.0, [2, None], {"a": 1}], ids=repr)
def test_bad_token_ids_are_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="expected token ids as non-negative integers"):
        token_ids(value, where=WHERE)


def test_hostile_values_stay_short_and_on_one_line() -> None:
    error = refusal(hidden_act="x\n\x1b[2J" * 1000)
    assert len(str(error)) < 400
    assert "\x1b" not in str(error)


def test_config_survives_json() -> None:
    assert read_hf_config(json.loads(json.dumps(tiny_config())), where=WHERE) == read()
