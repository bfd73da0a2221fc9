"""Verification: what is damaged or wrong does not pass, and the message says where and how much."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch

from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from llama_artifacts.digests import describe
from llama_artifacts.errors import IntegrityError, ManifestError, VerificationError
from llama_artifacts.manifest import Manifest
from llama_export.build import build
from llama_export.cache import ProgramCache
from llama_export.laws import memory
from llama_export.recipe import Recipe
from llama_export.report import Reporter
from llama_export.verify import CheckResult, check_programs, verify

pytestmark = pytest.mark.slow  # it builds a bundle of its own


class Notes(Reporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def small(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`forward` and `decode` as pt2 and onnx, made once."""
    output = tmp_path_factory.mktemp("small") / "bundle"
    recipe = Recipe(str(tiny_checkpoint), output, ("forward", "decode"), ("pt2", "onnx"), 64)
    return build(recipe, cache=ProgramCache()).folder


@pytest.fixture
def bundle(small: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small, tmp_path / "bundle")


def rewrite(
    bundle: Path, change: Callable[[Manifest], Manifest] = lambda manifest: manifest
) -> None:
    """Writes the manifest anew, so that it fits the files: a forger's work."""
    manifest = change(manifest_file.read(bundle))
    files = {name: describe(bundle / name) for name in manifest.files}
    data = manifest_file.to_json(replace(manifest, files=files))
    (bundle / manifests.FILE_NAME).write_bytes(data)


PARITY = ("parity",)


def failures(results: tuple[CheckResult, ...]) -> dict[tuple[str, str, str], CheckResult]:
    return {(r.law, r.entry, r.format): r for r in results if not r.passed}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def test_a_whole_bundle_passes(small: Path) -> None:
    results = verify(small)
    assert all(result.passed for result in results)
    assert {(r.entry, r.format) for r in results if r.law == "parity"} == {
        (program.entry, program.format) for program in manifest_file.read(small).programs
    }
    assert all(0 <= result.figure < 1e-5 for result in results)


def test_what_the_build_found_is_in_the_manifest(small: Path) -> None:
    manifest = manifest_file.read(small)
    found = {(check.law, check.entry, check.format) for check in manifest.checks}
    decode = [p for p in manifest.programs if p.entry == "decode"]
    assert found == {
        ("layout", "", ""),
        *(("parity", p.entry, p.format) for p in manifest.programs),
        *(("room", p.entry, p.format) for p in manifest.programs),
        *(("scratch", p.entry, p.format) for p in decode),
    }
    assert all(check.figure <= check.limit for check in manifest.checks)


def test_a_flipped_bit_in_the_weights_is_named_and_nothing_is_run(bundle: Path) -> None:
    flip(bundle / "weights.safetensors", -3000)
    (result,) = verify(bundle)
    assert (result.law, result.passed, result.figure) == ("integrity", False, 1)
    assert "weights.safetensors" in result.detail


@pytest.mark.parametrize("name", ["decode.pt2", "decode.onnx", "tokenizer.json"])
def test_a_flipped_bit_in_any_file_is_found(bundle: Path, name: str) -> None:
    flip(bundle / name, 200)
    (result,) = verify(bundle)
    assert not result.passed
    assert name in result.detail


def test_a_missing_file_and_a_missing_manifest_are_errors(bundle: Path) -> None:
    (bundle / "decode.onnx").unlink()
    with pytest.raises(IntegrityError, match=r"decode\.onnx"):
        verify(bundle)
    (bundle / "manifest.json").unlink()
    with pytest.raises(ManifestError):
        verify(bundle)


# --- forged bundles: every digest right, a program wrong ------------------------------------------


@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_swapped_programs_fail_whatever_they_do(bundle: Path, format: str) -> None:
    first, second = bundle / f"decode.{format}", bundle / f"forward.{format}"
    first_data, second_data = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_data)
    second.write_bytes(first_data)
    rewrite(bundle)
    failed = failures(verify(bundle, laws=("parity", "room")))
    assert {key[1:] for key in failed} == {("decode", format), ("forward", format)}
    for result in failed.values():
        assert "cannot be run: " in result.detail
        assert "\n" not in result.detail


def test_a_swapped_weight_fails_with_place_and_figure(bundle: Path) -> None:
    """The oracle reads the same weights file, so the program must be the one that is wrong."""
    model = onnx.load(bundle / "decode.onnx", load_external_data=False)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    places = [
        tensors[f"model.layers.0.mlp.{name}_proj.weight"].external_data for name in ("gate", "up")
    ]
    for first, second in zip(*places, strict=True):
        first.value, second.value = second.value, first.value
    onnx.save(model, bundle / "decode.onnx")
    rewrite(bundle)
    failed = failures(verify(bundle, laws=PARITY))
    assert set(failed) == {("parity", "decode", "onnx")}
    (result,) = failed.values()
    assert result.figure > result.limit == 1e-4
    assert result.detail.startswith("max diff ")
    assert " at (0, " in result.detail
    assert ", atol 0.000" in result.detail
    assert result.place == "decode/onnx parity"


def test_a_program_of_another_checkpoint_fails(bundle: Path) -> None:
    """One constant of the graph, the norm's epsilon, is another."""
    model = onnx.load(bundle / "decode.onnx", load_external_data=False)
    changed = 0
    for tensor in model.graph.initializer:
        is_float = tensor.data_type == onnx.TensorProto.FLOAT and not tensor.external_data
        if is_float and abs(float(onnx.numpy_helper.to_array(tensor).ravel()[0]) - 1e-5) < 1e-9:
            value = onnx.numpy_helper.to_array(tensor) * 100
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
            changed += 1
    assert changed
    onnx.save(model, bundle / "decode.onnx")
    rewrite(bundle)
    assert set(failures(verify(bundle, laws=PARITY))) == {("parity", "decode", "onnx")}


def test_figures_that_are_not_numbers_fail(bundle: Path) -> None:
    model = onnx.load(bundle / "forward.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        is_float = tensor.data_type == onnx.TensorProto.FLOAT and not tensor.external_data
        if is_float and "e-" in f"{onnx.numpy_helper.to_array(tensor).ravel()[0]:.0e}":
            value = onnx.numpy_helper.to_array(tensor) * math.nan
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    onnx.save(model, bundle / "forward.onnx")
    rewrite(bundle)
    failed = failures(verify(bundle, laws=PARITY))
    assert set(failed) == {("parity", "forward", "onnx")}
    (result,) = failed.values()
    assert math.isnan(result.figure)
    assert "nan at (0, 0, 0)" in result.detail
    with pytest.raises(VerificationError, match="max diff nan") as caught:
        check_programs(bundle, reporter=Reporter())
    assert caught.value.where == "forward/onnx parity"


def test_a_program_of_noise_fails(bundle: Path) -> None:
    (bundle / "decode.pt2").write_bytes(b"noise" * 100)
    (bundle / "decode.onnx").write_bytes(b"noise" * 100)
    rewrite(bundle)
    failed = failures(verify(bundle, laws=PARITY))
    assert set(failed) == {("parity", "decode", "pt2"), ("parity", "decode", "onnx")}


def test_weights_of_another_network_are_an_error(bundle: Path) -> None:
    rewrite(bundle, lambda m: replace(m, model=replace(m.model, intermediate_size=99)))
    failed = failures(verify(bundle))
    assert {law for law, *_ in failed} >= {"layout", "parity"}
    assert "has shape" in failed["layout", "", ""].detail
    assert "not those of the network" in failed["parity", "decode", "pt2"].detail


# --- what is run and what is not ------------------------------------------------------------------


def test_only_the_programs_of_the_formats_asked_for(small: Path) -> None:
    results = verify(small, formats=("onnx",), laws=PARITY)
    assert [(r.law, r.format) for r in results] == [("integrity", ""), *([("parity", "onnx")] * 2)]


def test_a_format_that_no_program_has_is_refused(small: Path) -> None:
    with pytest.raises(VerificationError, match="no such program in aoti") as caught:
        verify(small, formats=("pt2", "aoti"))
    assert caught.value.hint == "it has pt2, onnx"


def test_programs_for_another_machine_are_noted_and_not_run(bundle: Path) -> None:
    def for_cuda(manifest: Manifest) -> Manifest:
        programs = [
            replace(p, target=replace(p.target, device="cuda")) if p.format == "pt2" else p
            for p in manifest.programs
        ]
        return replace(manifest, programs=tuple(programs))

    if torch.cuda.is_available():
        pytest.skip("there they are run")
    rewrite(bundle, for_cuda)
    notes = Notes()
    results = verify(bundle, reporter=notes, laws=PARITY)
    assert {r.format for r in results} == {"", "onnx"}
    assert len(notes.texts) == 2
    assert "another machine" in notes.texts[0]


def test_an_entry_of_a_later_version_is_noted_and_not_run(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(text.replace('"forward"', '"foresee"'))
    notes = Notes()
    results = verify(bundle, reporter=notes, laws=PARITY)
    assert [r.entry for r in results if r.law == "parity"] == ["decode", "decode"]
    assert "foresee pt2: an entry or a variant that this version does not know" in notes.texts[0]


def test_without_weights_only_the_files_are_checked(tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = Recipe(str(tiny_checkpoint), tmp_path / "o", ("decode",), ("pt2",), weights="none")
    results = verify(build(recipe).folder)
    assert [(r.law, r.passed) for r in results] == [("integrity", True)]
    flip(tmp_path / "o" / "decode.pt2", 100)
    assert not verify(tmp_path / "o")[0].passed


def test_poison_and_two_rows_catch_a_read_of_what_was_never_written(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that is one position too wide passes on zeros only if nobody poisons the states."""
    assert memory.POISON >= 1e3
    filled: list[float] = []
    original = memory.poisoned

    def poisoned(entry: memory.Entry, **sizes: int) -> memory.States:
        states = original(entry, **sizes)
        filled.extend(float(tensor.min()) for tensor in states.values())
        return states

    monkeypatch.setattr(memory, "poisoned", poisoned)
    verify(bundle, formats=("pt2",))
    assert filled
    assert set(filled) == {memory.POISON}


def test_results_can_be_written_as_json(small: Path) -> None:
    results = verify(small, formats=("pt2",))
    json.dumps([vars(result) for result in results], allow_nan=False)
