"""Builds: what a bundle holds, and what the result says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from llama_artifacts.errors import TokenizerError
from llama_export.build import BuildResult, build, describe_rope
from llama_export.checkpoint.config import RopeConfig
from llama_export.recipe import Recipe
from llama_export.report import Reporter
from tests.exporter.builds import refused
from tests.tiny import ABSENT, tiny_config, tiny_tensors, write_tiny, write_weights


class Record(Reporter):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, name: str, total: int | None = None) -> Any:
        self.steps.append(name)
        return super().step(name, total)


def built(recipe: Recipe, **changes: Any) -> tuple[BuildResult, manifests.Manifest]:
    result = build(replace(recipe, **changes))
    return result, manifest_file.read(result.folder)


def test_the_result_says_what_lies_in_the_folder(recipe: Recipe) -> None:
    result, manifest = built(recipe, formats=("pt2", "pt2"), entries=("decode", "decode"))
    assert result.folder == recipe.output
    files = {path.name: path.stat().st_size for path in result.folder.iterdir()}
    assert result.bundle_bytes == sum(files.values())
    assert result.weights_bytes == files["weights.safetensors"]
    assert [(made.label, made.program.format, made.bytes) for made in result.programs] == [
        ("decode", "pt2", files["decode.pt2"])
    ]
    assert set(manifest.files) | {"manifest.json"} == set(files)
    assert manifest.model.num_parameters == sum(
        tensor.numel()
        for name, tensor in load_file(result.folder / "weights.safetensors").items()
        if not name.endswith("inv_freq")
    )
    assert (manifest.name, manifest.max_seq, manifest.batch) == ("tiny", 16, 1)
    assert manifest.stop_tokens == (2,)
    assert manifest.toolchain["torch"].startswith("2.13")


@pytest.mark.slow
def test_without_weights_none_is_read_or_written(recipe: Recipe, tmp_path: Path) -> None:
    write_tiny(tmp_path / "m")
    data = (tmp_path / "m" / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    (tmp_path / "m" / "model.safetensors").write_bytes(data[:header])
    changes = {"model": str(tmp_path / "m"), "weights": "none", "formats": ("pt2", "onnx")}
    result, manifest = built(recipe, **changes)
    assert result.weights_bytes == 0
    assert manifest.weights == "none"
    assert not manifest.checks
    assert not (result.folder / "weights.safetensors").exists()


def test_the_first_layers_alone(recipe: Recipe) -> None:
    _, manifest = built(recipe, num_layers=1)
    assert manifest.model.num_layers == 1
    assert len(manifest.programs[0].signature.states) == 2
    assert not any("layers.1." in name for name in manifest.programs[0].constants)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_bfloat16_checkpoint_in_each_dtype(recipe: Recipe, tmp_path: Path, dtype: Any) -> None:
    write_tiny(tmp_path / "m", dtype=torch.bfloat16, torch_dtype="bfloat16")
    formats = ("pt2", "onnx") if dtype == "f16" else ("pt2",)
    changes = {"model": str(tmp_path / "m"), "dtype": dtype, "formats": formats}
    result, manifest = built(recipe, **changes)
    expected = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    weights = load_file(result.folder / "weights.safetensors")
    assert weights.pop("model.rotary_emb.inv_freq").dtype == torch.float32
    assert {tensor.dtype for tensor in weights.values()} == {expected}
    assert manifest.dtype == dtype
    # ONNX Runtime's CPU kernels compute in float32.
    for program in manifest.programs:
        assert program.dtype == (dtype if program.format == "pt2" else "f32")
        assert {spec.dtype for spec in program.signature.states} == {program.dtype}


@pytest.mark.slow
def test_mixed_dtypes_are_kept_and_run(recipe: Recipe, tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config(), dtype=torch.bfloat16)
    mixed = {name: t.float() if t.ndim == 1 else t for name, t in tensors.items()}
    write_tiny(tmp_path / "m", torch_dtype="bfloat16")
    save_file(mixed, tmp_path / "m" / "model.safetensors")
    changes = {"model": str(tmp_path / "m"), "formats": ("pt2", "onnx")}
    result, manifest = built(recipe, **changes)
    weights = load_file(result.folder / "weights.safetensors")
    assert {name: weights[name].dtype for name in mixed} == {n: t.dtype for n, t in mixed.items()}
    assert manifest.dtype == "bf16"
    assert any("mixed" in note for note in result.notes)


@pytest.mark.slow
def test_layers_with_equal_weights_stay_two(recipe: Recipe, tmp_path: Path) -> None:
    """Every tensor keeps its name and place, also for a compiler that shares equal constants."""
    tensors = tiny_tensors(tiny_config())
    for name in [name for name in tensors if ".layers.1." in name]:
        tensors[name] = tensors[name.replace(".1.", ".0.")].clone()
    folder = write_tiny(tmp_path / "m")
    write_weights(folder, tensors)
    result, manifest = built(
        recipe, model=str(folder), entries=("next_token",), formats=("pt2", "aoti", "onnx")
    )
    stored = load_file(result.folder / "weights.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
    for program in manifest.programs:
        assert set(program.constants) >= tensors.keys(), program.format
    assert {check.format for check in manifest.checks if check.law == "parity"} == {
        program.format for program in manifest.programs
    }


def test_a_weight_that_float16_cannot_hold(recipe: Recipe, tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config(), dtype=torch.bfloat16)
    tensors["lm_head.weight"][0, 0] = 1e6
    write_tiny(tmp_path / "m")
    write_weights(tmp_path / "m", tensors)
    message = refused(recipe, model=str(tmp_path / "m"), dtype="f16")
    assert "`lm_head.weight` holds" in message


@pytest.mark.slow
def test_every_remark_is_told_once(recipe: Recipe, tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", rms_norm_eps=ABSENT, rope_theta=ABSENT)
    record = Record()
    recipe = replace(recipe, model=str(tmp_path / "m"), formats=("pt2", "onnx"))
    result = build(recipe, reporter=record)
    assert len(record.notes) == len(set(record.notes))
    assert tuple(record.notes) == result.notes
    assert sum("rms_norm_eps" in note for note in record.notes) == 1
    assert record.steps == [
        *("weights", "decode pt2", "decode onnx", "test vectors"),
        *("check layout", "check decode pt2", "check decode onnx"),
    ]


def test_the_capacity_where_none_is_asked_for(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own, but at most 2,048; also where a folder has the name of a preset."""
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path / "smollm2-135m", max_position_embeddings=64)
    write_tiny(tmp_path / "long", max_position_embeddings=10_000)
    changes: dict[str, Any] = {"max_seq": None, "weights": "none"}
    for number, (model, expected) in enumerate((("smollm2-135m", 64), ("long", 2048))):
        output = tmp_path / f"out{number}"
        assert built(recipe, model=model, output=output, **changes)[1].max_seq == expected


def test_an_output_in_a_new_folder_and_the_default_output(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"weights": "none", "output": tmp_path / "a" / "b" / "c"}
    assert built(recipe, **changes)[0].folder.is_dir()
    monkeypatch.chdir(tmp_path)
    result, _ = built(recipe, weights="none", output=None)
    assert result.folder == Path("tiny")
    assert (tmp_path / "tiny" / "manifest.json").exists()


def test_a_checkpoint_of_an_odd_but_printable_name(recipe: Recipe, tmp_path: Path) -> None:
    name = "größer & 'so' 模型"
    write_tiny(tmp_path / name)
    assert built(recipe, model=str(tmp_path / name))[1].name == name


@pytest.mark.parametrize(
    ("rope", "text"),
    [
        (RopeConfig(10000.0), "default theta=10000"),
        (RopeConfig(1e6, "linear", factor=2.5), "linear theta=1e+06 factor=2.5"),
        (
            RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192),
            "llama3 theta=500000 factor=8 low=1 high=4 original=8192",
        ),
    ],
)
def test_the_rope_in_words(rope: RopeConfig, text: str) -> None:
    assert describe_rope(rope) == text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", '{"model": {"type": "Odd", "vocab": {"a": 127}}}'),
        ("tokenizer_config.json", "<!doctype html>"),
        ("chat_template.jinja", "{% for message in"),
        ("chat_template.jinja", "{{ raise_exception('no') }}"),
    ],
)
def test_files_of_text_are_used_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError

    monkeypatch.setattr("llama_export.build.make_all", never)
    folder = write_tiny(tmp_path / "tiny")
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError) as caught:
        build(Recipe(str(folder), tmp_path / "out", ("decode",), ("pt2",)))
    assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
