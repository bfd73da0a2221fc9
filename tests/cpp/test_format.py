"""The C++ reader refuses what the Python reader refuses, in the same line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.artifacts.patches import apply, write_base
from tests.artifacts.test_malformed import TABLE
from tests.bundles import CONTENTS
from tests.cpp.building import output_of

pytestmark = pytest.mark.slow


def _folder(parent: Path, case: dict[str, Any]) -> Path:
    parent.mkdir()
    (parent / "outside").write_bytes(b"x" * len(CONTENTS["decode.pt2"]))
    folder = write_base(parent / "bundle", TABLE["base"])
    for step in case["steps"]:
        apply(folder, step)
    return folder


def test_the_table_of_malformed_bundles(build_folder: Path, tmp_path: Path) -> None:
    cases = [{"name": "sound", "steps": []}, *TABLE["cases"]]
    folders = [_folder(tmp_path / str(i), case) for i, case in enumerate(cases)]
    stdin = "".join(f"{folder}\n" for folder in folders)
    lines = output_of(build_folder / "tests" / "complain", stdin=stdin).splitlines()
    assert lines[0] == "ok"
    assert len(lines) == len(cases)
    wrong = {}
    for case, folder, line in zip(cases[1:], folders[1:], lines[1:], strict=True):
        error = case["error"]
        expected = f"{error['kind']}\t{error['line'].replace('{bundle}', str(folder))}"
        if expected.endswith("..."):
            if not line.startswith(expected.removesuffix("...")):
                wrong[case["name"]] = (line, expected)
        elif line != expected:
            wrong[case["name"]] = (line, expected)
    assert not wrong, json.dumps(wrong, indent=1)
