"""Stop tokens, tokenizers and chat templates of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from llama_artifacts.errors import TokenizerError
from llama_export.checkpoint.hf import HfCheckpoint
from tests.exporter.folders import edit_json, refusal
from tests.tiny import ABSENT, CHAT_TEMPLATE, write_tiny


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
