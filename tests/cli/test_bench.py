from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.bundle import open_bundle
from llama_export.bench import rounds, serving
from llama_export.page.timings import (
    Latency,
    Machine,
    Timing,
    Timings,
    Workload,
    read_timings,
)
from tests.cli.running import invoke
from tests.cli.synthetic import write_bundle

MACHINE = Machine("a cpu", 2, 80e9, 900e9, 500e9)
ROWS = (
    Timing(
        "aoti, 2 threads", 57.25, 101.5, 1.25, 412_000_000, "", (56.0, 58.5), (99.0, 103.5), (),
        270_000_000, 0.345,
    ),
    Timing("other, 2 threads", None, 31.0, 3.0, notes="tokens equal: 128 of 128"),
)  # fmt: skip
DECODE = Timings(ROWS, "2026-03-01", {}, MACHINE, Workload("decode", 32, 32, 5))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    settings: list[Any] = []

    def measure(setting: Any, scratch: Path, **others: Any) -> Timings:
        settings.append(setting)
        return DECODE

    monkeypatch.setattr(rounds, "measure", measure)
    return settings


def test_the_table(settings: list[Any], tmp_path: Path) -> None:
    result = invoke("bench", write_bundle(tmp_path / "b"), "--compare", "transformers")
    assert result.exit_code == 0
    head, own, peer, _, workload, machine = result.stdout.splitlines()
    assert head.split("  ")[0] == "METHOD"
    for text in ("101.5 (99.0-103.5)", "57.2 (56.0-58.5)", "1.25", "412.0 MB", "34.5%"):
        assert text in own
    assert "tokens equal: 128 of 128" in peer
    assert workload == "decode: prompt 32, new tokens 32, rows 1, runs 5"
    assert machine.endswith("reads 80.0 GB/s, products bf16 900, f32 500 GFLOP/s")
    assert (settings[0].peers, settings[0].formats) == (("transformers",), (None,))


def test_json_and_record_are_the_same(settings: list[Any], tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    result = invoke("bench", bundle, "--record", "--json", "--threads", 3)
    assert json.loads(result.stdout) == json.loads((bundle / "bench.json").read_text())
    assert read_timings(open_bundle(bundle)) == ROWS
    assert settings[0].threads == 3


def test_the_table_of_serving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from llama_export.bench import setting

    latency = Latency((1.0, 2.0, 3.0), (0.5, 0.6, 0.7), 4, 9)
    rows = (Timing("aoti, 4 at a time", 1.0, 50.0, latency=latency),)
    work = Workload("serve", 32, 8, 5, requests=16, concurrency=4)
    timings = Timings(rows, "2026-03-01", {}, MACHINE, work)
    monkeypatch.setattr(serving, "measure", lambda *args, **others: timings)
    monkeypatch.setattr(setting, "_STEP", {})
    result = invoke("bench", write_bundle(tmp_path / "b"), "--workload", "serve")
    row = result.stdout.splitlines()[1].split()
    assert row[-12:] == [
        "time",
        "50.0",
        "1.0",
        "2.0",
        "3.0",
        "0.5",
        "0.6",
        "0.7",
        "4",
        "of",
        "9",
        "-",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "serve", "--compare", "transformers"], "one request at a time, no PEER"),
        (["--workload", "serve", "--format", "pt2", "--format", "onnx"], "takes one `--format`"),
        (["--workload", "load", "--plot", "a.png"], "needs the workload decode or prefill"),
        (["--plot", "a.pdf"], "expected `--plot` FILE.png or FILE.svg, got `a.pdf`"),
        (["--compare", "vllm"], "'vllm' is not one of"),
        (["--runs", "0"], "0 is not in the range"),
    ],
)
def test_wrong_usage(words: list[str], message: str) -> None:
    result = invoke("bench", "b", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_plot_without_its_library_is_refused_before_the_work(
    settings: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("bench", write_bundle(tmp_path / "b"), "--plot", "roof.png")
    assert result.exit_code == 1
    assert "pip install 'llama-export[bench]'" in result.stderr
    assert not settings
