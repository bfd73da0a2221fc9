from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llama_artifacts.errors import CheckpointError
from llama_export.checkpoint.config import LlamaConfig, RopeConfig
from llama_export.checkpoint.gguf import QUANTISED_TYPES, GgufCheckpoint
from llama_export.checkpoint.gguf_header import read_header
from llama_export.checkpoint.source import Checkpoint, Source, TensorInfo
from tests.tiny import write_tiny
from tests.tiny_gguf import gguf_name, permute, write_tiny_gguf

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}


def write_folder(folder: Path, **overrides: Any) -> Path:
    config = {"tie_word_embeddings": True, "head_dim": 16} | overrides
    return write_tiny(folder, has_tokenizer=False, **config)


def open_tiny(
    tmp_path: Path,
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    quant: dict[str, str] | str = "F32",
    **overrides: Any,
) -> GgufCheckpoint:
    hf = write_folder(tmp_path / "hf", **overrides)
    path = write_tiny_gguf(tmp_path, hf, quant=quant, metadata=metadata, extra=extra)
    return GgufCheckpoint.open(path)


def original(tmp_path: Path) -> dict[str, torch.Tensor]:
    return load_file(tmp_path / "hf" / "model.safetensors")


def test_it_is_a_checkpoint(tmp_path: Path) -> None:
    checkpoint: Checkpoint = open_tiny(tmp_path)
    assert checkpoint.name == "tiny"
    assert checkpoint.source == Source("gguf", "tiny.gguf")
    assert checkpoint.config == LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        max_position=256,
        tie_word_embeddings=True,
    )
    assert checkpoint.tensors["model.embed_tokens.weight"] == TensorInfo("f32", (128, 64))
    assert "lm_head.weight" not in checkpoint.tensors


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": False},
        {"head_dim": 32},
        {"hidden_size": 72, "num_attention_heads": 5, "num_key_value_heads": 1},
        {"num_hidden_layers": 12},
    ],
)
def test_tensors_equal_the_original(overrides: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = open_tiny(tmp_path, **overrides)
    expected = original(tmp_path)
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        got = checkpoint.read(name)
        assert got.dtype == torch.float32
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
        assert torch.equal(got, tensor), name
    assert checkpoint.config.attention_bias is overrides.get("attention_bias", False)
    assert checkpoint.config.mlp_bias is overrides.get("mlp_bias", False)


def test_rows_of_queries_and_keys_were_moved_in_the_file(tmp_path: Path) -> None:
    checkpoint = open_tiny(tmp_path)
    name = "model.layers.0.self_attn.k_proj.weight"
    stored = next(
        tensor.data
        for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors
        if tensor.name == gguf_name(name)
    )
    assert np.array_equal(stored, permute(original(tmp_path)[name].numpy(), 2))
    assert not torch.equal(torch.from_numpy(stored.copy()), checkpoint.read(name))


@pytest.mark.parametrize(("quant", "dtype"), [("F16", "f16"), ("BF16", "bf16"), ("F32", "f32")])
def test_plain_types_come_out_as_stored(quant: str, dtype: str, tmp_path: Path) -> None:
    checkpoint = open_tiny(tmp_path, quant=quant)
    assert checkpoint.dtype == dtype
    torch_dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[dtype]
    for name, tensor in original(tmp_path).items():
        got = checkpoint.read(name)
        expected = tensor if tensor.dim() == 1 else tensor.to(torch_dtype)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected), name


@pytest.mark.parametrize("quant", QUANTISED_TYPES)
def test_quantised_types_equal_the_dequantiser(quant: str, tmp_path: Path) -> None:
    checkpoint = open_tiny(tmp_path, quant=quant, **WIDE)
    assert checkpoint.dtype == "bf16"
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    for name, info in checkpoint.tensors.items():
        tensor = stored[gguf_name(name)]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got = checkpoint.read(name)
        assert info.dtype == ("f32" if expected.ndim == 1 else quant.lower())
        assert (got.dtype, tuple(got.shape)) == (torch.float32, info.shape)
        moved = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        again = permute(got.numpy(), moved) if moved else got.numpy()
        assert np.array_equal(again, expected, equal_nan=True), name


def test_mixed_types(tmp_path: Path) -> None:
    quant = {"*": "Q4_0", "token_embd.weight": "F16", "blk.0.ffn_down.weight": "Q6_K"}
    checkpoint = open_tiny(tmp_path, quant=quant, **WIDE)
    kinds = {info.dtype for info in checkpoint.tensors.values()}
    assert kinds == {"q4_0", "f16", "q6_k", "f32"}
    assert checkpoint.dtype == "bf16"
    assert checkpoint.read("model.embed_tokens.weight").dtype == torch.float16


def test_writing_into_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    checkpoint = open_tiny(tmp_path)
    checkpoint.read("model.norm.weight").zero_()
    assert checkpoint.read("model.norm.weight").abs().sum() > 0


def test_unknown_tensor_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"#lm_head\.weight: no such tensor"):
        open_tiny(tmp_path).read("lm_head.weight")


def test_file_removed_after_opening(tmp_path: Path) -> None:
    checkpoint = open_tiny(tmp_path)
    (tmp_path / "tiny.gguf").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read("model.norm.weight")


# theta 10000, factor 8, low 1, high 4, original length 64, head dimension 16.
DIVISORS = [1.0, 1.294, 7.667, 8.0, 8.0, 8.0, 8.0, 8.0]


def test_rope_divisors(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.array(DIVISORS, np.float32)}
    checkpoint = open_tiny(tmp_path, extra=extra)
    rope = checkpoint.config.rope
    assert (rope.kind, rope.theta) == ("divisors", 10000.0)
    assert rope.divisors == tuple(np.array(DIVISORS, np.float32).tolist())
    assert "rope_freqs.weight" not in checkpoint.tensors
    config = json.loads(checkpoint.assets()["config.json"])
    assert config["rope_scaling"] == {"rope_type": "divisors", "divisors": list(rope.divisors)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.ones(16, np.float32), "rope_freqs.weight: expected F32 [8], got F32 [16]"),
        (np.ones(8, np.float16), "rope_freqs.weight: expected F32 [8], got F16 [8]"),
        (np.zeros(8, np.float32), "rope_freqs.weight: expected divisors above zero"),
        (np.full(8, np.nan, np.float32), "rope_freqs.weight: expected divisors above zero"),
    ],
)
def test_bad_rope_divisors(values: np.ndarray, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_tiny(tmp_path, extra={"rope_freqs.weight": values})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({}, RopeConfig(10000.0)),
        ({"rope.freq_base": 500000.0}, RopeConfig(500000.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, RopeConfig(10000.0)),
        ({"rope.scaling.type": "linear"}, RopeConfig(10000.0)),
        ({"rope.scaling.factor": 0.0}, RopeConfig(10000.0)),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            RopeConfig(10000.0, "linear", factor=4.0),
        ),
        ({"rope.scale_linear": 2.0}, RopeConfig(10000.0, "linear", factor=2.0)),
    ],
)
def test_rope_scaling_of_the_metadata(
    metadata: dict[str, Any], rope: RopeConfig, tmp_path: Path
) -> None:
    values = {f"llama.{key}": value for key, value in metadata.items()}
    assert open_tiny(tmp_path, metadata=values).config.rope == rope


def test_assumed_rope_base_is_noted(tmp_path: Path) -> None:
    checkpoint = open_tiny(tmp_path, metadata={"llama.rope.freq_base": None})
    assert checkpoint.config.rope.theta == 10000.0
    assert "assumed llama.rope.freq_base = 10000: the file does not say" in checkpoint.notes


def test_values_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    metadata = {
        "llama.attention.key_length": None,
        "llama.attention.value_length": None,
        "llama.attention.sliding_window": 256,
        "llama.expert_count": 0,
        "llama.logit_scale": 1.0,
        "llama.attention.causal": True,
        "llama.vocab_size": None,
        "llama.tensor_data_layout": "Meta AI original pth",
        "general.alignment": 32,
        "somebody.else": [1, 2],
    }
    assert open_tiny(tmp_path, metadata=metadata).config.head_dim == 16


def test_no_kv_heads_means_as_many_as_heads(tmp_path: Path) -> None:
    metadata = {"llama.attention.head_count_kv": None}
    checkpoint = open_tiny(tmp_path, metadata=metadata, num_key_value_heads=4)
    assert checkpoint.config.num_kv_heads == 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"general.architecture": "qwen2"},
        "architecture `qwen2` is not supported (supported: llama)",
    ),
    "split file": ({"split.count": 3}, "expected a whole model, got one of 3 parts"),
    "mixture of experts": (
        {"llama.expert_count": 8},
        "llama.expert_count = 8: a mixture of experts is not supported",
    ),
    "no heads": ({"llama.attention.head_count": 0}, "attention.head_count must be an integer from"),
    "heads as text": ({"llama.attention.head_count": "4"}, "head_count must be an integer from 1"),
    "heads by layer": ({"llama.attention.head_count": [4, 4]}, "got a list of 2"),
    "kv heads": (
        {"llama.attention.head_count_kv": 3},
        "head_count (4) must be a multiple of head_count_kv (3)",
    ),
    "no epsilon": (
        {"llama.attention.layer_norm_rms_epsilon": None},
        "llama.attention.layer_norm_rms_epsilon is missing",
    ),
    "epsilon NaN": (
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        "layer_norm_rms_epsilon must be a number above zero, got `nan`",
    ),
    "yarn": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
        "rope scaling `yarn` is not supported",
    ),
    "negative factor": ({"llama.rope.scaling.factor": -4.0}, "must be a number above zero"),
    "partial rotary": (
        {"llama.rope.dimension_count": 8},
        "rope.dimension_count 8 of head dimension 16: partial rotary is not supported",
    ),
    "value length": (
        {"llama.attention.value_length": 32},
        "expected value_length = key_length (16), got 32",
    ),
    "window": ({"llama.attention.sliding_window": 64}, "sliding_window = 64 changes the maths"),
    "scale": (
        {"llama.attention.scale": 0.5},
        "`llama.attention.scale` = `0.5` may change the maths",
    ),
    "unknown key": ({"llama.new_trick": 3}, "`llama.new_trick` = `3` may change the maths"),
    "vocabulary": (
        {"llama.vocab_size": 127},
        "expected 128 (the rows of token_embd.weight), got 127",
    ),
    "more layers": ({"llama.block_count": 3}, "3 layers, checkpoint has 2"),
    "fewer layers": ({"llama.block_count": 1}, "1 layers, checkpoint has 2"),
    "2^31 layers": ({"llama.block_count": 2**31 - 1}, "metadata says 2147483647 layers"),
    "shape": ({"llama.feed_forward_length": 95}, "expected shape [95, 64], got [128, 64]"),
    "huge shape": ({"llama.embedding_length": 2**31 - 1}, "expected shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    metadata, message = REFUSED[case]
    architecture = metadata.get("general.architecture")
    hf = write_folder(tmp_path / "hf")
    values = {key: value for key, value in metadata.items() if key != "general.architecture"}
    path = write_tiny_gguf(tmp_path, hf, metadata=values)
    if architecture:
        path.write_bytes(
            path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", _text(architecture), 1)
        )
    with pytest.raises(CheckpointError) as caught:
        GgufCheckpoint.open(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert caught.value.hint or "expected shape" in message


def _text(value: str) -> bytes:
    return len(value).to_bytes(8, "little") + value.encode()


def test_unsupported_type_is_named_before_anything_else(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path, write_folder(tmp_path / "hf"), quant="Q4_0")
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_down.weight"
    place = content.index(name) + len(name) + 4 + 16
    assert content[place : place + 4] == b"\x02\0\0\0"
    content[place : place + 4] = b"\x14\0\0\0"  # IQ4_NL has blocks of the same size
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        GgufCheckpoint.open(path)
    assert "blk.0.ffn_down.weight: type IQ4_NL is not supported" in str(caught.value)
    assert "Q4_K" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.0.attn_rot_embd", "mystery"])
def test_extra_tensor_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"unused tensor: `{name}`"):
        open_tiny(tmp_path, extra={name: np.ones(32, np.float32)})


def test_bias_of_one_projection_alone_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.ones(64, np.float32)}
    with pytest.raises(CheckpointError, match="missing tensors: "):
        open_tiny(tmp_path, extra=extra)


def test_cut_in_the_tensor_area(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path, write_folder(tmp_path / "hf"))
    end = max(tensor.offset + tensor.num_bytes for tensor in read_header(path).tensors.values())
    with path.open("r+b") as file:
        file.truncate(end - 1000)
    with pytest.raises(
        CheckpointError, match="file is 1000 bytes shorter than its header declares"
    ):
        GgufCheckpoint.open(path)


def test_first_layers_only(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path, write_folder(tmp_path / "hf", num_hidden_layers=3))
    checkpoint = GgufCheckpoint.open(path, num_layers=2)
    assert checkpoint.config.num_layers == 2
    assert not any(".2." in name for name in checkpoint.tensors)
    assert "the first 2 of 3 layers" in checkpoint.notes
    assert json.loads(checkpoint.assets()["config.json"])["num_hidden_layers"] == 2


@pytest.mark.parametrize("num_layers", [0, -1, 4])
def test_other_numbers_of_layers_are_refused(num_layers: int, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path, write_folder(tmp_path / "hf", num_hidden_layers=3))
    with pytest.raises(CheckpointError, match=f"expected 1 to 3 layers, got {num_layers}"):
        GgufCheckpoint.open(path, num_layers=num_layers)
