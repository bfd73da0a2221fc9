"""Bundles that released versions wrote: every later version opens, verifies and replays them.

`onnx` must replay with any toolchain. `pt2` is torch's own format and is tied to the minor version of
torch that the manifest requires: where another is installed, the refusal must say so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import llama_runtime
from llama_artifacts import integrity
from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import CompatibilityError
from llama_artifacts.manifest import Format, Program
from llama_export.report import Reporter
from llama_export.verify import verify
from llama_runtime import compat

FOLDERS = sorted(path.parent for path in Path(__file__).parent.glob("v*/bundle"))
LAWS = ("parity", "chain", "room", "layout")

by_version = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
by_format = pytest.mark.parametrize("format", ["pt2", "onnx"])


def record(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "tokens.json").read_bytes())
    return value


def programs(folder: Path, format: str) -> list[Program]:
    manifest = open_bundle(folder / "bundle").manifest
    return [program for program in manifest.programs if program.format == format]


def is_refused_by_its_toolchain(folder: Path, format: Format) -> bool:
    """Whether another torch is here than a pt2 program requires; the refusal must name it."""
    found = programs(folder, format)
    assert {program.entry for program in found} == {"prefill", "decode"}
    if all(compat.fits(program, device="cpu", allow_native=False) for program in found):
        return False
    assert format == "pt2"
    with pytest.raises(CompatibilityError, match="torch"):
        llama_runtime.load(folder / "bundle", format=format).entry("decode")
    return True


def test_the_bundle_of_the_first_version_is_here() -> None:
    assert "v1" in {folder.name for folder in FOLDERS}


@by_version
def test_it_is_whole(folder: Path) -> None:
    report = integrity.check(folder / "bundle")
    assert report.faults == ()
    assert report.num_bytes < 200_000


@by_version
@by_format
def test_it_replays_the_recorded_tokens(folder: Path, format: Format) -> None:
    if is_refused_by_its_toolchain(folder, format):
        return
    expected = record(folder)
    bundle = llama_runtime.load(folder / "bundle", format=format)
    session = bundle.session()
    logits = session.prefill(expected["prompt"])
    tokens = []
    for _ in expected["tokens"]:
        tokens.append(int(logits.argmax()))
        logits = session.decode(tokens[-1])
    assert tokens == expected["tokens"]
    assert len(set(tokens)) > len(tokens) // 2


@by_version
@by_format
def test_its_laws_and_vectors_hold(folder: Path, format: Format) -> None:
    if is_refused_by_its_toolchain(folder, format):
        return
    results = verify(
        folder / "bundle", reporter=Reporter(), formats=(format,), laws=LAWS, uses_vectors=True
    )
    assert {result.law for result in results} >= {*LAWS, "vectors"}
    assert [result for result in results if not result.passed] == []
