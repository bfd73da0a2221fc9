"""The weights file of a bundle: order, alignment, dtypes and bytes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llama_artifacts.digests import describe
from llama_artifacts.errors import BuildError
from llama_export.checkpoint.open import open_checkpoint
from llama_export.model.llama import INV_FREQ
from llama_export.model.rope import inverse_frequencies
from llama_export.pack import ALIGNMENT, WeightsPlan, plan_weights, write_weights
from llama_runtime.weights import map_weights
from tests.tiny import tiny_config, tiny_tensors, write_tiny
from tests.tiny import write_weights as write_source
from tests.tiny_gguf import write_tiny_gguf

LAYER = [
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
]


def pack(
    model: Path, output: Path, *, compute: str = "f32", keeps_stored: bool = True
) -> tuple[Path, WeightsPlan]:
    checkpoint = open_checkpoint(str(model))
    plan = plan_weights(checkpoint, compute=compute, keeps_stored=keeps_stored)
    written: list[int] = []
    path = output / "weights.safetensors"
    assert write_weights(path, plan, checkpoint, advance=written.append) == describe(path)
    assert sum(written) == plan.num_bytes - len(plan.header)
    return path, plan


def names_by_offset(path: Path) -> list[str]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__")
    return sorted(header, key=lambda name: header[name]["data_offsets"][0])


def test_what_is_read_together_lies_together_and_layers_follow_by_number(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", num_hidden_layers=12)
    path, _ = pack(tmp_path / "m", tmp_path)
    layers = [f"model.layers.{layer}.{name}" for layer in range(12) for name in LAYER]
    assert names_by_offset(path) == [
        "model.embed_tokens.weight",
        *layers,
        "lm_head.weight",
        "model.norm.weight",
        INV_FREQ,  # 8 frequencies: half a line
    ]


def test_biases_lie_together_after_the_weights_of_a_layer(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", attention_bias=True, mlp_bias=True)
    path, _ = pack(tmp_path / "m", tmp_path)
    names = names_by_offset(path)
    for part in ("weight", "bias"):
        first = names.index(f"model.layers.1.self_attn.q_proj.{part}")
        expected = [f"model.layers.1.self_attn.{p}_proj.{part}" for p in "qkv"]
        assert names[first : first + 3] == expected
        first = names.index(f"model.layers.1.mlp.gate_proj.{part}")
        assert names[first + 1] == f"model.layers.1.mlp.up_proj.{part}"


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_size": 66, "num_attention_heads": 3, "num_key_value_heads": 1},
        {"intermediate_size": 7, "vocab_size": 101, "mlp_bias": True},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_of_whole_lines_starts_on_a_line(
    tmp_path: Path, overrides: dict[str, Any], dtype: torch.dtype
) -> None:
    write_tiny(tmp_path / "m", dtype=dtype, has_tokenizer=False, **overrides)
    path, plan = pack(tmp_path / "m", tmp_path, compute="bf16")
    assert path.stat().st_size == plan.num_bytes
    assert len(plan.header) % ALIGNMENT == 0
    is_odd_before = False
    for name, tensor in map_weights(path).items():
        start, size = plan.extents[name].start, plan.extents[name].num_bytes
        assert start % tensor.element_size() == 0
        is_odd = size % ALIGNMENT != 0
        assert is_odd or start % ALIGNMENT == 0
        assert is_odd or not is_odd_before
        is_odd_before = is_odd


def test_the_bytes_are_the_sources(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", num_shards=2)
    path, plan = pack(tmp_path / "m", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path / "m"))
    data = path.read_bytes()
    for name in checkpoint.tensors:
        start, size = plan.extents[name].start, plan.extents[name].num_bytes
        assert data[start : start + size] == checkpoint.read(name).numpy().tobytes()


def test_safetensors_own_readers_read_it(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", tie_word_embeddings=True)
    path, plan = pack(tmp_path / "m", tmp_path)
    source = load_file(tmp_path / "m" / "model.safetensors")
    config = open_checkpoint(str(tmp_path / "m")).config
    source[INV_FREQ] = inverse_frequencies(config.rope, config.head_dim)
    loaded = load_file(path)
    assert loaded.keys() == source.keys() == plan.tensors.keys()
    assert all(torch.equal(loaded[name], source[name]) for name in source)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("model.norm.weight"), source["model.norm.weight"])


def test_stored_dtypes_are_kept_or_all_converted(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config(), dtype=torch.bfloat16)
    mixed = {name: t.float() if t.ndim == 1 else t for name, t in tensors.items()}
    folder = write_tiny(tmp_path / "m", has_tokenizer=False)
    save_file(mixed, folder / "model.safetensors")
    kept = load_file(pack(folder, tmp_path, compute="bf16")[0])
    assert {name: kept[name].dtype for name in mixed} == {n: t.dtype for n, t in mixed.items()}
    for compute, dtype in (
        ("f32", torch.float32),
        ("f16", torch.float16),
        ("bf16", torch.bfloat16),
    ):
        output = tmp_path / compute
        output.mkdir()
        converted = load_file(pack(folder, output, compute=compute, keeps_stored=False)[0])
        assert converted.pop(INV_FREQ).dtype == torch.float32
        for name, tensor in converted.items():
            assert torch.equal(tensor, mixed[name].to(dtype))


def test_quantised_tensors_take_the_compute_dtype(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf")
    file = write_tiny_gguf(tmp_path, folder, quant={"*": "Q8_0", "token_embd.weight": "F16"})
    loaded = load_file(pack(file, tmp_path, compute="bf16")[0])
    checkpoint = open_checkpoint(str(file))
    assert loaded["model.embed_tokens.weight"].dtype == torch.float16
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(loaded[name], checkpoint.read(name).bfloat16())


@pytest.mark.parametrize("value", [65520.0, -1e30, float("inf"), float("nan")])
def test_what_does_not_fit_float16_is_refused_by_name(tmp_path: Path, value: float) -> None:
    tensors = tiny_tensors(tiny_config(), dtype=torch.bfloat16)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    folder = write_tiny(tmp_path / "m", has_tokenizer=False)
    write_source(folder, tensors)
    with pytest.raises(BuildError, match=r"model\.layers\.1\.mlp\.up_proj\.weight") as caught:
        pack(folder, tmp_path, compute="f16", keeps_stored=False)
    assert "bf16" in str(caught.value.hint)


def test_the_largest_float16_is_not_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config())
    tensors["model.norm.weight"][0] = 65504.0
    folder = write_tiny(tmp_path / "m", has_tokenizer=False)
    write_source(folder, tensors)
    pack(folder, tmp_path, compute="f16", keeps_stored=False)


def test_a_float16_checkpoint_is_taken_as_it_is(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config(), dtype=torch.float16)
    tensors["model.norm.weight"][0] = float("inf")
    folder = write_tiny(tmp_path / "m", has_tokenizer=False)
    write_source(folder, tensors)
    path, _ = pack(folder, tmp_path, compute="f16")
    assert load_file(path)["model.norm.weight"][0] == float("inf")


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m")
    for name in "ab":
        (tmp_path / name).mkdir()
        pack(tmp_path / "m", tmp_path / name)
    file = "weights.safetensors"
    assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("size", [7, 4096])
def test_weights_are_written_in_steps_of_a_large_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    write_tiny(tmp_path / "m")
    (tmp_path / "whole").mkdir()
    whole, _ = pack(tmp_path / "m", tmp_path / "whole")
    steps = []

    def write(file: io.FileIO, data: bytes) -> None:
        steps.append(len(data))
        file.write(data)

    monkeypatch.setattr("llama_export.pack._LARGE_PAGE", size)
    monkeypatch.setattr("llama_export.pack._write_all", write)
    path, _ = pack(tmp_path / "m", tmp_path)
    assert set(steps[:-1]) == {size}
    assert path.read_bytes() == whole.read_bytes()
