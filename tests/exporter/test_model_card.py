"""The licence that a checkpoint names."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_export.checkpoint.gguf import GgufCheckpoint
from llama_export.checkpoint.hf import HfCheckpoint
from llama_export.checkpoint.model_card import MAX_CARD_BYTES, MODEL_CARD, read_license
from tests.tiny import write_tiny
from tests.tiny_gguf import write_tiny_gguf

CARDS = {
    "an identifier": ("---\nlicense: apache-2.0\ntags: [x]\n---\n# A model\n", "apache-2.0"),
    "a name of its own": ("---\nlicense: other\nlicense_name: llama-9\n---\n", "llama-9"),
    "other, without a name": ("---\nlicense: other\n---\n", "other"),
    "no front matter": ("# license: mit\n", None),
    "no licence": ("---\ntags: []\n---\n", None),
    "no text": ("---\nlicense: [mit]\n---\n", None),
    "control characters": ('---\nlicense: "mit\\e[1m"\n---\n', None),
    "too long": (f"---\nlicense: {'x' * 101}\n---\n", None),
    "bad YAML": ("---\nlicense: [\n---\n", None),
    "a list": ("---\n- mit\n---\n", None),
    "too large": ("---\nlicense: mit\n---\n" + " " * MAX_CARD_BYTES, None),
}


@pytest.mark.parametrize("name", CARDS)
def test_a_card(tmp_path: Path, name: str) -> None:
    text, expected = CARDS[name]
    (tmp_path / MODEL_CARD).write_text(text)
    assert read_license(tmp_path) == expected


def test_no_card_or_one_that_is_no_text(tmp_path: Path) -> None:
    assert read_license(tmp_path) is None
    (tmp_path / MODEL_CARD).write_bytes(b"\xff\xfe")
    assert read_license(tmp_path) is None


def test_a_checkpoint_tells_its_licence(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    assert HfCheckpoint.open(folder).source.license is None
    (folder / MODEL_CARD).write_text("---\nlicense: mit\n---\n")
    assert HfCheckpoint.open(folder).source.license == "mit"


def test_a_gguf_file_tells_its_licence(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    path = write_tiny_gguf(tmp_path, folder, metadata={"general.license": "apache-2.0"})
    assert GgufCheckpoint.open(path).source.license == "apache-2.0"
