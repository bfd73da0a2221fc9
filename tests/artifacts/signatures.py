"""Signatures that tests spoil, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.errors import LlamaExportError
from llama_artifacts.manifest import SIGNATURE_NAME
from llama_artifacts.signing import Verifier, open_signed


def refused(folder: Path, verifier: Verifier) -> LlamaExportError:
    with pytest.raises(LlamaExportError) as caught:
        open_signed(folder, verifier)
    assert str(caught.value).isprintable()
    assert caught.value.hint
    return caught.value


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / SIGNATURE_NAME
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))
