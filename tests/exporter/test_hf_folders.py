"""Folders that are no checkpoint, or hold a part of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from llama_artifacts.errors import CheckpointError, TokenizerError
from llama_export.checkpoint.hf import HfCheckpoint
from tests.exporter.folders import HEAD, edit_json, refusal
from tests.tiny import tiny_config, tiny_tensors, write_tiny, write_weights

SHARD_2 = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def test_layers_beyond_any_checkpoint_are_refused_at_once(tmp_path: Path) -> None:
    """Were they listed by name, the list would fill the memory."""
    folder = write_tiny(tmp_path / "m")
    edit_json(folder / "config.json", lambda config: config.update(num_hidden_layers=10**9))
    assert refusal(folder).message == "config says 1000000000 layers, checkpoint has 21 tensors"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    folder = write_tiny(tmp_path / "m")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    error: Any = TokenizerError if name == "tokenizer.json" else CheckpointError
    assert refusal(folder, error).message == "expected a plain file"


def test_absent_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone").message == "expected a checkpoint folder, found none"


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        ([], "expected a config.json, found none", "folder that holds"),
        (["adapter_config.json"], "expected a config.json, found none", "LoRA"),
        (["manifest.json", "config.json"], "got a bundle that llama-export wrote", "built from"),
    ],
    ids=["empty", "adapter", "bundle"],
)
def test_other_folders(tmp_path: Path, files: list[str], message: str, hint: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    error = refusal(tmp_path)
    assert message in error.message
    assert hint in (error.hint or "")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (None, "whole checkpoint"),
        ("pytorch_model.bin", "found pytorch_model.bin: convert"),
        ("x.gguf", "found x.gguf: name the .gguf file itself"),
        ("consolidated.00.pth", "found consolidated.00.pth: convert"),
    ],
)
def test_no_weights(tmp_path: Path, name: str | None, hint: str) -> None:
    folder = write_tiny(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    if name is not None:
        (folder / name).write_bytes(b"")
    error = refusal(folder)
    assert error.message == f"expected model.safetensors or {INDEX}, found neither"
    assert hint in (error.hint or "")


def test_config_is_refused_before_any_weight_file_is_looked_at(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", quantization_config={"quant_method": "hqq"})
    (folder / "model.safetensors").write_bytes(b"")
    assert "quant_method 'hqq'" in refusal(folder).message


BAD_TEXT = {
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    "HTML page": (b"<!doctype html><html></html>", "an HTML page"),
    "not JSON": (b"{", "expected valid JSON"),
    "a list": (b"[]", "expected a JSON object, got a list"),
    "duplicate key": (b'{"vocab_size": 1, "vocab_size": 2}', "duplicate JSON key `vocab_size`"),
    "not UTF-8": (b"\xff\xfe{}", "expected UTF-8"),
}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("case", BAD_TEXT)
def test_damaged_json_is_refused_with_its_path(tmp_path: Path, name: str, case: str) -> None:
    content, message = BAD_TEXT[case]
    folder = write_tiny(tmp_path / "tiny")
    (folder / name).write_bytes(content)
    error = refusal(folder, TokenizerError if name == "tokenizer.json" else CheckpointError)
    assert error.where == str(folder / name)
    assert message in error.message


@pytest.mark.parametrize("case", ["LFS pointer", "HTML page"])
def test_weights_that_are_something_else(tmp_path: Path, case: str) -> None:
    content, message = BAD_TEXT[case]
    folder = write_tiny(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(content)
    assert message in refusal(folder).message


# --- shards ---------------------------------------------------------------------------------------


def test_missing_shard(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", num_shards=2)
    (folder / SHARD_2).unlink()
    expected = f"{SHARD_2} named by the index is missing (incomplete download?)"
    assert refusal(folder).message == expected


@pytest.mark.parametrize("name", [SHARD_2, "model.safetensors", "config.json", "tokenizer.json"])
def test_dangling_link(tmp_path: Path, name: str) -> None:
    folder = write_tiny(tmp_path / "tiny", num_shards=1 if name == "model.safetensors" else 2)
    (folder / name).unlink()
    (folder / name).symlink_to("../blobs/gone")
    error = refusal(folder, TokenizerError if name == "tokenizer.json" else CheckpointError)
    assert error.where == str(folder / name)
    assert "dangling link to `../blobs/gone`" in error.message


def test_shard_without_a_tensor_of_the_index(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", num_shards=2)
    tensors = load_file(folder / SHARD_2)
    gone = sorted(tensors)[0]
    save_file({name: tensors[name] for name in tensors if name != gone}, folder / SHARD_2)
    message = refusal(folder).message
    assert message == f"the index puts `{gone}` in {SHARD_2}, which does not hold it"


def test_index_that_names_only_some_tensors(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", num_shards=2)
    gone = sorted(load_file(folder / SHARD_2))[0]
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop(gone))
    message = refusal(folder).message
    assert message == f"{SHARD_2} holds `{gone}`, which the index does not put there"


def test_total_size_is_informative_only(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", num_shards=2)
    edit_json(folder / INDEX, lambda index: index["metadata"].update(total_size=7))
    (note,) = HfCheckpoint.open(folder).notes
    assert "says 7 bytes in total" in note


@pytest.mark.parametrize(
    "file",
    [
        "../x.safetensors",
        "/x.safetensors",
        "a\\b.safetensors",
        "x.bin",
        "",
        3,
        ".safetensors",
        None,
    ],
    ids=repr,
)
def test_index_may_name_only_plain_safetensors_files(tmp_path: Path, file: object) -> None:
    folder = write_tiny(tmp_path / "tiny", num_shards=2)
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({HEAD: file}))
    assert "expected a plain .safetensors file name" in refusal(folder).message


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"], ids=repr)
def test_index_without_a_map(tmp_path: Path, weight_map: object) -> None:
    folder = write_tiny(tmp_path / "tiny", num_shards=2)
    edit_json(folder / INDEX, lambda index: index.update(weight_map=weight_map))
    assert (refusal(folder).where or "").endswith("#weight_map")


def test_single_file_is_taken_before_an_index(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", num_shards=2)
    write_weights(folder, tiny_tensors(tiny_config()))
    assert HfCheckpoint.open(folder).notes == (f"took model.safetensors, ignored {INDEX}",)
