"""What is cut for several processes, and what is refused before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.errors import BuildError, ChoiceError
from llama_artifacts.manifest import FORMATS, Cut, Quantized
from llama_export.blueprint import Blueprint, draw
from llama_export.checkpoint.config import LlamaConfig, read_hf_config
from llama_export.checkpoint.layout import Codes, expected_tensors, matrix_shapes
from llama_export.checkpoint.source import TensorInfo
from llama_export.quantize import quantized_tensors
from llama_export.recipe import Recipe
from llama_export.shards import cuts_of, part_of, shard
from tests.tiny import tiny_config, write_tiny

EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
LAYER = "model.layers.0."


def network(**overrides: Any) -> tuple[LlamaConfig, dict[str, TensorInfo]]:
    config = read_hf_config(tiny_config(**EIGHT_HEADS, **overrides), where="config.json").config
    tensors = {n: TensorInfo("f32", shape) for n, shape in expected_tensors(config).items()}
    return config, tensors


def part(num_shards: int, *, quantized: Quantized | None = None, **overrides: Any) -> Any:
    """Cuts, and shapes of what one process binds, by name."""
    config, tensors = network(**overrides)
    if quantized is not None:
        tensors = quantized_tensors(tensors, quantized)
    cuts = cuts_of(config, tensors)
    return cuts, {name: info.shape for name, info in part_of(tensors, cuts, num_shards).items()}


# --- what is cut ----------------------------------------------------------------------------------


def test_outputs_are_cut_by_rows_and_inputs_by_columns() -> None:
    cuts, shapes = part(4)
    assert shapes[f"{LAYER}self_attn.q_proj.weight"] == (16, 64)
    assert shapes[f"{LAYER}self_attn.v_proj.weight"] == (8, 64)
    assert shapes[f"{LAYER}self_attn.o_proj.weight"] == (64, 16)
    assert shapes[f"{LAYER}mlp.up_proj.weight"] == (32, 64)
    assert shapes[f"{LAYER}mlp.down_proj.weight"] == (64, 32)
    assert shapes["lm_head.weight"] == (32, 64)
    assert cuts[f"{LAYER}mlp.down_proj.weight"] == Cut(f"{LAYER}mlp.down_proj.weight", "columns")


def test_embedding_and_norms_are_whole() -> None:
    cuts, shapes = part(2)
    assert shapes["model.embed_tokens.weight"] == (128, 64)
    assert not [name for name in cuts if "norm" in name or "embed" in name]


def test_a_tied_head_is_rows_of_the_embedding() -> None:
    cuts, shapes = part(2, tie_word_embeddings=True)
    assert cuts["lm_head.weight"] == Cut("model.embed_tokens.weight", "rows")
    assert shapes["lm_head.weight"] == (64, 64)
    assert shapes["model.embed_tokens.weight"] == (128, 64)


def test_biases_of_inputs_are_whole() -> None:
    cuts, shapes = part(2, attention_bias=True, mlp_bias=True)
    assert shapes[f"{LAYER}self_attn.k_proj.bias"] == (16,)
    assert shapes[f"{LAYER}self_attn.o_proj.bias"] == (64,)
    assert f"{LAYER}mlp.down_proj.bias" not in cuts


def test_scales_of_whole_rows_follow_rows_alone() -> None:
    cuts, shapes = part(2, quantized=Quantized("int8"))
    assert shapes[f"{LAYER}self_attn.q_proj.weight_scale"] == (32, 1)
    assert shapes[f"{LAYER}mlp.down_proj.weight_scale"] == (64, 1)
    assert f"{LAYER}mlp.down_proj.weight_scale" not in cuts


def test_scales_of_groups_follow_columns() -> None:
    _, shapes = part(2, quantized=Quantized("int4", 32))
    assert shapes[f"{LAYER}mlp.down_proj.weight"] == (64, 32)
    assert shapes[f"{LAYER}mlp.down_proj.weight_scale"] == (64, 2)


def test_minima_follow_scales() -> None:
    config, tensors = network(tie_word_embeddings=True)
    for module, shape in matrix_shapes(config).items():
        tensors |= Codes("u8", 32, "f16", has_min=True).tensors(module, shape)
    cuts = cuts_of(config, tensors)
    shapes = {name: info.shape for name, info in part_of(tensors, cuts, 2).items()}
    assert shapes[f"{LAYER}self_attn.q_proj.weight_min"] == (32, 2)
    assert shapes[f"{LAYER}mlp.down_proj.weight_min"] == (64, 2)
    assert cuts[f"{LAYER}mlp.down_proj.weight_min"].axis == "columns"
    assert cuts["lm_head.weight_min"] == Cut("model.embed_tokens.weight_min", "rows")


def test_the_scales_of_a_tied_head_are_rows_of_the_embeddings() -> None:
    cuts, _ = part(2, quantized=Quantized("int8", 32), tie_word_embeddings=True)
    assert cuts["lm_head.weight_scale"] == Cut("model.embed_tokens.weight_scale", "rows")


# --- what is refused ------------------------------------------------------------------------------


def test_smollm2_135m_divides_by_three_alone() -> None:
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    config = tiny_config(**sizes, intermediate_size=1536, vocab_size=49152)
    smollm2 = read_hf_config(config, where="config.json").config
    with pytest.raises(
        BuildError, match=r"that 2 shards divide, got query heads 9, key/value heads 3$"
    ):
        shard(smollm2, 2)
    assert shard(smollm2, 3).num_heads == 3


@pytest.mark.parametrize("group_size", [32, None])
def test_a_group_of_scales_is_not_parted(group_size: int | None) -> None:
    with pytest.raises(BuildError, match=r"4 shards divide, got 2 groups of 32 values"):
        part(4, quantized=Quantized("int4", group_size))


def drawn(tmp_path: Path, **choices: Any) -> Blueprint:
    model = write_tiny(tmp_path / "tiny", **EIGHT_HEADS)
    return draw(Recipe(str(model), tmp_path / "bundle", ("decode",), **choices))


def test_onnx_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ChoiceError, match=r"no operators between processes, got --shards 2$"):
        drawn(tmp_path, shards=(2,), formats=("onnx",))


@pytest.mark.parametrize("count", [0, -1])
def test_no_shards_are_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(BuildError, match=f"expected --shards of at least 1, got {count}"):
        drawn(tmp_path, shards=(1, count))


# --- what is built --------------------------------------------------------------------------------


def test_onnx_is_built_for_one_process_alone_and_a_note_says_so(tmp_path: Path) -> None:
    blueprint = drawn(tmp_path, shards=(1, 2, 2))
    built = [(draft.format, draft.shards) for draft in blueprint.drafts]
    assert built == [*((format, 1) for format in FORMATS), ("pt2", 2), ("aoti", 2)]
    assert [note for note in blueprint.notes if "onnx is for 1 shard alone" in note]


def test_the_default_formats_leave_onnx_out_where_no_program_is_whole(tmp_path: Path) -> None:
    blueprint = drawn(tmp_path, shards=(4,))
    assert [draft.format for draft in blueprint.drafts] == ["pt2", "aoti"]
    assert [note for note in blueprint.notes if "onnx is not built" in note]


def test_names_of_files_tell_the_number_of_processes(tmp_path: Path) -> None:
    (draft,) = drawn(tmp_path, shards=(2,), formats=("pt2",)).drafts
    assert (draft.stem, draft.label) == ("decode.2-shards", "decode of 2 shards")


def test_nothing_is_cut_for_one_process(tmp_path: Path) -> None:
    assert drawn(tmp_path, formats=("pt2",)).cuts == {}
