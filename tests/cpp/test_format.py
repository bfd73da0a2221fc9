"""The C++ reader refuses what the Python reader refuses, in the same line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.digests import describe
from llama_artifacts.manifest import BLOCK_BYTES, FILE_NAME, WEIGHTS_NAME
from llama_artifacts.manifest_file import to_json
from tests.artifacts.complaining import complaint
from tests.artifacts.patches import apply, write_base
from tests.artifacts.test_malformed import TABLE
from tests.bundles import CONTENTS, sample_manifest, write_large, write_sample
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


@pytest.mark.long
def test_weights_beyond_four_gibibytes(build_folder: Path, tmp_path: Path) -> None:
    size = 2**32 + 64
    extents = {"large": ("U8", [size], [0, size]), "last": ("F32", [2], [size, size + 8])}
    keys = ("dtype", "shape", "data_offsets")
    text = json.dumps({name: dict(zip(keys, row, strict=True)) for name, row in extents.items()})
    header = len(text).to_bytes(8, "little") + text.encode()
    folder = write_sample(tmp_path / "b", programs=())
    with (folder / WEIGHTS_NAME).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size + 8)
    files = {**sample_manifest().files, WEIGHTS_NAME: describe(folder / WEIGHTS_NAME)}
    headers = {WEIGHTS_NAME: hashlib.sha256(header).hexdigest()}
    manifest = sample_manifest(programs=(), files=files, weights_headers=headers)
    (folder / FILE_NAME).write_bytes(to_json(manifest))
    program = build_folder / "tests" / "complain"
    assert output_of(program, stdin=f"{folder}\n") == "ok\n"
    with (folder / WEIGHTS_NAME).open("r+b") as file:
        file.seek(2**32 + 1)
        file.write(b"!")
    line = f"{folder}/{WEIGHTS_NAME}: changed: bytes 4096-4097 MiB: sha256 "
    assert output_of(program, stdin=f"{folder}\n").startswith(f"IntegrityError\t{line}")


def test_the_table_of_malformed_bundles(build_folder: Path, tmp_path: Path) -> None:
    wrong = wrong_lines(complaints(build_folder / "tests" / "complain", tmp_path))
    assert not wrong, json.dumps(wrong, indent=1)
