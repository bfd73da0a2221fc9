from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from llama_export.laws.registry import LAWS
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
    shards: int = 1

    @property
    def place(self) -> str:
        return f"{self.entry}/{self.format} {self.law}"


GOOD = Check("parity", "decode", "pt2", 1.25e-6, 1e-4, True)
BAD = Check(
    "parity", "prefill", "aoti", math.nan, 1e-4, False, "max diff 3.1 at (0, 7, 42), atol 0.0001"
)


def install(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> list[Any]:
    calls: list[Any] = []

    def verify(folder: Path, *, reporter: Reporter, **settings: Any) -> tuple[Check, ...]:
        calls.append((folder, {key: value for key, value in settings.items() if value}))
        with reporter.step("check decode pt2"):
            return checks

    def record(folder: Path, results: Any) -> None:
        calls.append((folder, "recorded", results))

    fakes.install(monkeypatch, "llama_export.verify", verify=verify, record=record)
    return calls


def test_programs_of_several_shards_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, GOOD, replace(GOOD, shards=2))
    result = invoke("verify", "a bundle")
    entries = [line.split("  ")[1].strip() for line in result.stdout.splitlines()[1:3]]
    assert entries == ["decode", "decode of 2 shards"]
    checks = json.loads(invoke("verify", "a bundle", "--json").stdout)["checks"]
    assert [check["shards"] for check in checks] == [1, 2]


def test_a_figure_for_each_check(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install(monkeypatch, GOOD)
    result = invoke("verify", "a bundle")
    assert result.exit_code == 0
    assert "parity  decode  pt2     1.25e-06  0.0001  ok" in result.stdout
    assert "1 of 1 checks passed" in result.stdout
    assert result.stderr == "check decode pt2: 0.0 s\n"
    assert calls == [(Path("a bundle"), {})]


def test_formats_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install(monkeypatch, GOOD)
    assert invoke("verify", "b", "--format", "pt2", "--format", "onnx").exit_code == 0
    assert calls == [(Path("b"), {"formats": ("pt2", "onnx")})]


def test_laws_entries_and_vectors_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install(monkeypatch, GOOD)
    options = ("--law", "pages", "--law", "rows", "--entry", "generate", "--vectors")
    assert invoke("verify", "b", *options).exit_code == 0
    settings = {"laws": ("pages", "rows"), "entries": ("generate",), "uses_vectors": True}
    assert calls == [(Path("b"), settings)]
    assert invoke("verify", "b", "--law", "casual").exit_code == 2


def test_only_what_passed_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install(monkeypatch, GOOD)
    assert invoke("verify", "b", "--record").exit_code == 0
    assert calls[1:] == [(Path("b"), "recorded", (GOOD,))]
    calls = install(monkeypatch, GOOD, BAD)
    assert invoke("verify", "b", "--record").exit_code == 1
    assert len(calls) == 1


def test_the_help_tells_every_law() -> None:
    help = invoke("verify", "--help").stdout
    for law in LAWS:
        assert f"  {law.name} " in help


def test_a_failed_check_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, GOOD, BAD)
    result = invoke("verify", "b")
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors == ["error: b: prefill/aoti parity: max diff 3.1 at (0, 7, 42), atol 0.0001"]
    assert "1 of 2 checks failed" in result.stderr


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
