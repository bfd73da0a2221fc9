"""C++ under sanitizers: the readers of what nobody vouches for, fuzzed; then the whole library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.artifacts.test_malformed import TABLE
from tests.cpp.building import SOURCE, configure
from tests.cpp.test_format import complaints, wrong_lines

pytestmark = pytest.mark.slow

LONG = int(os.environ.get("LLAMA_RUNTIME_FUZZ_SECONDS", "60"))
SECONDS = [8, pytest.param(LONG, marks=pytest.mark.long)]
TARGETS = {"fuzz_manifest": "manifest.json", "fuzz_safetensors": "weights.safetensors"}
ONCE_BROKE = {"fuzz_manifest": ("\U00029314".encode(),), "fuzz_safetensors": ()}
"""Inputs with which a reader failed, given to it again each time."""
SANITIZERS = ("address,undefined", "thread")


def _build(folder: Path, sanitizers: str, *options: str) -> Path:
    if shutil.which("clang++") is None:
        pytest.skip("no clang++: apt-get install clang libclang-rt-dev")
    compilers = ("-DCMAKE_C_COMPILER=clang", "-DCMAKE_CXX_COMPILER=clang++")
    configure(SOURCE, folder, *compilers, f"-DLLAMA_RUNTIME_SANITIZE={sanitizers}", *options)
    return folder


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The readers, without torch, with address and undefined-behaviour checks."""
    folder = tmp_path_factory.mktemp("readers")
    return _build(folder, SANITIZERS[0], "-DLLAMA_RUNTIME_FUZZ=ON") / "fuzz"


@pytest.mark.parametrize("seconds", SECONDS)
def test_no_bytes_break_a_reader(readers: Path, tmp_path: Path, seconds: int) -> None:
    """Both targets at once."""
    options = (f"-max_total_time={seconds}", "-rss_limit_mb=2048", "-timeout=10")
    # The limit is held against `ru_maxrss`, which a program takes over from the process that started
    # it: here from a shell, not from a process of tests with gigabytes of its own.
    through_shell = ("sh", "-c", '"$@"; exit $?', "sh")
    processes = []
    for target, file in TARGETS.items():
        base = TABLE["base"][file]
        seed = bytes.fromhex(base["hex"]) if "hex" in base else base["text"].encode()
        corpus = tmp_path / target
        corpus.mkdir()
        for i, content in enumerate((seed, *ONCE_BROKE[target])):
            (corpus / str(i)).write_bytes(content)
        with (tmp_path / f"{target}.log").open("w") as log:
            command = [*through_shell, readers / target, corpus, *options]
            processes.append(subprocess.Popen(command, cwd=tmp_path, stderr=log))
    statuses = [process.wait() for process in processes]
    logs = [(tmp_path / f"{target}.log").read_text() for target in TARGETS]
    assert statuses == [0, 0], "\n".join(log[-2000:] for log in logs)
    # Each input that reaches new code is kept, so that a target that reads nothing shows.
    assert all(len(list((tmp_path / target).iterdir())) > 50 for target in TARGETS)


def test_the_table_of_malformed_bundles_under_sanitizers(readers: Path, tmp_path: Path) -> None:
    assert not wrong_lines(complaints(readers / "complain", tmp_path))


@pytest.fixture(scope="module", params=SANITIZERS)
def sanitized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole library; torch itself is as it was built."""
    folder = tmp_path_factory.mktemp("sanitized")
    python = f"-DPython3_EXECUTABLE={sys.executable}"
    return _build(
        folder, request.param, python, "-DLLAMA_RUNTIME_TESTS=ON", "-DCMAKE_CXX_FLAGS=-O1 -g1"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("tests/threads", ["aoti"]),
        ("tests/from_c", []),
        ("llama-run", ["--vectors"]),
        ("llama-run", ["--tokens", "1 10 7", "--temperature", "0.9", "--top-p", "0.8"]),
    ],
)
def test_no_sanitizer_complains(
    program: str, options: list[str], sanitized: Path, tiny_bundle: Path
) -> None:
    # Compiled programs never free the handles of the constants that they are given.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sanitized / program, tiny_bundle, *options],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Sanitizer" not in done.stderr
