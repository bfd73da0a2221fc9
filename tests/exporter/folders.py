"""Folders of Hugging Face checkpoints that tests change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.errors import CheckpointError, TokenizerError
from llama_artifacts.safetensors import read_header
from llama_export.checkpoint.hf import HfCheckpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


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
