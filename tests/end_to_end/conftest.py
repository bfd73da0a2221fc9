"""A real model, SmolLM2-135M-Instruct, and the bundles that the command line builds from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import llama_runtime
from tests.cli.running import environment
from tests.end_to_end.oracle import Oracle, load_oracle
from tests.models import FetchError, fetch_smollm2

DEMO = Path(__file__).parents[2] / ".demo"
MAX_SEQ = 512
KEEP_VARIABLE = "LLAMA_EXPORT_TEST_BUNDLES"
"""Names a folder where bundles are kept between runs; one that is there is not built again."""


@dataclass(frozen=True)
class Bundle:
    """What is built: every entry in every format."""

    dtype: str
    entries: tuple[str, ...]
    formats: tuple[str, ...]

    def options(self) -> list[str]:
        entries = [word for name in self.entries for word in ("--entry", name)]
        formats = [word for name in self.formats for word in ("--format", name)]
        return ["--dtype", self.dtype, *entries, *formats]


STATEFUL = ("prefill", "decode")
BUNDLES = {
    "f32": Bundle("f32", STATEFUL, ("pt2", "aoti", "onnx")),
    "bf16": Bundle("bf16", STATEFUL, ("pt2", "aoti")),
    "f32-forward": Bundle("f32", ("forward",), ("pt2", "onnx")),
    "bf16-forward": Bundle("bf16", ("forward",), ("pt2",)),
}
NUM_BUILDERS = 2
"""Builds at a time; one fills one core and needs up to 3 GiB."""


def run_cli(*args: object) -> subprocess.CompletedProcess[str]:
    """`llama-export ARGS` in a process of its own."""
    words = [sys.executable, "-m", "llama_export", *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment())


@pytest.fixture(scope="session")
def cli() -> Any:
    return run_cli


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    try:
        return fetch_smollm2(DEMO)
    except FetchError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def smollm2_bundles(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Path]]:
    """The folders of `BUNDLES` by name. Do not write into them."""
    kept = os.environ.get(KEEP_VARIABLE)
    folder = Path(kept) if kept else tmp_path_factory.mktemp("smollm2")
    folder.mkdir(parents=True, exist_ok=True)

    def build(name: str) -> Path:
        output = folder / name
        if not output.exists():
            options = ("-o", output, "--max-seq", MAX_SEQ, *BUNDLES[name].options())
            done = run_cli("build", smollm2_gguf, *options)
            assert done.returncode == 0, f"build of {name}:\n{done.stderr}"
        return output

    with ThreadPoolExecutor(NUM_BUILDERS) as pool:
        folders = dict(zip(BUNDLES, pool.map(build, BUNDLES), strict=True))
    yield folders
    if not kept:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def smollm2_f32(smollm2_bundles: dict[str, Path]) -> Path:
    """Float32: prefill and decode in every format."""
    return smollm2_bundles["f32"]


@pytest.fixture(scope="session")
def smollm2_f32_forward(smollm2_bundles: dict[str, Path]) -> Path:
    return smollm2_bundles["f32-forward"]


@pytest.fixture(scope="session")
def smollm2_bf16(smollm2_bundles: dict[str, Path]) -> Path:
    """bfloat16: prefill and decode in pt2 and aoti."""
    return smollm2_bundles["bf16"]


@pytest.fixture(scope="session")
def smollm2_bf16_forward(smollm2_bundles: dict[str, Path]) -> Path:
    return smollm2_bundles["bf16-forward"]


@pytest.fixture(scope="session")
def tokenizer(smollm2_f32: Path) -> llama_runtime.Tokenizer:
    return llama_runtime.load(smollm2_f32).tokenizer


@pytest.fixture(scope="session")
def oracle_f32(smollm2_gguf: Path) -> Oracle:
    return load_oracle(smollm2_gguf, torch.float32)


@pytest.fixture(scope="session")
def oracle_bf16(smollm2_gguf: Path) -> Oracle:
    return load_oracle(smollm2_gguf, torch.bfloat16)
