from __future__ import annotations

import pytest

from llama_runtime.tokenizer import Tokenizer
from tests.tiny import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte, and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 300)
    return Tokenizer.load(folder)
