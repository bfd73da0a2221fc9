from __future__ import annotations

import json
import math
from typing import Any

import pytest

from llama_artifacts.errors import CheckpointError
from llama_export.checkpoint.config import (
    RopeConfig,
    config_from_hf,
    read_hf_config,
    token_ids,
)
from llama_export.checkpoint.layout import (
    check_layout,
    expected_tensors,
    first_layers,
    parameter_count,
)
from llama_export.checkpoint.source import TensorInfo
from tests.tiny import ABSENT, tiny_config, tiny_tensors

WHERE = "model/config.json"

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def scaling(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**LLAMA3, **changes}.items() if value is not ABSENT}


def read(**overrides: Any) -> Any:
    return read_hf_config(tiny_config(**overrides), where=WHERE)


def refusal(**overrides: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read(**overrides)
    assert str(caught.value).startswith(WHERE)
    assert "\n" not in str(caught.value)
    return caught.value


def test_sizes_are_taken_as_written() -> None:
    config = read().config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (128, 64, 128)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.max_position, config.rms_norm_eps) == (16, 256, 1e-5)
    assert config.rope == RopeConfig(10000.0)
    assert read().notes == ()


# --- rope -----------------------------------------------------------------------------------------

SAME_ROPE: dict[str, dict[str, Any]] = {
    "rope_scaling with rope_type": {"rope_theta": 500000.0, "rope_scaling": scaling()},
    "rope_scaling with type": {
        "rope_theta": 500000.0,
        "rope_scaling": scaling(rope_type=ABSENT, type="llama3"),
    },
    "both spellings of the type": {
        "rope_theta": 500000.0,
        "rope_scaling": scaling(type="llama3"),
    },
    "integers": {
        "rope_theta": 500000,
        "rope_scaling": scaling(factor=8, low_freq_factor=1, high_freq_factor=4),
    },
    "rope_parameters": {
        "rope_theta": ABSENT,
        "rope_scaling": ABSENT,
        "rope_parameters": scaling(rope_theta=500000.0),
    },
    "theta beside rope_parameters": {
        "rope_theta": 500000.0,
        "rope_scaling": ABSENT,
        "rope_parameters": scaling(),
    },
    "both generations, equal": {
        "rope_theta": 500000.0,
        "rope_scaling": scaling(rope_type=ABSENT, type="llama3"),
        "rope_parameters": scaling(rope_theta=500000.0),
    },
    "neutral partial_rotary_factor": {
        "rope_theta": 500000.0,
        "rope_scaling": scaling(partial_rotary_factor=1.0),
    },
}


@pytest.mark.parametrize("case", SAME_ROPE)
def test_every_spelling_of_llama3_rope_reads_the_same(case: str) -> None:
    hf = read(**SAME_ROPE[case])
    assert hf.config.rope == LLAMA3_ROPE
    assert hf.notes == ()


@pytest.mark.parametrize(
    "value",
    [None, ABSENT, {"rope_type": "default"}, {"type": "default"}, {"rope_theta": 10000.0}],
    ids=["null", "absent", "default", "legacy default", "theta only"],
)
def test_unscaled_rope(value: object) -> None:
    assert read(rope_scaling=value).config.rope == RopeConfig(10000.0)


def test_linear_rope() -> None:
    rope = read(rope_scaling={"type": "linear", "factor": 2}).config.rope
    assert rope == RopeConfig(10000.0, "linear", 2.0)


@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic", "su", "lama3", "ntk", ""])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unknown_rope_type_is_refused(kind: str, key: str) -> None:
    error = refusal(rope_scaling={key: kind, "factor": 4.0})
    expected = f"rope_type '{kind}' is not supported (supported: default, linear, llama3)"
    assert error.message == expected


BAD_ROPE: dict[str, tuple[dict[str, Any], str, str]] = {
    "factor below one": ({"rope_scaling": scaling(factor=0.5)}, "factor", "at least 1"),
    "factor zero": ({"rope_scaling": scaling(factor=0)}, "factor", "got `0`"),
    "factor negative": ({"rope_scaling": scaling(factor=-8.0)}, "factor", "got `-8.0`"),
    "factor NaN": ({"rope_scaling": scaling(factor=math.nan)}, "factor", "got `nan`"),
    "factor infinite": ({"rope_scaling": scaling(factor=math.inf)}, "factor", "got `inf`"),
    "factor too long": ({"rope_scaling": scaling(factor=10**400)}, "factor", "positive number"),
    "factor a string": ({"rope_scaling": scaling(factor="8")}, "factor", "(a string)"),
    "factor a boolean": ({"rope_scaling": scaling(factor=True)}, "factor", "got `True`"),
    "factor absent": ({"rope_scaling": scaling(factor=ABSENT)}, "factor", "(null)"),
    "low absent": (
        {"rope_scaling": scaling(low_freq_factor=ABSENT)},
        "low_freq_factor",
        "(null)",
    ),
    "low zero": ({"rope_scaling": scaling(low_freq_factor=0)}, "low_freq_factor", "got `0`"),
    "high equals low": (
        {"rope_scaling": scaling(high_freq_factor=1.0)},
        "high_freq_factor",
        "above low_freq_factor (1.0)",
    ),
    "original a float": (
        {"rope_scaling": scaling(original_max_position_embeddings=8192.0)},
        "original_max_position_embeddings",
        "a positive integer",
    ),
    "type absent": ({"rope_scaling": scaling(rope_type=ABSENT)}, "rope_type", "(null)"),
    "types differ": ({"rope_scaling": scaling(type="linear")}, "rope_type", "differ"),
    "another type's key": (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 0.5}},
        "attention_factor",
        "changes the maths",
    ),
    "factor under default": (
        {"rope_scaling": {"type": "default", "factor": 8.0}},
        "factor",
        "changes the maths",
    ),
    "partial rotation": (
        {"rope_scaling": scaling(partial_rotary_factor=0.5)},
        "partial_rotary_factor",
        "changes the maths",
    ),
    "not an object": ({"rope_scaling": "llama3"}, "rope_scaling", "an object"),
    "one per layer type": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        "rope_type",
        "(null)",
    ),
    "thetas differ": (
        {"rope_scaling": scaling(rope_theta=1000.0)},
        "rope_theta",
        "10000.0 and rope_scaling.rope_theta = 1000.0 differ",
    ),
    "generations differ": (
        {"rope_scaling": scaling(), "rope_parameters": scaling(factor=4.0)},
        "rope_parameters",
        "differ",
    ),
    "theta zero": ({"rope_theta": 0}, "rope_theta", "got `0`"),
    "theta NaN": ({"rope_theta": math.nan}, "rope_theta", "got `nan`"),
    "theta a string": ({"rope_theta": "1e4"}, "rope_theta", "(a string)"),
}


@pytest.mark.parametrize("case", BAD_ROPE)
def test_bad_rope_is_refused_by_field(case: str) -> None:
    overrides, field, message = BAD_ROPE[case]
    error = refusal(**overrides)
    assert (error.where or "").endswith(field)
    assert message in error.message


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
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method 'gptq'"),
    "awq": ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not"),
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


# --- layout ---------------------------------------------------------------------------------------


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


def test_config_survives_json() -> None:
    assert read_hf_config(json.loads(json.dumps(tiny_config())), where=WHERE) == read()
