"""`verify --against transformers`: more checks, and a table of samples."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_export.verify import CheckResult
from tests.cli import fakes
from tests.cli.running import invoke

GOOD = CheckResult("parity", "decode", "pt2", 1.25e-6, 1e-4, True, "")
BAD = replace(GOOD, figure=1.0, passed=False, detail="max diff 1")


def install_verify(monkeypatch: pytest.MonkeyPatch, *checks: CheckResult) -> None:
    def verify(folder: Path, **settings: Any) -> tuple[CheckResult, ...]:
        return checks

    fakes.install(monkeypatch, "llama_export.verify", verify=verify, record=None)


@pytest.mark.slow
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
    assert " checks passed\n" in result.stdout
    assert "note: no sample of 'The capital of France is'" in result.stderr
    found = json.loads(invoke(*words, "--json").stdout)
    assert found["passed"] is True
    assert found["samples"] == []


def test_samples_are_shown_as_a_short_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    install_verify(monkeypatch, GOOD)
    reference: Any = SimpleNamespace(load=lambda folder, **settings: reference)
    fakes.install(
        monkeypatch,
        "llama_export.reference",
        import_library=lambda: None,
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
    install_verify(monkeypatch, BAD)
    found = {"import_library": lambda: None}  # without the names that a comparison imports
    fakes.install(monkeypatch, "llama_export.reference", **found)
    result = invoke("verify", "b", "--against", "transformers", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["samples"] == []


def test_transformers_that_is_not_there_is_told_before_any_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llama_export.verify.verify", None)  # it cannot be called
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = invoke("verify", "b", "--against", "transformers")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: the reference needs `transformers`, which is not installed\n"
        "hint: pip install transformers\n"
    )


def test_another_implementation_is_wrong_usage() -> None:
    result = invoke("verify", "b", "--against", "llama.cpp")
    assert result.exit_code == 2
    assert "'llama.cpp' is not 'transformers'" in result.stderr
