from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bundles import CONTENTS, write_sample
from tests.cli.running import invoke, start
from tests.cli.test_imports import SCRIPT
from tests.exporter.pages import write_shown


def test_the_page_is_written(tmp_path: Path) -> None:
    bundle, page = write_shown(tmp_path / "mit Löchern und ß"), tmp_path / "report.html"
    result = invoke("report", bundle, "-o", page)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{page}: ")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == [bundle.name, page.name]


def test_json(tmp_path: Path) -> None:
    bundle, page = write_shown(tmp_path / "b"), tmp_path / "report.html"
    found = json.loads(invoke("report", bundle, "-o", page, "--json").stdout)
    assert found == {"bundle": str(bundle), "page": str(page), "bytes": page.stat().st_size}


def test_a_page_that_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    bundle, page = write_shown(tmp_path / "b"), tmp_path / "report.html"
    page.write_text("mine")
    result = invoke("report", bundle, "-o", page)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-2:] == [
        f"error: {page}: the output exists",
        "hint: replace it with --overwrite, or choose another with -o",
    ]
    assert page.read_text() == "mine"
    assert invoke("report", bundle, "-o", page, "--overwrite").exit_code == 0
    assert page.read_text(encoding="utf-8") != "mine"


@pytest.mark.parametrize("place", [".", "missing/report.html"], ids=["a folder", "no folder"])
def test_a_page_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    bundle = write_shown(tmp_path / "b")
    result = invoke("report", bundle, "-o", tmp_path / place, "--overwrite")
    assert result.exit_code == 1
    assert "error: " in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_damage_is_named_and_nothing_written(tmp_path: Path) -> None:
    contents = {**CONTENTS, "weights.safetensors": b"w" * 90}
    bundle = write_sample(tmp_path / "b", contents=contents, programs=())
    result = invoke("report", bundle, "-o", tmp_path / "report.html")
    assert result.exit_code == 1
    assert "weights.safetensors: " in result.stderr
    assert not (tmp_path / "report.html").exists()


def test_nothing_heavy_is_imported_to_show_a_pt2(tmp_path: Path) -> None:
    contents = {"decode.onnx": b"unread"}
    bundle = write_shown(tmp_path / "b", contents=contents)
    with start("report", bundle, "-o", tmp_path / "p.html", "--json", script=SCRIPT) as process:
        _, stderr = process.communicate()
    assert process.returncode == 0
    assert stderr.splitlines()[-1] == "[]"
