"""`memory` and `fit`: tables, JSON, and choices that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.bundles import sample_program, write_sample
from tests.cli.running import invoke, start
from tests.cli.test_imports import SCRIPT


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """One ONNX program without weights, whose activations nobody knows."""
    programs = (sample_program("decode", "onnx", "decode.onnx"),)
    folder = tmp_path / "b"
    return write_sample(folder, programs=programs, weights="none", weights_headers={})


def test_every_figure_says_how_sure_it_is(bundle: Path) -> None:
    result = invoke("memory", bundle)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[:2] == ["tiny: decode as onnx on cpu", "batch 1, 16 positions"]
    assert "states 256 B exact the declared signature" in lines
    [runtime] = [line for line in lines if line.startswith("runtime ")]
    assert " estimated " in runtime
    rest = lines[lines.index("Not known, and not in the sum") :]
    assert "activations: ONNX Runtime plans memory of its own" in rest


def test_json_adds_up(bundle: Path) -> None:
    found = json.loads(invoke("memory", bundle, "--json").stdout)
    assert found["bytes"] == sum(figure["bytes"] for figure in found["figures"])
    assert {figure["basis"] for figure in found["figures"]} == {"exact", "modelled", "estimated"}
    assert found["unknown"]


def fit(*words: object) -> Result:
    model = ("llama-3.1-8b-instruct", "--entry", "decode_paged", "--format", "onnx")
    return invoke("fit", *model, "--device", "cuda", *words)


@pytest.mark.parametrize("memory", ["80GiB", "85899345920", "80 GiB", "83886080KiB"])
def test_the_largest_that_fits_is_found(memory: str) -> None:
    words = ("--seq-len", 8192, "--device-memory", memory, "--maximize", "batch", "--json")
    found = json.loads(fit(*words).stdout)
    assert found["device_memory"] == 80 * 2**30
    row = 32 * 2 * 8 * 8192 * 128 * 2
    assert found["batch"] == (80 * 2**30 - found["forecast"]["figures"][0]["bytes"]) // row
    assert found["limit"].startswith(f"batch {found['batch'] + 1} needs ")


def test_what_is_reserved_stays_free() -> None:
    words = ("--seq-len", 8192, "--device-memory", "80GiB", "--maximize", "batch")
    lines = fit(*words, "--reserve", "20GiB").stdout.splitlines()
    assert lines[0] == "batch 45 fits into 85.9 GB, 21.5 GB left free"
    assert lines[1].startswith("  no more: batch 46 needs ")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "missing option '--device-memory'"),
        (["--device-memory", "80Gb"], "expected a size such as 80GiB"),
        (["--device-memory", "80GB", "--batch", 2], "--batch is what --maximize batch looks for"),
        (["--device-memory", "1GB", "--reserve", "1GB"], "--reserve must leave some of"),
    ],
)
def test_wrong_usage_is_told_before_anything_heavy_is_imported(
    words: list[Any], error: str
) -> None:
    with start("fit", "model", "--maximize", "batch", *words, script=SCRIPT) as process:
        _, stderr = process.communicate()
    assert process.returncode == 2
    first, hint, heavy = stderr.splitlines()
    assert first.startswith("error: ")
    assert error in first
    assert hint == "hint: see `llama-export fit --help`"
    assert heavy == "[]"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--maximize", "context", "--device-memory", "16GB"], "expected at most 16.0 GB, got"),
        (
            ["--maximize", "batch", "--device-memory", "80GB", "--shards", 3],
            "expected sizes that 3 shards divide, got query heads 32, key/value heads 8",
        ),
    ],
)
def test_what_cannot_be_is_told_in_one_line(words: list[Any], error: str) -> None:
    result = fit(*words)
    assert result.exit_code == 1
    assert not result.stdout
    first, hint = result.stderr.splitlines()
    assert first.startswith("error: ")
    assert error in first
    assert hint.startswith("hint: ")


def test_a_bundle_keeps_what_its_build_fixed(bundle: Path) -> None:
    result = invoke("memory", bundle, "--seq-len", 32)
    assert result.exit_code == 1
    assert "expected --seq-len 16, which the build fixed, got 32" in result.stderr
    assert "give the model instead of the bundle" in result.stderr


@pytest.mark.parametrize("words", [["memory", "--help"], ["fit", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    with start(*words, script=SCRIPT) as process:
        _, stderr = process.communicate()
    assert stderr == "[]\n"


def test_an_unknown_entry_is_refused_before_anything_heavy_is_imported() -> None:
    with start("memory", "model", "--entry", "decod", script=SCRIPT) as process:
        _, stderr = process.communicate()
    assert stderr == "error: unknown entry `decod`\nhint: did you mean `decode`?\n[]\n"
