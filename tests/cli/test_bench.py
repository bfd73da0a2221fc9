from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.bundle import open_bundle
from llama_export.bench import building, rounds, serving
from llama_export.page.timings import (
    Latency,
    Machine,
    Timing,
    Timings,
    Workload,
    read_timings,
)
from tests.cli.running import invoke
from tests.cli.synthetic import PAGED, PROGRAMS, write_bundle

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
    assert workload == "decode: prompt 32, rows 1, new tokens 32, runs 5"
    assert machine.endswith("reads 80.0 GB/s, products bf16 900, f32 500 GFLOP/s")
    assert (settings[0].peers, settings[0].formats) == (("transformers",), (None,))


def test_json_and_record_are_the_same(settings: list[Any], tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    result = invoke("bench", bundle, "--record", "--json", "--threads", 3)
    assert json.loads(result.stdout) == json.loads((bundle / "bench.json").read_text())
    assert read_timings(open_bundle(bundle)) == ROWS
    assert settings[0].threads == 3


def test_the_table_of_a_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    rows = (Timing("decode aoti, made", build_s=30.5, build_s_range=(30.0, 31.0), disk_bytes=500),)

    def measure(setting: Any, scratch: Path, **others: Any) -> Timings:
        seen.append(setting)
        return Timings(rows, "2026-03-01", {}, MACHINE, Workload("build", 1, 1, 1))

    monkeypatch.setattr(building, "measure", measure)
    result = invoke("bench", write_bundle(tmp_path / "b"), "--workload", "build")
    assert "30.50 (30.00-31.00)" in result.stdout.splitlines()[1]
    assert seen[0].runs == 1


def test_a_bundle_beside_another(settings: list[Any], tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "other")
    result = invoke("bench", write_bundle(tmp_path / "b"), "--beside", other)
    assert result.exit_code == 0
    assert (settings[0].beside, settings[0].runs) == ((other,), 5)


SERVED = Timings(
    (
        Timing(
            "aoti, 8 at a time",
            decode_tok_s=50.0,
            decode_tok_s_range=(49.0, 52.5),
            peak_memory_bytes=412_000_000,
            notes="4.17 x one at a time",
            latency=Latency((1, 2, 3), (0.5, 0.6, 0.7), 4, 9, 150.25, (149.0, 151.0), 0.054),
        ),
        Timing("aoti, 1 at a time", decode_tok_s=12.0, latency=Latency((1, 2, 3), (), 1, 9)),
    ),
    "2026-03-01",
    {},
    MACHINE,
    Workload("serve", 1024, 8, 5, requests=2000, concurrency=8, alone=16),
)


def test_the_table_of_serving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings: list[Any] = []

    def measure(setting: Any, scratch: Path, **others: Any) -> Timings:
        settings.append(setting)
        return SERVED

    monkeypatch.setattr(serving, "measure", measure)
    bundle = write_bundle(tmp_path / "b", programs=(*PROGRAMS, PAGED))
    words = ("--workload", "serve", "--requests", 2000, "--concurrency", 8, "--alone", 7)
    lines = invoke("bench", bundle, *words).stdout.splitlines()
    assert [re.split(r"  +", line, maxsplit=1)[0] for line in lines[1:9]] == [
        "new tokens/s",
        "tokens/s with prompts",
        "first token ms, p50 / p95 / p99",
        "next token ms, p50 / p95 / p99",
        "pages at most",
        "outside of programs",
        "memory",
        "notes",
    ]
    cells = [line[len("first token ms, p50 / p95 / p99") :].strip() for line in lines[:9]]
    assert [re.split(r"  +", cell) for cell in cells] == [
        ["AOTI, 8 AT A TIME", "AOTI, 1 AT A TIME"],
        ["50.0 (49.0-52.5)", "12.0"],
        ["150.2 (149.0-151.0)", "-"],
        ["1.0 / 2.0 / 3.0", "1.0 / 2.0 / 3.0"],
        ["0.5 / 0.6 / 0.7", "-"],
        ["4 of 9", "1 of 9"],
        ["5.4%", "-"],
        ["412.0 MB", "-"],
        ["4.17 x one at a time", "-"],
    ]
    assert lines[10] == "serve: 2,000 requests, prompts up to 1,024, new tokens 8, runs 5"
    (setting,) = settings
    assert (setting.requests, setting.concurrency, setting.alone) == (2000, 8, 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "serve", "--compare", "transformers"], "one request at a time, no PEER"),
        (["--workload", "build", "--beside", "a"], "compares with the cache, no PEER"),
        (["--workload", "serve", "--format", "pt2", "--format", "onnx"], "takes one `--format`"),
        (["--workload", "load", "--plot", "a.png"], "needs the workload decode or prefill"),
        (["--plot", "a.pdf"], "expected `--plot` FILE.png or FILE.svg, got `a.pdf`"),
        (["--compare", "vllm"], "'vllm' is not one of"),
        (["--runs", "0"], "0 is not in the range"),
        (["--alone", "4"], "`--alone` needs `--workload serve`, got decode"),
        (
            ["--requests", "4", "--workload", "load"],
            "`--requests` needs `--workload serve`, got load",
        ),
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
