"""ONNX programs from C++, where the build has ONNX Runtime."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

import llama_runtime
from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from llama_artifacts.bundle import describe
from llama_export.build import build
from llama_export.recipe import Recipe
from tests.cpp.building import output_of

pytestmark = pytest.mark.slow

ONNX = ("--format", "onnx")
PROMPT = [1, 10, 7]
TOKENS = ("--tokens", "1 10 7", "--max-new", "24")


def _expected(bundle: Path, **settings: float) -> list[int]:
    loaded = llama_runtime.load(bundle, format="onnx")
    return list(loaded.generate_tokens(PROMPT, max_new=24, **settings))


def _ids(output: str) -> list[int]:
    return list(map(int, output.split()))


def test_a_build_without_it_says_so(native_build_folder: Path, tiny_bundle: Path) -> None:
    program = native_build_folder / "llama-run"
    text = output_of(program, tiny_bundle, *TOKENS, *ONNX, status=1)
    assert "prefill.onnx: this runtime was built without ONNX Runtime" in text
    assert "hint: build it with -DLLAMA_RUNTIME_ONNX=ON" in text


def test_tokens_are_those_of_python(onnx_build_folder: Path, tiny_bundle: Path) -> None:
    program = onnx_build_folder / "llama-run"
    assert _ids(output_of(program, tiny_bundle, *TOKENS, *ONNX)) == _expected(tiny_bundle)
    drawn = output_of(program, tiny_bundle, *TOKENS, *ONNX, "--temperature", 0.9, "--seed", 7)
    assert _ids(drawn) == _expected(tiny_bundle, temperature=0.9, seed=7)


def test_it_runs_where_native_code_is_refused(onnx_build_folder: Path, tiny_bundle: Path) -> None:
    found = output_of(onnx_build_folder / "llama-run", tiny_bundle, *TOKENS, "--no-native")
    assert _ids(found) == _expected(tiny_bundle)


@pytest.mark.parametrize("name", ["tiny_bundle", "tiny_packed_bundle"])
def test_every_program_passes_its_vectors(
    name: str, onnx_build_folder: Path, request: pytest.FixtureRequest
) -> None:
    bundle: Path = request.getfixturevalue(name)
    lines = output_of(onnx_build_folder / "llama-run", bundle, "--vectors", *ONNX).splitlines()
    programs = [
        p for p in manifest_file.read(bundle).programs if p.format == "onnx" and not p.variant
    ]
    assert [line.split()[:3] for line in lines] == [["ok", p.entry, "onnx"] for p in programs]


def test_eight_threads_give_what_one_gives_and_stop(
    onnx_build_folder: Path, tiny_bundle: Path
) -> None:
    output_of(onnx_build_folder / "tests" / "threads", tiny_bundle, "onnx")


def test_weights_that_lie_elsewhere_are_given(
    onnx_build_folder: Path, tiny_bundle: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    entries = ("prefill", "decode")
    recipe = Recipe(
        str(tiny_checkpoint), tmp_path / "bundle", entries, ("onnx",), weights="reference"
    )
    bundle = build(recipe).folder
    program = onnx_build_folder / "llama-run"
    found = output_of(program, bundle, *TOKENS, "--weights-dir", tiny_checkpoint)
    assert _ids(found) == _expected(tiny_bundle)
    assert "the weights are not in the bundle" in output_of(program, bundle, *TOKENS, status=1)


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ("prefill.onnx", "its inputs and outputs are not the manifest's: their dtypes or shapes"),
        ("decode_rows.onnx", "its inputs and outputs are not the manifest's: positions"),
        ("decode.pt2", "ONNX Runtime refuses it: "),
    ],
)
def test_another_program_in_its_place_is_refused(
    other: str, line: str, onnx_build_folder: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    shutil.copyfile(tiny_bundle / other, bundle / "decode.onnx")
    manifest = manifest_file.read(bundle)
    files = {**manifest.files, "decode.onnx": describe(bundle / "decode.onnx")}
    manifest = dataclasses.replace(manifest, files=files)
    (bundle / manifests.FILE_NAME).write_bytes(manifest_file.to_json(manifest))
    text = output_of(onnx_build_folder / "llama-run", bundle, *TOKENS, *ONNX, status=1)
    assert f"error: {bundle}/decode.onnx: {line}" in text
