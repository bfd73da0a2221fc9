"""ONNX programs as files: links, other names and folders, and weights that lie elsewhere."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch

import llama_runtime
from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import WEIGHTS_NAME, Manifest
from llama_export.build import build
from llama_export.recipe import Recipe
from tests.runtime.loading import MAX_SEQ, random_tokens, reduced, rewrite, sealed
from tests.tiny import write_tiny

TOKENS = [[3, 1, 4, 1, 5, 9]]


@pytest.fixture
def folder(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle, with the one program `next_token` in ONNX."""
    kept = ("next_token", "onnx")
    return reduced(tiny_bundle, tmp_path / "bundle", lambda p: (p.entry, p.format) == kept)


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> torch.Tensor:
    return logits(tiny_bundle)


def logits(folder: Path) -> torch.Tensor:
    result = llama_runtime.load(folder, format="onnx").entry("next_token")(tokens=TOKENS)
    assert isinstance(result, torch.Tensor)
    return result


def linked_as_in_the_cache_of_the_hub(folder: Path, target: Path) -> Path:
    blobs, snapshot = target / "blobs", target / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        name = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blobs / name)
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    return snapshot


def hard_linked(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        os.link(path, target / path.name)
    return target


def renamed(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    (target / "next_token.onnx").rename(target / "another.onnx")

    def change(manifest: Manifest) -> Manifest:
        files = dict(manifest.files)
        files["another.onnx"] = files.pop("next_token.onnx")
        (program,) = manifest.programs
        programs = (dataclasses.replace(program, file="another.onnx"),)
        return dataclasses.replace(manifest, files=files, programs=programs)

    rewrite(target, change)
    return target


@pytest.mark.parametrize("place", [linked_as_in_the_cache_of_the_hub, hard_linked, renamed])
def test_a_program_finds_its_weights(
    folder: Path,
    tmp_path: Path,
    expected: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    place: Callable[[Path, Path], Path],
) -> None:
    placed = place(folder, tmp_path / "placed")
    monkeypatch.chdir("/")
    assert torch.equal(logits(placed), expected)
    monkeypatch.chdir(placed)
    assert torch.equal(logits(Path()), expected)


def test_renamed_weights_are_told_by_name(folder: Path) -> None:
    (folder / WEIGHTS_NAME).rename(folder / "model.safetensors")
    with pytest.raises(IntegrityError, match=f"{WEIGHTS_NAME}: "):
        llama_runtime.load(folder, format="onnx").entry("next_token")


@pytest.mark.parametrize("kind", ["absolute", "folder above", "link that leaves"])
def test_weights_outside_the_folder_are_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    """Also where the manifest agrees with the program."""
    outside = tmp_path / "outside.bin"
    shutil.copy(folder / WEIGHTS_NAME, outside)
    location = {
        "absolute": str(outside),
        "folder above": "../outside.bin",
        "link that leaves": "link.bin",
    }[kind]
    if kind == "link that leaves":
        (folder / "link.bin").symlink_to(outside)
    path = folder / "next_token.onnx"
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for item in tensor.external_data:
            if item.key == "location":
                item.value = location
    path.write_bytes(model.SerializeToString())
    sealed(folder, path.name)
    with pytest.raises(IntegrityError, match=path.name):
        llama_runtime.load(folder, format="onnx").entry("next_token")


def test_every_location_is_the_name_of_the_weights_file(tiny_bundle: Path) -> None:
    for path in tiny_bundle.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        places = [t.external_data for t in model.graph.initializer if t.external_data]
        found = {item.value for place in places for item in place if item.key == "location"}
        assert found == {WEIGHTS_NAME}, path.name


# --- the engine -----------------------------------------------------------------------------------


def test_freed_states_are_not_read_again(tiny_bundle: Path) -> None:
    """The allocator hands freed memory out again, with other content in it."""
    decode = llama_runtime.load(tiny_bundle, format="onnx").entry("decode")
    first = decode(decode.new_states(), tokens=[[3], [4]], pos=0)
    for _ in range(5):
        gc.collect()
        states = decode.new_states()
        for tensor in states.values():
            tensor.fill_(1e4)
        assert torch.equal(decode(states, tokens=[[3], [4]], pos=0), first)  # type: ignore[arg-type]
        assert all((tensor[:, :, 0] != 1e4).any() for tensor in states.values())
        del states


@pytest.mark.parametrize("entry", ["forward", "prefill", "decode", "decode_rows"])
def test_levels_of_optimization_agree(tiny_bundle: Path, entry: str) -> None:
    """No level is pinned, since none changes a result by more than rounding."""
    check_levels(tiny_bundle / f"{entry}.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_levels_of_optimization_agree_on_narrow_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """Which come behind casts, that a level may move or fold."""
    name = str(dtype).removeprefix("torch.")
    checkpoint = write_tiny(tmp_path / "m", dtype=dtype, torch_dtype=name, has_tokenizer=False)
    sizes: dict[str, int] = {"max_seq": MAX_SEQ, "batch": 2}
    recipe = Recipe(str(checkpoint), tmp_path / "b", ("prefill",), ("onnx",), **sizes)  # type: ignore[arg-type]
    folder = build(recipe).folder
    assert llama_runtime.load(folder).weights["model.norm.weight"].dtype == dtype
    check_levels(folder / "prefill.onnx")


def check_levels(path: Path) -> None:
    at_none, at_all = (
        outputs(path, level)
        for level in (
            onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
            onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
        )
    )
    for first, second in zip(at_none, at_all, strict=True):
        torch.testing.assert_close(first, second, atol=1e-4, rtol=0)


def outputs(path: Path, level: onnxruntime.GraphOptimizationLevel) -> list[torch.Tensor]:
    """What the program gives for 200 tokens, or for one at position 199; states of noise."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(7)
    is_step = path.stem.startswith("decode")
    inputs = {
        "tokens": random_tokens(2, 1 if is_step else 200),
        "pos": torch.tensor(199 if is_step else 50, dtype=torch.int32),
        "positions": torch.tensor([199, MAX_SEQ - 1], dtype=torch.int32),
    }
    fed = {
        value.name: (
            torch.randn(value.shape, generator=generator)
            if value.name.startswith("state.")
            else inputs[value.name]
        ).numpy()
        for value in session.get_inputs()
    }
    return [torch.from_numpy(result) for result in session.run(None, fed)]
