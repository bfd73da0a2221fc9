"""The plan for eight cards in runtime/README.md: every number follows from sizes and data sheet."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from llama_artifacts.bundle import open_bundle
from llama_artifacts.manifest import Cut, Manifest
from llama_artifacts.per_rank import collectives
from llama_artifacts.signature import Signature, TensorSpec
from llama_export.checkpoint.config import LlamaConfig, RopeConfig
from llama_export.checkpoint.layout import linear_shapes, parameter_count
from tests.cli.synthetic import PAGED, write_bundle

PAGE = (Path(__file__).parents[2] / "runtime" / "README.md").read_text()
N, T = 8, 2
MEMORY, PEAK, NVLINK, PCIE, ETHERNET = 3.35e12, 989e12, 450e9, 64e9, 12.5e9
COLLECTIVES, COLLECTIVE = 161, 10e-6
CONFIG = LlamaConfig(
    vocab_size=128_256,
    hidden_size=8_192,
    intermediate_size=28_672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=5e5),
    max_position=8_192,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
)
EMBEDDING = CONFIG.vocab_size * CONFIG.hidden_size
MATRICES = sum(rows * columns for rows, columns in linear_shapes(CONFIG).values())


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Of a paged step of the model of the page, of eight shards."""
    sizes = {name: getattr(CONFIG, name) for name in ("vocab_size", "hidden_size", "num_layers")}
    signature = PAGED.signature
    logits = TensorSpec("logits", "bf16", ("Rows", CONFIG.vocab_size))
    signature = Signature(signature.inputs, signature.states, (logits,), signature.dims)
    program = replace(PAGED, signature=signature, shards=N)
    cuts = {"lm_head.weight": Cut("lm_head.weight", "rows")}
    folder = write_bundle(tmp_path_factory.mktemp("plan") / "b", programs=(program,), cuts=cuts)
    manifest = open_bundle(folder).manifest
    return replace(manifest, model=replace(manifest.model, **sizes))


def sent(manifest: Manifest) -> tuple[float, float, float]:
    """Bytes summed, gathered, and sent by a card around a ring, for a row of a step."""
    sums, gathered = collectives(manifest, manifest.programs[0])
    around = 2 * (N - 1) / N * sums.num_bytes + (N - 1) / N * gathered.num_bytes
    return sums.num_bytes, gathered.num_bytes, around


def has(*texts: str) -> None:
    for text in texts:
        assert re.search(rf"(?<![\d.,]){re.escape(text)}(?!\d)", PAGE), text


def test_the_memory_of_a_card() -> None:
    assert MATRICES + EMBEDDING + (2 * CONFIG.num_layers + 1) * CONFIG.hidden_size == (
        parameter_count(CONFIG)
    )
    part, whole = MATRICES * T / N, EMBEDDING * T
    has(f"{MATRICES:,}", f"{part / 1e9:.2f} GB", f"{whole / 1e9:.2f} GB")
    has(f"{(part + whole) / 1e9:.2f} GB")
    position = 2 * CONFIG.num_layers * CONFIG.num_kv_heads // N * CONFIG.head_dim * T
    has(f"{position:,} B")
    assert 1.4e6 < (80e9 - part - whole) / position < 1.5e6


def test_the_bytes_over_the_link(manifest: Manifest) -> None:
    sums, gathered, around = sent(manifest)
    found = collectives(manifest, manifest.programs[0])
    assert sum(one.count for one in found) == COLLECTIVES
    has(f"{COLLECTIVES} a step")
    has(f"{sums / 1e6:.2f} MB a row", f"{gathered / 1e6:.2f} MB a row", f"{around / 1e6:.2f} MB")
    prompt = 2048 * 2 * (N - 1) / N * sums + (N - 1) / N * gathered
    arithmetic = 2048 * 2 * MATRICES / N / PEAK
    has(f"{prompt / 1e9:.2f} GB", f"{prompt / NVLINK * 1e3:.1f} ms", f"{arithmetic * 1e3:.1f} ms")
    halved = prompt - 2048 * (N - 1) / N * sums
    has(f"half, {halved / NVLINK * 1e3:.1f} ms")


def test_the_break_even_batch(manifest: Manifest) -> None:
    around = sent(manifest)[2]
    read, arithmetic = MATRICES * T / N / MEMORY, 2 * MATRICES / N / PEAK
    calls = COLLECTIVES * COLLECTIVE
    has(f"{read * 1e3:.2f} ms", f"{arithmetic * 1e6:.1f} us", f"{calls * 1e3:.2f} ms")
    has(f"{(read + calls + around / NVLINK) * 1e3:.2f}", f"R = {read / arithmetic:.0f}")
    for link, digits in ((NVLINK, 1), (PCIE, 0), (ETHERNET, 0)):
        has(f"| {around / link * 1e6:.{digits}f} us | {read / (around / link):.0f} |")
    saved, per_row = (N - 1) * read, (N - 1) * arithmetic
    has(f"{saved * 1e3:.1f} ms", f"{per_row * 1e6:.0f} us")
    for link in (PCIE, ETHERNET):
        last, less = saved / (around / link), COLLECTIVES * 1e-6 / (around / link)
        assert last - 10 * less < read / arithmetic  # before arithmetic is what is saved
        has(f"| {last:.0f}, less {less:.2f} for")
    assert per_row > around / NVLINK
    assert saved > read / arithmetic * around / NVLINK + calls
