"""Configs of the tiny model, read and refused."""

from __future__ import annotations

from typing import Any

import pytest

from llama_artifacts.errors import CheckpointError
from llama_export.checkpoint.config import read_hf_config
from tests.tiny import tiny_config

WHERE = "model/config.json"


def read(**overrides: Any) -> Any:
    return read_hf_config(tiny_config(**overrides), where=WHERE)


def refusal(**overrides: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read(**overrides)
    assert str(caught.value).startswith(WHERE)
    assert "\n" not in str(caught.value)
    return caught.value
