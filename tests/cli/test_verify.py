from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_export.report import Reporter
from tests.cli import fakes
from tests.cli.running import invoke


@dataclass(frozen=True)
class Check:
    law: str
    entry: str
    format: str
    figure: float
    limit: float
    passed: bool
    detail: str = ""


GOOD = Check("parity", "decode", "pt2", 1.25e-6, 1e-4, True)
BAD = Check("parity", "prefill", "aoti", math.nan, 1e-4, False, "first at position 3")


def install(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> list[Any]:
    calls: list[Any] = []

    def verify(
        folder: Path, *, reporter: Reporter, formats: Sequence[str] | None = None
    ) -> tuple[Check, ...]:
        calls.append((folder, formats))
        with reporter.step("check decode pt2"):
            return checks

    fakes.install(monkeypatch, "llama_export.verify", verify=verify)
    return calls


def test_a_figure_for_each_check(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install(monkeypatch, GOOD)
    result = invoke("verify", "a bundle")
    assert result.exit_code == 0
    assert "parity  decode  pt2     1.25e-06  0.0001  ok" in result.stdout
    assert "1 of 1 checks passed" in result.stdout
    assert result.stderr == "check decode pt2: 0.0 s\n"
    assert calls == [(Path("a bundle"), None)]


def test_formats_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install(monkeypatch, GOOD)
    assert invoke("verify", "b", "--format", "pt2", "--format", "onnx").exit_code == 0
    assert calls == [(Path("b"), ("pt2", "onnx"))]


def test_a_failed_check_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, GOOD, BAD)
    result = invoke("verify", "b")
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [
        "error: b: 1 of 2 checks failed; the first: parity prefill aoti (first at position 3)"
    ]


def test_json_is_one_object_in_either_case(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, GOOD)
    result = invoke("verify", "b", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"bundle": "b", "passed": True, "checks": [vars(GOOD)]}

    install(monkeypatch, GOOD, BAD)
    result = invoke("verify", "b", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["passed"] is False
    assert found["checks"][1]["figure"] is None
    assert found["error"]["kind"] == "VerificationError"


def test_nothing_to_check_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    result = invoke("verify", "b")
    assert result.exit_code == 1
    assert "no program was checked" in result.stderr


def test_against_transformers_adds_checks_and_samples(short_bundle: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(short_bundle, tmp_path / "b")
    words = ("verify", bundle, "--against", "transformers")
    result = invoke(*words)
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[:2] for line in lines if line and line[0] == "transformers"] == [
        ["transformers", "0"],
        ["transformers", "prefill"],
        ["transformers", "decode"],
    ]
    assert "6 of 6 checks passed" in result.stdout
    assert "note: no sample of 'The capital of France is'" in result.stderr
    found = json.loads(invoke(*words, "--json").stdout)
    assert found["passed"] is True
    assert found["samples"] == []


def test_samples_are_shown_as_a_short_table(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, GOOD)
    reference = SimpleNamespace(load=lambda folder, reporter: reference)
    fakes.install(
        monkeypatch,
        "llama_export.reference",
        Reference=reference,
        check=lambda *args, **settings: [replace(GOOD, law="transformers")],
    )
    sample = SimpleNamespace(
        kind="chat",
        prompt="Why is\nthe sky blue?",
        text="Because " + 9 * "it is so " + "\x1b[31m",
        reference_text="Because.",
        tokens=(1, 2, 3, 4),
        reference_tokens=(1, 2, 5),
        num_agreeing=2,
        format="aoti",
    )
    write_samples = lambda *args, **settings: (sample,)  # noqa: E731
    fakes.install(monkeypatch, "llama_export.samples", write_samples=write_samples)
    result = invoke("verify", "b", "--against", "transformers")
    assert result.exit_code == 0
    assert "2 of 2 checks passed\n\n" in result.stdout
    shown = f"Because {4 * 'it is so '}i..."
    assert f"chat    Why is the sky blue?  {shown}  2 of 4       aoti\n" in result.stdout


def test_a_bundle_that_failed_is_not_compared_or_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, BAD)
    fakes.install(monkeypatch, "llama_export.reference")  # without the names that are imported
    result = invoke("verify", "b", "--against", "transformers", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["samples"] == []


def test_transformers_that_is_not_there(
    short_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = invoke("verify", short_bundle, "--against", "transformers", "--format", "pt2")
    assert result.exit_code == 1
    assert result.stderr.endswith(
        "error: the reference needs `transformers`, which is not installed\n"
        "hint: pip install transformers\n"
    )


def test_another_implementation_is_wrong_usage() -> None:
    result = invoke("verify", "b", "--against", "llama.cpp")
    assert result.exit_code == 2
    assert "'llama.cpp' is not 'transformers'" in result.stderr
