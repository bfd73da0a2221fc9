"""What a program was made for is compared with the machine before anything is opened."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from tests.cpp.building import output_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("target", "requires", "line"),
    [
        ({"cpu_flags": ("amx_nothing",)}, {}, "needs CPU features that this machine lacks: amx_"),
        ({"machine": "riscv64"}, {}, "made for riscv64, this machine is "),
        ({"device": "cuda", "capability": "9.0"}, {}, "made for cuda, asked for cpu"),
        ({}, {"torch": "2.1"}, "made with torch 2.1, this is 2."),
    ],
)
def test_a_program_of_another_machine_is_refused(
    target: dict[str, Any],
    requires: dict[str, str],
    line: str,
    build_folder: Path,
    tiny_bundle: Path,
    tmp_path: Path,
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    manifest = manifest_file.read(bundle)
    programs = tuple(
        dataclasses.replace(
            program,
            target=dataclasses.replace(program.target, **target),
            requires={**program.requires, **requires},
        )
        if program.format == "aoti"
        else program
        for program in manifest.programs
    )
    file = next(p.file for p in programs if (p.entry, p.format) == ("prefill", "aoti"))
    (bundle / file).write_bytes(b"x" * (bundle / file).stat().st_size)  # damaged, too
    manifest = dataclasses.replace(manifest, programs=programs)
    (bundle / manifests.FILE_NAME).write_bytes(manifest_file.to_json(manifest))
    options = ("--tokens", "1", "--format", "aoti")
    text = output_of(build_folder / "llama-run", bundle, *options, status=1)
    assert f"error: {file}: {line}" in text
