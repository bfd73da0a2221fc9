"""The C++ reader refuses what the Python reader refuses, in the same line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.manifest import BLOCK_BYTES
from tests.artifacts.complaining import complaint
from tests.artifacts.patches import apply, write_base
from tests.artifacts.test_malformed import TABLE
from tests.bundles import CONTENTS, write_large
from tests.cpp.building import output_of

pytestmark = pytest.mark.slow


def _folder(parent: Path, case: dict[str, Any]) -> Path:
    parent.mkdir()
    (parent / "outside").write_bytes(b"x" * len(CONTENTS["decode.pt2"]))
    folder = write_base(parent / "bundle", TABLE["base"])
    for step in case["steps"]:
        apply(folder, step)
    return folder


CASES = [{"name": "sound", "steps": []}, *TABLE["cases"]]
Complaints = list[tuple[dict[str, Any], Path, str]]


def complaints(program: Path, parent: Path) -> Complaints:
    """Each case with its folder and what the program says of it."""
    folders = [_folder(parent / str(i), case) for i, case in enumerate(CASES)]
    lines = output_of(program, stdin="".join(f"{folder}\n" for folder in folders)).splitlines()
    return list(zip(CASES, folders, lines, strict=True))


def wrong_lines(found: Complaints) -> dict[str, tuple[str, str]]:
    """What was said and what is expected, where they differ, by the case's name."""
    wrong = {}
    for case, folder, line in found:
        error = case.get("error", {"kind": "ok", "line": ""})
        expected = f"{error['kind']}\t{error['line'].replace('{bundle}', str(folder))}".rstrip()
        is_start = expected.endswith("...")
        shown = line[: len(expected) - 3] + "..." if is_start else line
        if shown != expected:
            wrong[case["name"]] = (line, expected)
    return wrong


def test_a_changed_block_of_a_large_file_is_told_as_in_python(
    build_folder: Path, tmp_path: Path
) -> None:
    folder = write_large(tmp_path / "b", 2 * BLOCK_BYTES + 1)
    program = build_folder / "tests" / "complain"
    assert output_of(program, stdin=f"{folder}\n") == "ok\n"
    for place in (2 * BLOCK_BYTES, 0):
        with (folder / "large.bin").open("r+b") as file:
            file.seek(place)
            file.write(b"!")
        error = complaint(folder)
        assert "changed: bytes " in str(error)
        assert output_of(program, stdin=f"{folder}\n") == f"IntegrityError\t{error}\n"


def test_the_table_of_malformed_bundles(build_folder: Path, tmp_path: Path) -> None:
    wrong = wrong_lines(complaints(build_folder / "tests" / "complain", tmp_path))
    assert not wrong, json.dumps(wrong, indent=1)
