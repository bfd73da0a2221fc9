from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llama_artifacts.errors import CheckpointError
from llama_export.checkpoint.hf import HfCheckpoint
from llama_export.checkpoint.layout import expected_tensors
from llama_export.checkpoint.source import Checkpoint, Source
from tests.exporter.folders import EMBEDDING, HEAD, cut_to_headers, edit_json, refusal
from tests.tiny import ABSENT, tiny_config, tiny_tensors, write_tiny, write_weights


@pytest.mark.parametrize("num_shards", [1, 2])
def test_tensors_are_read_as_stored(tmp_path: Path, num_shards: int) -> None:
    folder = write_tiny(tmp_path / "tiny", num_shards=num_shards)
    checkpoint: Checkpoint = HfCheckpoint.open(folder)
    assert (checkpoint.name, checkpoint.source) == ("tiny", Source("folder", "tiny"))
    assert (checkpoint.dtype, checkpoint.stop_tokens, checkpoint.notes) == ("f32", (2,), ())
    assert list(checkpoint.tensors) == list(expected_tensors(checkpoint.config))
    for name, tensor in tiny_tensors(tiny_config()).items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_tiny(tmp_path / "tiny", dtype=dtype, torch_dtype=str(dtype).split(".")[1])
    checkpoint = HfCheckpoint.open(folder)
    assert checkpoint.dtype == {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    assert torch.equal(checkpoint.read(HEAD), load_file(folder / "model.safetensors")[HEAD])


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    path.write_bytes(
        (size + 1).to_bytes(8, "little") + data[8 : 8 + size] + b" " + data[8 + size :]
    )
    assert torch.equal(HfCheckpoint.open(folder).read(HEAD), tiny_tensors(tiny_config())[HEAD])


def test_writing_to_a_tensor_changes_no_file(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    before = (folder / "model.safetensors").read_bytes()
    HfCheckpoint.open(folder).read(HEAD).zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_unknown_tensor_is_refused(tmp_path: Path) -> None:
    checkpoint = HfCheckpoint.open(write_tiny(tmp_path / "tiny"))
    with pytest.raises(CheckpointError, match=r"no tensor `model\.nothing`"):
        checkpoint.read("model.nothing")


def test_file_that_shrank_after_opening_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    checkpoint = HfCheckpoint.open(folder)
    cut_to_headers(folder)
    with pytest.raises(CheckpointError, match="file has shrunk"):
        checkpoint.read("model.norm.weight")


@pytest.mark.parametrize("num_shards", [1, 2])
def test_headers_are_enough_to_open(tmp_path: Path, num_shards: int) -> None:
    folder = write_tiny(tmp_path / "tiny", num_shards=num_shards)
    whole = HfCheckpoint.open(folder)
    cut_to_headers(folder)
    assert "shorter than its header declares" in refusal(folder).message
    checkpoint = HfCheckpoint.open(folder, headers_only=True)
    assert (checkpoint.config, checkpoint.tensors) == (whole.config, whole.tensors)
    with pytest.raises(CheckpointError, match="opened by header only"):
        checkpoint.read(HEAD)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_fewer_layers(tmp_path: Path, num_layers: int) -> None:
    checkpoint = HfCheckpoint.open(write_tiny(tmp_path / "tiny"), num_layers=num_layers)
    assert checkpoint.config.num_layers == num_layers
    assert list(checkpoint.tensors) == list(expected_tensors(checkpoint.config))


def test_more_layers_than_there_are(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    assert "between 1 and 2, got 3" in refusal(folder, num_layers=3).message


@pytest.mark.parametrize(("said", "stored"), [(3, 2), (2, 3)])
def test_layer_counts_that_differ(tmp_path: Path, said: int, stored: int) -> None:
    folder = write_tiny(tmp_path / "tiny", num_hidden_layers=stored)
    edit_json(folder / "config.json", lambda config: config.update(num_hidden_layers=said))
    assert refusal(folder).message == f"config says {said} layers, checkpoint has {stored}"


# --- the output head ------------------------------------------------------------------------------


def write_heads(folder: Path, config: dict[str, Any], **heads: torch.Tensor | None) -> Path:
    write_tiny(folder, **config)
    tensors = tiny_tensors(tiny_config(tie_word_embeddings=True))
    for name, tensor in {EMBEDDING: heads["embedding"], HEAD: heads["head"]}.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor.clone()
    write_weights(folder, tensors)
    return folder


E, OTHER = torch.full((128, 64), 0.5), torch.full((128, 64), 0.25)
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("config", "embedding", "head", "is_tied", "note"),
    [
        (TIED, E, None, True, None),
        (TIED, E, E, True, None),
        (TIED, E, OTHER, False, "differs from model.embed_tokens.weight"),
        (TIED, E, E.to(torch.bfloat16), False, "differs from"),
        (TIED, None, E, True, "lm_head.weight serves as both"),
        ({"tie_word_embeddings": False}, E, E, False, None),
        ({"tie_word_embeddings": ABSENT}, E, OTHER, False, None),
    ],
    ids=["tied", "equal", "different", "other dtype", "head only", "untied equal", "flag absent"],
)
def test_head(
    tmp_path: Path,
    config: dict[str, Any],
    embedding: torch.Tensor | None,
    head: torch.Tensor | None,
    is_tied: bool,
    note: str | None,
) -> None:
    folder = write_heads(tmp_path / "tiny", config, embedding=embedding, head=head)
    checkpoint = HfCheckpoint.open(folder)
    assert checkpoint.config.tie_word_embeddings == is_tied
    assert (HEAD in checkpoint.tensors) == (not is_tied)
    assert torch.equal(checkpoint.read(EMBEDDING), E)
    if not is_tied and head is not None:
        assert torch.equal(checkpoint.read(HEAD), head)
    assert any(note in line for line in checkpoint.notes) if note else not checkpoint.notes


@pytest.mark.parametrize("flag", [False, ABSENT], ids=["false", "absent"])
def test_untied_without_a_head(tmp_path: Path, flag: object) -> None:
    config = {"tie_word_embeddings": flag}
    folder = write_heads(tmp_path / "tiny", config, embedding=E, head=None)
    expected = "lm_head.weight missing and tie_word_embeddings is false"
    assert refusal(folder).message == expected


def test_by_header_only_a_stored_head_is_never_dropped(tmp_path: Path) -> None:
    folder = write_heads(tmp_path / "tiny", TIED, embedding=E, head=E)
    cut_to_headers(folder)
    checkpoint = HfCheckpoint.open(folder, headers_only=True)
    assert HEAD in checkpoint.tensors
    assert "kept as it is, untied" in checkpoint.notes[0]


# --- rotary tables, dtypes ------------------------------------------------------------------------


def write_with(folder: Path, extra: dict[str, torch.Tensor], **config: Any) -> Path:
    write_tiny(folder, **config)
    write_weights(folder, tiny_tensors(tiny_config(**config)) | extra)
    return folder


TABLE = 10000.0 ** -(torch.arange(0, 16, 2).float() / 16)
NAME = "model.layers.1.self_attn.rotary_emb.inv_freq"


@pytest.mark.parametrize(
    ("values", "is_warned"),
    [(TABLE, False), (TABLE * 1.0005, False), (TABLE / 8, True), (TABLE[:4], True)],
    ids=["equal", "rounded", "scaled", "other shape"],
)
def test_stored_rotary_table_is_ignored(
    tmp_path: Path, values: torch.Tensor, is_warned: bool
) -> None:
    checkpoint = HfCheckpoint.open(write_with(tmp_path / "tiny", {NAME: values.clone()}))
    assert NAME not in checkpoint.tensors
    assert checkpoint.notes[0].startswith("ignored 1 stored rotary_emb.inv_freq tensors")
    assert any(NAME in note and "warning" in note for note in checkpoint.notes) == is_warned


def test_stored_rotary_table_is_ignored_by_header_only(tmp_path: Path) -> None:
    folder = write_with(tmp_path / "tiny", {NAME: TABLE.clone()})
    cut_to_headers(folder)
    assert len(HfCheckpoint.open(folder, headers_only=True).notes) == 1


def test_unused_tensor_is_refused(tmp_path: Path) -> None:
    folder = write_with(tmp_path / "tiny", {"model.layers.0.extra": torch.zeros(1)})
    assert refusal(folder).message == "unused tensor: `model.layers.0.extra`"


def test_stored_dtype_wins_over_the_config(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", dtype=torch.bfloat16, torch_dtype="float16")
    checkpoint = HfCheckpoint.open(folder)
    assert checkpoint.dtype == "bf16"
    expected = "config says f16, the tensors are bf16: the stored dtype wins"
    assert checkpoint.notes == (expected,)


@pytest.mark.parametrize("said", [ABSENT, "auto"], ids=["absent", "auto"])
def test_dtype_left_open_is_that_of_the_embedding(tmp_path: Path, said: object) -> None:
    folder = write_tiny(tmp_path / "tiny", dtype=torch.bfloat16, torch_dtype=said)
    checkpoint = HfCheckpoint.open(folder)
    assert (checkpoint.dtype, checkpoint.notes) == ("bf16", ())


def test_mixed_dtypes_are_kept(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", torch_dtype="bfloat16")
    tensors = {
        name: tensor if "norm" in name else tensor.bfloat16()
        for name, tensor in tiny_tensors(tiny_config()).items()
    }
    write_weights(folder, tensors)
    checkpoint = HfCheckpoint.open(folder)
    assert checkpoint.dtype == "bf16"
    assert checkpoint.read("model.norm.weight").dtype == torch.float32
    assert "stored dtypes are mixed (16 of bf16, 5 of f32)" in checkpoint.notes[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8], ids=str)
def test_other_stored_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_tiny(tmp_path / "tiny", dtype=dtype)
    error = refusal(folder)
    assert "is not supported (supported: bf16, f16, f32)" in error.message
    assert (error.where or "").endswith(f"#{EMBEDDING}")
