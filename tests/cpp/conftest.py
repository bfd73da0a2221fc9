"""The C++ programs, built once per session of tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.conftest import shared_folder
from tests.cpp.building import SOURCE, configure

ONNXRUNTIME = os.environ.get("LLAMA_RUNTIME_ONNXRUNTIME", "")
BUILD = os.environ.get("LLAMA_RUNTIME_BUILD", "")


@pytest.fixture(scope="session")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of the library, the program and the tests' own.

    LLAMA_RUNTIME_BUILD names one that is there. LLAMA_RUNTIME_ONNXRUNTIME names a release of ONNX
    Runtime, a folder with `include` and `lib`, to build with.
    """
    if BUILD:
        return Path(BUILD)
    shared = shared_folder(tmp_path_factory)
    folder = shared / "cpp build"
    options = [f"-DPython3_EXECUTABLE={sys.executable}", "-DLLAMA_RUNTIME_TESTS=ON"]
    if ONNXRUNTIME:
        options += ["-DLLAMA_RUNTIME_ONNX=ON", f"-DOnnxRuntime_DIR={ONNXRUNTIME}"]
    with FileLock(shared / "cpp.lock"):
        configure(SOURCE, folder, *options, "-DCMAKE_CXX_FLAGS=-O1")
    return folder


@pytest.fixture(scope="session")
def onnx_build_folder(build_folder: Path) -> Path:
    if not ONNXRUNTIME:
        pytest.skip("no ONNX Runtime with headers: LLAMA_RUNTIME_ONNXRUNTIME names its folder")
    return build_folder


@pytest.fixture(scope="session")
def native_build_folder(build_folder: Path) -> Path:
    if ONNXRUNTIME:
        pytest.skip("built with ONNX Runtime: LLAMA_RUNTIME_ONNXRUNTIME is set")
    return build_folder
