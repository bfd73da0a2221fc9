"""Test vectors: made at build, the same each time, checked without any model code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from llama_artifacts.digests import describe
from llama_artifacts.errors import IntegrityError, VerificationError
from llama_artifacts.manifest import vectors_name
from llama_export.build import build
from llama_export.cache import ProgramCache
from llama_export.recipe import Recipe
from llama_export.vectors import _num_safe, write_vectors
from llama_export.verify import verify
from llama_runtime import vectors
from llama_runtime.weights import map_weights
from tests.tiny import write_tiny

pytestmark = pytest.mark.slow  # it builds bundles of its own

ENTRIES = ("forward", "decode", "decode_paged", "step_packed", "log_probs_packed", "generation")


@pytest.fixture(scope="module")
def small(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the sizes of other tests' programs, which the cache may have."""
    output = tmp_path_factory.mktemp("vectors") / "bundle"
    recipe = Recipe(str(tiny_checkpoint), output, ENTRIES, ("pt2",), 64, batch=3)
    return build(replace(recipe, steps=6, max_new=6), cache=ProgramCache()).folder


@pytest.fixture
def bundle(small: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small, tmp_path / "bundle")


def change(bundle: Path, entry: str, edit: Callable[[bytearray], None]) -> None:
    """Edits the vectors of an entry, and lets the manifest agree."""
    path = bundle / vectors_name(entry)
    data = bytearray(path.read_bytes())
    edit(data)
    path.write_bytes(data)
    manifest = manifest_file.read(bundle)
    files = {**manifest.files, path.name: describe(path)}
    data = manifest_file.to_json(replace(manifest, files=files))
    (bundle / manifests.FILE_NAME).write_bytes(data)


def test_every_entry_has_small_vectors_that_every_program_meets(small: Path) -> None:
    manifest = manifest_file.read(small)
    names = [vectors_name(entry) for entry in manifest.entries()]
    assert "generate-6.vectors.safetensors" in names
    for name in names:
        assert manifest.files[name].bytes < 10_000
    results = vectors.check(small)
    assert [(r.entry, r.format) for r in results] == [
        (program.entry, "pt2") for program in manifest.programs
    ]
    assert all(result.passed for result in results)


def test_vectors_are_the_same_each_time(bundle: Path) -> None:
    weights = map_weights(bundle / "weights.safetensors")
    names = write_vectors(bundle, manifest_file.read(bundle), weights)
    manifest = manifest_file.read(bundle)
    assert all(describe(bundle / name) == manifest.files[name] for name in names)


def test_the_file_is_what_its_description_says(small: Path) -> None:
    tensors = load_file(small / "decode.vectors.safetensors")
    calls = {int(name.split(".")[1]) for name in tensors}
    assert calls == set(range(7))
    assert tensors["calls.6.inputs.pos"].tolist() == 6
    assert tensors["calls.6.inputs.tokens"].dtype == torch.int32
    assert tensors["calls.6.outputs.logits"].shape == (2, 128)
    assert tensors["calls.6.rows.logits"].tolist() == [1, 2]  # of three
    read = vectors.read(small, "decode_paged")
    assert read.fill == 1e4
    assert read.sizes["PoolPages"] > 1


def test_other_expectations_are_found(bundle: Path) -> None:
    def edit(data: bytearray) -> None:
        start = 8 + int.from_bytes(data[:8], "little")
        table = json.loads(data[8:start])
        name = next(name for name in sorted(table, reverse=True) if ".outputs." in name)
        begin, end = (start + at for at in table[name]["data_offsets"])
        data[begin:end] = bytes(end - begin)  # zeros

    changed = {"decode", "decode_paged", "generate<6>", "step_packed"}
    for entry in changed:
        change(bundle, entry, edit)
    failed = [result for result in vectors.check(bundle) if not result.passed]
    assert {result.entry for result in failed} == changed
    assert all(result.detail.startswith("call ") for result in failed)
    results = verify(bundle, uses_vectors=True, entries=("decode", "forward"))
    (result,) = (result for result in results if not result.passed)
    assert result.place == "decode/pt2 vectors"


def test_vectors_that_expect_nothing_fail(bundle: Path) -> None:
    def edit(data: bytearray) -> None:
        start = 8 + int.from_bytes(data[:8], "little")
        table = json.loads(data[8:start])
        begin, end = (start + at for at in table["calls.0.outputs.tokens"]["data_offsets"])
        data[begin:end] = b"\xff" * (end - begin)  # each a -1, which stands for anything

    change(bundle, "generate<6>", edit)
    failed = [result for result in vectors.check(bundle) if not result.passed]
    assert [(result.entry, result.detail) for result in failed] == [
        ("generate<6>", "nothing is expected")
    ]


def test_a_program_that_cannot_be_run_fails(bundle: Path) -> None:
    (bundle / "decode.pt2").write_bytes(b"noise")
    manifest = manifest_file.read(bundle)
    files = {**manifest.files, "decode.pt2": describe(bundle / "decode.pt2")}
    (bundle / "manifest.json").write_bytes(manifest_file.to_json(replace(manifest, files=files)))
    failed = [result for result in vectors.check(bundle) if not result.passed]
    assert [result.entry for result in failed] == ["decode"]
    assert "cannot be run" in failed[0].detail


def test_damaged_and_later_vectors_are_refused(bundle: Path) -> None:
    path = bundle / vectors_name("decode")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(IntegrityError, match="damaged"):
        vectors.check(bundle)
    path.write_bytes(whole)

    def later(data: bytearray) -> None:
        at = data.index(b'"version":"1"')
        data[at : at + 13] = b'"version":"2"'

    change(bundle, "decode", later)
    with pytest.raises(IntegrityError, match="expected vectors of version 1, got `2`"):
        vectors.check(bundle)


def test_only_the_vectors_are_checked_unless_a_law_is_named(small: Path) -> None:
    results = verify(small, uses_vectors=True)
    assert {result.law for result in results} == {"integrity", "vectors"}
    results = verify(small, uses_vectors=True, laws=("scratch",), entries=("decode",))
    assert [result.law for result in results] == ["integrity", "scratch", "vectors"]


def test_a_bundle_without_vectors(bundle: Path) -> None:
    manifest = manifest_file.read(bundle)
    files = {name: file for name, file in manifest.files.items() if "vectors" not in name}
    (bundle / "manifest.json").write_bytes(manifest_file.to_json(replace(manifest, files=files)))
    assert vectors.check(bundle) == ()
    with pytest.raises(VerificationError, match="no test vectors"):
        verify(bundle, uses_vectors=True)


def test_no_model_code_is_needed(small: Path) -> None:
    code = (
        "import sys; sys.modules['llama_export'] = None\n"
        "from pathlib import Path; from llama_runtime import vectors\n"
        "results = vectors.check(Path(sys.argv[1]))\n"
        "assert len(results) > 5 and all(result.passed for result in results)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(small)], check=True)


def test_bfloat16_programs_meet_float32_vectors(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m")
    entries = ("decode", "prefill", "generate", "sample")
    recipe = Recipe(str(tmp_path / "m"), tmp_path / "b", entries, ("pt2",), 32, dtype="bf16")
    folder = build(replace(recipe, steps=6)).folder
    results = vectors.check(folder)
    assert [result.entry for result in results if not result.passed] == []
    figures = {result.entry: result.figure for result in results}
    assert figures["decode"] > 1e-4  # rounding shows
    for entry in ("generate<6>", "sample<6>"):
        tokens = vectors.read(folder, entry).calls[0].outputs["tokens"]
        assert (tokens != vectors.ANYTHING).sum() >= 2  # or nothing would be proved


def test_a_token_is_expected_only_where_rounding_cannot_change_it() -> None:
    scores = torch.tensor([[[9.0, 1.0], [5.0, 4.99], [9.0, 1.0]]])
    assert _num_safe(scores, torch.tensor([3]), 0.1).tolist() == [1]
    assert _num_safe(scores, torch.tensor([3]), 1e-4).tolist() == [3]
    assert _num_safe(scores, torch.tensor([2]), 1e-4).tolist() == [2]
