"""The table of `make bench`, from answers that were made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import table
from tests.benchmarks.cases import BUNDLES, CASES, Case, Goal

CASE = Case(
    "decode", "bf16", ("--workload", "decode"), "decode_tok_s", "tok/s",
    ("openvino", "openvino-paged"), ("short",), (Goal("openvino-paged", 1.5),),
)  # fmt: skip
MACHINE = {
    "cpu": "a cpu",
    "threads": 2,
    "read_bytes_s": 70e9,
    "bf16_flop_s": 9e11,
    "f32_flop_s": 5e11,
}
ANSWER = {
    "date": "2026-03-01",
    "machine": MACHINE,
    "versions": {"torch": "2.13.0"},
    "rows": [
        {"method": "aoti, 2 threads", "decode_tok_s": 150.0, "notes": "", "roofline_share": 0.6},
        {
            "method": "openvino-paged (x 1), bf16, 2 threads",
            "decode_tok_s": 100.0,
            "decode_tok_s_range": [90.0, 110.0],
            "notes": "tokens equal: 4 of 4",
        },
    ],
}


def test_ratios_and_goals() -> None:
    own, peer, missing = table.lines_of(table.Found(CASE, ANSWER, {"openvino": "why"}))
    assert own == ("decode", "aoti", "150.0 tok/s", "60%", "-", "-", "-")
    assert peer == (
        *("decode", "openvino-paged (x 1), bf16", "100.0 tok/s (90.0-110.0)", "-"),
        *("1.50", "1.50: met", "tokens equal: 4 of 4"),
    )
    assert missing == ("decode", "openvino", "not measured", "-", "-", "-", "why")


def test_shorter_times_are_better() -> None:
    case = Case("load", "bf16", (), "load_s", "s")
    assert table.ratio_of(case, {"load_s": 2.0}, {"load_s": 1.0}) == 0.5
    assert table.shown(case, {"load_s": 2.0}) == "2.00 s"
    assert Goal("", 1.0).judge(0.5) == "1.00: missed"


def test_an_engine_that_fails_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[Any]] = []

    def run(words: list[Any]) -> tuple[dict[str, Any], str]:
        calls.append(words)
        lacks = len(calls) == 1
        return ({}, "openvino-paged: not installed") if lacks else (ANSWER, "")

    monkeypatch.setattr(table, "run", run)
    found = table.measure(CASE, Path("f"), 3)
    assert found.missing == {"openvino-paged": "openvino-paged: not installed"}
    words = [
        "bench",
        Path("f/bf16"),
        "--workload",
        "decode",
        "--runs",
        3,
        "--beside",
        Path("f/short"),
    ]
    peers = ["--compare", "openvino", "--compare", "openvino-paged"]
    assert calls == [words + peers, words + peers[:2]]


def test_a_bundle_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "run", lambda words: ({}, "f/bf16: damaged"))
    found = table.measure(CASE, Path("f"), 3)
    assert [line[1:3] for line in table.lines_of(found)] == [("the bundle", "not measured")]
    assert table.heading([found]) == "Nothing was measured."


def test_the_size_of_a_bundle(tmp_path: Path) -> None:
    for name, size in (("weights.safetensors", 1000), ("a.pt2", 20), ("a.onnx", 29)):
        (tmp_path / name).write_bytes(b"x" * size)
    line = table.size_line(tmp_path)
    assert line[4:6] == ("1.049", "at most 1.05: met")
    assert line[6].startswith("2 programs")


def test_the_table_takes_the_place_of_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "B.md"
    path.write_text("# Before\n")
    text = table.markdown([table.Found(CASE, ANSWER)], ["llama-export bench"], [])
    for _ in range(2):
        table.write(path, text)
    assert path.read_text() == f"# Before\n{table.BEGIN}{text}{table.END}"
    assert "2026-03-01, a cpu, 2 threads; between the runs it read 70 to 70 GB/s" in text
    assert text.splitlines()[-3].startswith("| --- | --- |")


def test_cases_name_bundles_that_are_built() -> None:
    assert {name for case in CASES for name in (case.bundle, *case.beside)} <= set(BUNDLES)
    assert len({case.name for case in CASES}) == len(CASES)
