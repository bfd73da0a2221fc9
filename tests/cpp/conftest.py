"""The C++ programs, built once per session of tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.conftest import shared_folder
from tests.cpp.building import SOURCE, configure


@pytest.fixture(scope="session")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of the library, the program and the tests' own; LLAMA_RUNTIME_BUILD names one."""
    if built := os.environ.get("LLAMA_RUNTIME_BUILD"):
        return Path(built)
    shared = shared_folder(tmp_path_factory)
    folder = shared / "cpp build"
    with FileLock(shared / "cpp.lock"):
        python = f"-DPython3_EXECUTABLE={sys.executable}"
        configure(SOURCE, folder, "-DLLAMA_RUNTIME_TESTS=ON", "-DCMAKE_CXX_FLAGS=-O1", python)
    return folder
