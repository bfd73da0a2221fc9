from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from llama_artifacts.errors import CheckpointError, TokenizerError
from llama_artifacts.safetensors import read_header
from llama_export.checkpoint.hf import HfCheckpoint
from llama_export.checkpoint.layout import expected_tensors
from llama_export.checkpoint.source import Checkpoint, Source
from tests.tiny import ABSENT, CHAT_TEMPLATE, tiny_config, tiny_tensors, write_tiny, write_weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHARD_2 = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def cut_to_headers(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        os.truncate(path, read_header(path).data_start)


def refusal(
    folder: Path, error: type[CheckpointError | TokenizerError] = CheckpointError, **options: Any
) -> CheckpointError | TokenizerError:
    with pytest.raises(error) as caught:
        HfCheckpoint.open(folder, **options)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


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


# --- what is no checkpoint ------------------------------------------------------------------------


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


# --- stop tokens and tokenizer --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, [2, 5], (2, 5)),
        (2, 3, (2, 3)),
        ([7, 4], None, (4, 7)),
        (None, [6], (6,)),
        (ABSENT, ABSENT, ()),
        (0, ABSENT, (0,)),
    ],
    ids=repr,
)
def test_stop_tokens_are_a_union(
    tmp_path: Path, config: object, generation: object, expected: tuple[int, ...]
) -> None:
    folder = write_tiny(tmp_path / "tiny", eos_token_id=config)
    if generation is not ABSENT:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    checkpoint = HfCheckpoint.open(folder)
    assert checkpoint.stop_tokens == expected
    assert any("no stop token" in note for note in checkpoint.notes) == (not expected)


def test_stop_token_outside_the_vocabulary(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", eos_token_id=[2, 128])
    error = refusal(folder, TokenizerError)
    assert error.message == "stop token 128 is outside the vocabulary of 128"


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    add = {"id": 128, "content": "<extra>", "special": True}
    edit_json(folder / "tokenizer.json", lambda values: values["added_tokens"].append(add))
    error = refusal(folder, TokenizerError)
    assert error.message == "token `<extra>` has id 128, the model's vocab_size is 128"


TOKENIZERS: dict[str, tuple[Any, str]] = {
    "no model": ({}, "expected model.vocab"),
    "vocab a string": ({"model": {"vocab": "x"}}, "expected model.vocab"),
    "id a string": ({"model": {"vocab": {"a": "0"}}}, "non-negative id for token `a`"),
    "id negative": ({"model": {"vocab": {"a": -1}}}, "non-negative id for token `a`"),
    "id a boolean": ({"model": {"vocab": {"a": True}}}, "non-negative id for token `a`"),
    "list too long": ({"model": {"vocab": [["a", 0.0]] * 129}}, "has id 128"),
    "added a string": ({"model": {"vocab": {}}, "added_tokens": "x"}, "a list of objects"),
    "added of strings": ({"model": {"vocab": {}}, "added_tokens": ["x"]}, "a list of objects"),
    "added without id": ({"model": {"vocab": {}}, "added_tokens": [{}]}, "non-negative id"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_malformed_tokenizer_is_refused(tmp_path: Path, case: str) -> None:
    values, message = TOKENIZERS[case]
    folder = write_tiny(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text(json.dumps(values))
    assert message in refusal(folder, TokenizerError).message


@pytest.mark.parametrize("has_sentencepiece", [False, True])
def test_checkpoint_without_tokenizer(tmp_path: Path, has_sentencepiece: bool) -> None:
    folder = write_tiny(tmp_path / "tiny", has_tokenizer=False)
    if has_sentencepiece:
        (folder / "tokenizer.model").write_bytes(b"x")
    checkpoint = HfCheckpoint.open(folder)
    (note,) = checkpoint.notes
    assert note.startswith("no tokenizer.json")
    assert ("tokenizer.model" in note) == has_sentencepiece
    assert set(checkpoint.assets()) == {"config.json"}


def test_assets_are_copies_and_the_template_a_file(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    (folder / "generation_config.json").write_text("{}")
    assets = HfCheckpoint.open(folder).assets()
    assert assets.pop("chat_template.jinja").decode() == CHAT_TEMPLATE
    assert set(assets) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert all((folder / name).read_bytes() == data for name, data in assets.items())


@pytest.mark.parametrize(
    ("in_config", "in_file", "expected"),
    [
        (None, None, None),
        ("a", "b", "b"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], None, "d"),
        ([{"name": "tool_use", "template": "t"}], None, None),
    ],
    ids=["none", "file wins", "named", "no default"],
)
def test_chat_template(
    tmp_path: Path, in_config: object, in_file: str | None, expected: str | None
) -> None:
    folder = write_tiny(tmp_path / "tiny")
    edit_json(
        folder / "tokenizer_config.json", lambda values: values.update(chat_template=in_config)
    )
    if in_file is not None:
        (folder / "chat_template.jinja").write_text(in_file)
    template = HfCheckpoint.open(folder).assets().get("chat_template.jinja")
    assert (None if template is None else template.decode()) == expected


def test_chat_template_of_another_type(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    edit_json(folder / "tokenizer_config.json", lambda values: values.update(chat_template=3))
    with pytest.raises(TokenizerError, match="named templates"):
        HfCheckpoint.open(folder).assets()


@pytest.mark.parametrize("vocab_size", [128, 320])
def test_tiny_tokenizer_round_trips(tmp_path: Path, vocab_size: int) -> None:
    folder = write_tiny(tmp_path / "tiny", vocab_size=vocab_size)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "def f(x):\n    return x  # 12 + 3" + (" žluť 😀" if vocab_size == 320 else "")
    ids = tokenizer.encode(text).ids
    assert ids[0] == 1
    assert max(ids) < vocab_size
    assert tokenizer.decode(ids) == text


def test_tokenizer_of_a_far_smaller_vocabulary(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", vocab_size=128)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] = {"a": 0}
    tokenizer["added_tokens"] = []
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(TokenizerError, match="has 1 tokens, less than half of") as caught:
        HfCheckpoint.open(folder)
    assert caught.value.hint == "the tokenizer belongs to another model"
