"""The readers of what nobody vouches for, under sanitizers: the table of faults, and fuzzing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.artifacts.test_malformed import TABLE
from tests.cpp.building import SOURCE, configure
from tests.cpp.test_format import complaints, wrong_lines

pytestmark = [pytest.mark.slow, pytest.mark.long]

SECONDS = int(os.environ.get("LLAMA_RUNTIME_FUZZ_SECONDS", "10"))


@pytest.fixture(scope="module")
def hardened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The readers, without torch, built by clang with address and undefined-behaviour checks."""
    folder = tmp_path_factory.mktemp("hardened")
    compilers = ("-DCMAKE_C_COMPILER=clang", "-DCMAKE_CXX_COMPILER=clang++")
    sanitizers = "-DLLAMA_RUNTIME_SANITIZE=address,undefined"
    configure(SOURCE, folder, *compilers, sanitizers, "-DLLAMA_RUNTIME_FUZZ=ON")
    return folder / "fuzz"


@pytest.mark.parametrize(
    ("target", "file"),
    [("fuzz_manifest", "manifest.json"), ("fuzz_safetensors", "weights.safetensors")],
)
def test_no_bytes_break_a_reader(target: str, file: str, hardened: Path, tmp_path: Path) -> None:
    content = TABLE["base"][file]
    seed = bytes.fromhex(content["hex"]) if "hex" in content else content["text"].encode()
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "sound").write_bytes(seed)
    options = (f"-max_total_time={SECONDS}", "-rss_limit_mb=2048", "-timeout=10")
    done = subprocess.run(
        [hardened / target, corpus, *options], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_table_of_malformed_bundles_under_sanitizers(hardened: Path, tmp_path: Path) -> None:
    assert not wrong_lines(complaints(hardened / "complain", tmp_path))
