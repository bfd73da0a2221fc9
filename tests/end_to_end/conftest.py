"""A real model, SmolLM2-135M-Instruct, and the bundles that the command line builds from it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import llama_runtime
from tests.cli.running import environment
from tests.cpp.building import SOURCE, configure
from tests.end_to_end.oracle import Oracle, load_oracle
from tests.end_to_end.texts import TEXT
from tests.models import FetchError, fetch_smollm2

_LOG = logging.getLogger(__name__)

DEMO = Path(__file__).parents[2] / ".demo"
MAX_SEQ = 512
NUM_TOKENS = 256
"""Of the text that logits are compared over."""
MAX_NEW = 64
QUESTION = "Why is the sky blue?"
KEEP_VARIABLE = "LLAMA_EXPORT_TEST_BUNDLES"
"""Names a folder where bundles are kept between runs; one that is there is not built again."""
FORMATS_VARIABLE = "LLAMA_EXPORT_TEST_FORMATS"
"""Formats, with commas between them, that the serving entries are built in instead of pt2 alone."""


@dataclass(frozen=True)
class Bundle:
    """What is built: every entry in every format."""

    dtype: str
    entries: tuple[str, ...]
    formats: tuple[str, ...]
    sizes: tuple[object, ...] = ()

    def options(self) -> list[object]:
        entries = [word for name in self.entries for word in ("--entry", name)]
        formats = [word for name in self.formats for word in ("--format", name)]
        sizes = ["--max-seq", MAX_SEQ, *self.sizes, "-j", 1]
        return ["--dtype", self.dtype, *entries, *formats, *sizes]


STATEFUL = ("prefill", "decode")
BUNDLES = {
    "bf16": Bundle("bf16", STATEFUL, ("aoti",)),
    "f32": Bundle("f32", STATEFUL, ("onnx",)),
}
LONG_BUNDLES = {
    "f32-pt2": Bundle("f32", STATEFUL, ("pt2",)),
    "f32-aoti": Bundle("f32", STATEFUL, ("aoti",)),
    "f32-forward": Bundle("f32", ("forward",), ("pt2", "onnx")),
    "bf16-pt2": Bundle("bf16", STATEFUL, ("pt2",)),
    "bf16-forward": Bundle("bf16", ("forward",), ("pt2",)),
}
"""What `make test-long` has too: each dtype in the formats that are left."""
SERVING = (
    *("prefill_slots", "prefill_packed", "step_packed", "decode_rows"),
    *("decode_paged", "prefill_paged", "step_paged"),
    *("generate<16>", "generate_until<32>", "log_probs_packed"),
)
SERVING_FORMATS = tuple(os.environ.get(FORMATS_VARIABLE, "pt2").split(","))
SERVING_BATCH = 3
SERVING_PAGE_LEN = 16
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
def llama_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ program; LLAMA_RUNTIME_BUILD names the folder of one that is there."""
    if built := os.environ.get("LLAMA_RUNTIME_BUILD"):
        return Path(built) / "llama-run"
    folder = tmp_path_factory.mktemp("cpp")
    configure(SOURCE, folder, f"-DPython3_EXECUTABLE={sys.executable}")
    return folder / "llama-run"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    try:
        return fetch_smollm2(DEMO)
    except FetchError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def bundles_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where bundles are built; they are large, so they go with the session unless kept."""
    kept = os.environ.get(KEEP_VARIABLE)
    folder = Path(kept) if kept else tmp_path_factory.mktemp("smollm2")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    if not kept:
        shutil.rmtree(folder)


def build(gguf: Path, output: Path, bundle: Bundle) -> Path:
    """The folder of the bundle, built unless it is there."""
    if not output.exists():
        started = time.perf_counter()
        done = run_cli("build", gguf, "-o", output, *bundle.options())
        assert done.returncode == 0, f"build of {output.name}:\n{done.stderr}"
        _LOG.info("build of %s: %.0f s", output.name, time.perf_counter() - started)
    return output


@pytest.fixture(scope="session")
def smollm2_bundles(smollm2_gguf: Path, bundles_folder: Path) -> dict[str, Path]:
    """The folders of `BUNDLES` by name. Do not write into them."""

    def build_named(name: str) -> Path:
        return build(smollm2_gguf, bundles_folder / name, BUNDLES[name])

    with ThreadPoolExecutor(NUM_BUILDERS) as pool:
        return dict(zip(BUNDLES, pool.map(build_named, BUNDLES), strict=True))


@pytest.fixture(scope="session", params=SERVING_FORMATS)
def serving_bundle(
    request: pytest.FixtureRequest, smollm2_gguf: Path, bundles_folder: Path
) -> Path:
    """Float32: what serves many rows, in one format. Do not write into it."""
    sizes = ("--batch", SERVING_BATCH, "--page-size", SERVING_PAGE_LEN)
    bundle = Bundle("f32", SERVING, (request.param,), sizes)
    return build(smollm2_gguf, bundles_folder / f"serving-{request.param}", bundle)


@pytest.fixture(scope="session")
def bundle_named(
    smollm2_bundles: dict[str, Path], smollm2_gguf: Path, bundles_folder: Path
) -> Callable[[str], Path]:
    """Any bundle by name; the long ones are built when they are first asked for."""

    def find(name: str) -> Path:
        if name in smollm2_bundles:
            return smollm2_bundles[name]
        return build(smollm2_gguf, bundles_folder / name, LONG_BUNDLES[name])

    return find


@pytest.fixture(scope="session")
def smollm2_f32(smollm2_bundles: dict[str, Path]) -> Path:
    """Float32: prefill and decode in onnx."""
    return smollm2_bundles["f32"]


@pytest.fixture(scope="session")
def smollm2_bf16(smollm2_bundles: dict[str, Path]) -> Path:
    """bfloat16: prefill and decode in aoti."""
    return smollm2_bundles["bf16"]


# In memory: of one module alone, since the models take gigabytes.


@pytest.fixture(scope="module")
def tokenizer(smollm2_f32: Path) -> llama_runtime.Tokenizer:
    return llama_runtime.load(smollm2_f32).tokenizer


@pytest.fixture(scope="module")
def oracle_f32(smollm2_gguf: Path) -> Oracle:
    return load_oracle(smollm2_gguf, torch.float32)


@pytest.fixture(scope="module")
def oracle_bf16(smollm2_gguf: Path) -> Oracle:
    return load_oracle(smollm2_gguf, torch.bfloat16)


@pytest.fixture(scope="module")
def text_tokens(tokenizer: llama_runtime.Tokenizer) -> list[int]:
    tokens = tokenizer.encode(TEXT)[:NUM_TOKENS]
    assert len(tokens) == NUM_TOKENS
    return tokens


@pytest.fixture(scope="module")
def logits_f32(oracle_f32: Oracle, text_tokens: list[int]) -> torch.Tensor:
    return oracle_f32.logits(text_tokens)


@pytest.fixture(scope="module")
def logits_bf16(oracle_bf16: Oracle, text_tokens: list[int]) -> torch.Tensor:
    return oracle_bf16.logits(text_tokens)


@pytest.fixture(scope="module")
def greedy_tokens(
    oracle_f32: Oracle, tokenizer: llama_runtime.Tokenizer
) -> tuple[list[int], list[int]]:
    """A chat prompt and the tokens that `transformers` continues it with."""
    prompt = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    return prompt, oracle_f32.greedy(prompt, max_new=MAX_NEW)
