"""The workload `build`, and the memory of a tree of processes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.errors import BuildError, CompatibilityError
from llama_artifacts.manifest import Quantized
from llama_export.bench import building, memory
from llama_export.bench.building import Built
from llama_export.bench.setting import Setting, make_setting
from llama_export.checkpoint.open import open_checkpoint
from llama_export.checkpoint.source import TensorInfo
from llama_export.report import Reporter
from tests.cli.synthetic import write_bundle
from tests.exporter.benches import Fake


def make(folder: Path, **options: Any) -> Setting:
    return make_setting(write_bundle(folder / "b"), "build", runs=2, threads=1, **options)


def with_config(setting: Setting, folder: Path) -> Setting:
    """The setting, with a `config.json` in the bundle."""
    model = setting.manifest.model
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "max_position_embeddings": 64,
        "tie_word_embeddings": model.tie_word_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
    }
    (setting.bundle.folder / building.CONFIG_NAME).write_text(json.dumps(config))
    files = {**setting.manifest.files, building.CONFIG_NAME: setting.manifest.files["decode.pt2"]}
    manifest = dataclasses.replace(setting.manifest, files=files, quantized=Quantized("int8", 64))
    return dataclasses.replace(
        setting, bundle=dataclasses.replace(setting.bundle, manifest=manifest)
    )


def test_the_model_of_a_rounded_bundle_is_not_rounded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    building.write_model(with_config(make(tmp_path), tmp_path), folder)
    path = folder / building.WEIGHTS_NAME
    assert path.stat().st_size > 100_000
    assert path.stat().st_blocks * 512 < 20_000  # a hole
    checkpoint = open_checkpoint(str(folder), headers_only=True)
    assert checkpoint.tensors["model.layers.1.self_attn.k_proj.weight"] == TensorInfo(
        "bf16", (32, 64)
    )


def test_a_bundle_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError, match=r"expected `config.json` in the bundle"):
        building.write_model(make(tmp_path), tmp_path)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the synthetic bundle, whose weights have no header, is taken to be built with."""
    own = {"entries": ["prefill", "decode"], "isa": "avx512", "max_seq": 64, "weights": "copy"}
    monkeypatch.setattr(building, "choices", lambda bundle: own)


def measured(tmp_path: Path, *, is_cached: bool) -> tuple[Any, list[Path]]:
    caches: list[Path] = []

    def build(folder: Path, cache: Path) -> Built:
        choices = json.loads((folder / "recipe.json").read_text())
        assert (choices["entries"], choices["formats"]) == (["decode"], ["pt2"])
        assert (choices["max_seq"], choices["weights"], "isa" in choices) == (64, "none", False)
        is_second = cache in caches
        caches.append(cache)
        seconds = (1.0 if is_second else 10.0) * len(caches)
        return Built(seconds, seconds / 2, 200, is_second and is_cached, 1000 + len(caches))

    folder = tmp_path / "scratch"
    folder.mkdir()
    timings = building.measure(
        with_config(make(tmp_path, formats=("pt2",)), tmp_path),
        folder,
        reporter=Reporter(),
        build=build,
        start_machine=lambda threads: Fake("machine", (), []),
    )
    return timings, caches


@pytest.mark.usefixtures("recipe")
def test_each_run_has_a_cache_of_its_own_twice(tmp_path: Path) -> None:
    timings, caches = measured(tmp_path, is_cached=True)
    assert [path.name for path in caches] == ["cache-0", "cache-0", "cache-1", "cache-1"]
    made, cached = timings.rows
    assert (made.method, cached.method) == ("decode pt2, made", "decode pt2, from the cache")
    assert (made.build_s, made.build_s_range, made.peak_memory_bytes) == (20, (15, 25), 1003)
    assert (cached.build_s, cached.disk_bytes) == (3, 200)
    assert cached.notes == "the program alone 1.50 s"
    assert timings.workload.name == "build"


@pytest.mark.usefixtures("recipe")
def test_a_program_that_is_made_again_is_no_cached_one(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="expected a program from the cache, got another"):
        measured(tmp_path, is_cached=False)


@pytest.mark.slow
def test_a_build_that_fails_is_told(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text('{"llama-export": 1, "entries": ["decode"]}')
    with pytest.raises(BuildError, match=r"the build fails: .*config.json"):
        building.run_build(tmp_path, tmp_path / "cache", 1)


def test_children_count() -> None:
    code = "import sys; block = b'x' * 60_000_000; print(); sys.stdin.read()"
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with memory.watched(process.pid) as peak:
            process.stdout.readline()
            time.sleep(3 * memory.INTERVAL_S)
            now = memory.tree_bytes(process.pid)
            process.stdin.close()
            process.wait()
    assert now > 60_000_000
    assert peak.num_bytes > 10_000_000
    assert memory.tree_bytes(process.pid) == 0  # it is gone
