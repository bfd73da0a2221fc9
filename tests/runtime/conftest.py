"""Threads, a bundle to damage and a session on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.runtime.loading import PROMPT, Loaded, copied


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny programs gain nothing from threads, and lose much where other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle to damage."""
    return copied(tiny_bundle, tmp_path / "copy")


@pytest.fixture(scope="module")
def saved(tiny_loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompt's states as one format wrote them. Do not write into it."""
    path = tmp_path_factory.mktemp("snapshot") / "prompt.safetensors"
    session = tiny_loaded["aoti"].session()
    session.prefill(PROMPT)
    session.save(path)
    return path
