"""A signed bundle."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llama_artifacts.signing import PrivateKey, sign
from tests.bundles import write_sample
from tests.keys import Pair, write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def made(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_sample(tmp_path_factory.mktemp("made") / "bundle")
    sign(folder, PrivateKey(pair.private))
    return folder


@pytest.fixture
def signed(made: Path, tmp_path: Path) -> Path:
    """A signed bundle, to be spoiled."""
    return shutil.copytree(made, tmp_path / "bundle")
