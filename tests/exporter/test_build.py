"""Builds: what is refused and when, what is left behind, and what a bundle holds."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_artifacts import manifest as manifests
from llama_artifacts.errors import (
    BuildError,
    CheckpointError,
    LlamaExportError,
    TokenizerError,
    VerificationError,
)
from llama_export import build as building
from llama_export.build import BuildResult, build, describe_rope
from llama_export.checkpoint.config import RopeConfig
from llama_export.lower import aoti, onnx, pt2
from llama_export.lower.backend import Lowered, Place
from llama_export.recipe import Recipe
from llama_export.report import Reporter
from llama_export.trace import Job
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


@pytest.fixture
def recipe(tiny_checkpoint: Path, tmp_path: Path) -> Recipe:
    """One small program, quickly built, to be varied."""
    return Recipe(str(tiny_checkpoint), tmp_path / "out", ("decode",), ("pt2",), max_seq=16)


def refused(recipe: Recipe, kind: type[LlamaExportError] = BuildError, **changes: Any) -> str:
    """The one line of a build that must fail; nothing may stay beside the output."""
    recipe = replace(recipe, **changes)
    assert recipe.output is not None
    parent = recipe.output.parent
    before = sorted(parent.iterdir()) if parent.is_dir() else None
    with pytest.raises(kind) as caught:
        build(recipe)
    after = sorted(parent.iterdir()) if parent.is_dir() else None
    assert before == after
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.fixture
def no_weights_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_weights(*args: Any, **settings: Any) -> None:
        pytest.fail("weights were written before the refusal")

    monkeypatch.setattr(building, "write_weights", write_weights)


# --- choices that are refused, all of them before anything is written -----------------------------


@pytest.mark.usefixtures("no_weights_are_written")
class TestRefusedEarly:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"entries": ("decode", "decod")}, "unknown entry `decod`"),
            ({"formats": ("pt2", "tflite")}, "unknown format `tflite`"),
            ({"entries": ()}, "nothing to build"),
            ({"formats": ()}, "nothing to build"),
            ({"max_seq": 0}, "expected --max-seq from 8 to the model's 256, got 0"),
            ({"max_seq": 7}, "got 7"),
            ({"max_seq": 257}, "got 257"),
            ({"max_seq": -1}, "got -1"),
            ({"batch": 0}, "expected --batch of at least 1, got 0"),
            ({"batch": -2}, "got -2"),
            ({"isa": "avx2"}, "--isa avx2"),
            ({"isa": "avx2", "formats": ("aoti",), "device": "cuda"}, "--isa avx2"),
        ],
    )
    def test_a_wrong_choice(self, recipe: Recipe, changes: dict[str, Any], message: str) -> None:
        assert message in refused(recipe, **changes)

    @pytest.mark.parametrize("num_layers", [0, 3, -1])
    def test_layers_that_are_not_there(self, recipe: Recipe, num_layers: int) -> None:
        assert "--num-layers" in refused(recipe, CheckpointError, num_layers=num_layers)

    def test_no_compiler(
        self, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "g++" in refused(recipe, formats=("pt2", "aoti"))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_native_code_for_a_device_that_is_not_here(self, recipe: Recipe) -> None:
        assert "CUDA" in refused(recipe, formats=("aoti",), device="cuda")

    @pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
    def test_an_output_that_exists(self, recipe: Recipe, kind: str) -> None:
        output = recipe.output
        assert output is not None
        if kind == "folder":
            output.mkdir()
        elif kind == "file":
            output.write_text("mine")
        else:
            output.symlink_to("nowhere")
        assert "the output exists" in refused(recipe)

    def test_an_output_under_a_file(self, recipe: Recipe, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert "not a folder" in refused(recipe, output=tmp_path / "file" / "out")

    def test_an_output_where_nothing_can_be_made(self, recipe: Recipe) -> None:
        assert "/proc/out" in refused(recipe, output=Path("/proc/out"))

    def test_no_room_for_the_weights(self, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = type("Usage", (), {"free": 1000})
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
        assert "1,000 free" in refused(recipe)

    @pytest.mark.parametrize("name", ["a\nb", "a\x1b[31mb", "a\u202eb", os.fsdecode(b"a\xff")])
    def test_a_checkpoint_of_an_unprintable_name(
        self, recipe: Recipe, tmp_path: Path, name: str
    ) -> None:
        write_tiny(tmp_path / "models").rename(tmp_path / name)
        message = refused(recipe, model=str(tmp_path / name))
        assert "printable" in message

    def test_the_checkpoints_own_name_where_no_output_is_given(
        self, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_tiny(tmp_path / "m")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(BuildError, match="checkpoint's own name") as caught:
            build(replace(recipe, model="m", output=None))
        assert "-o" in str(caught.value.hint)
        assert (tmp_path / "m" / "config.json").exists()


# --- what breaks in the middle --------------------------------------------------------------------


class FullError(OSError):
    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("module", "place", "format"),
    [
        (pt2, "write_archive", "pt2"),
        (pt2, "trace", "pt2"),
        (onnx.ir, "save", "onnx"),
        (aoti, "aoti_compile_and_package", "aoti"),
    ],
)
def test_a_full_disk_while_a_program_is_written(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, module: Any, place: str, format: Any
) -> None:
    def fail(*args: Any, **settings: Any) -> None:
        raise FullError

    monkeypatch.setattr(module, place, fail)
    message = refused(recipe, formats=(format,))
    assert "full" in message
    assert str(recipe.output) in message


@pytest.mark.parametrize(
    "cause",
    [
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed\nstack"),
        RuntimeError(""),
        FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/nowhere']"),
        PermissionError(errno.EACCES, "Permission denied", "/elsewhere/cache"),
        subprocess.CalledProcessError(1, ["g++", "x.cpp"]),
    ],
    ids=["torch", "silent", "TMPDIR", "cache", "compiler"],
)
def test_a_failure_of_a_library_names_the_program(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, cause: Exception
) -> None:
    def save(*args: Any, **settings: Any) -> None:
        raise cause

    monkeypatch.setattr(torch.export, "save", save)
    assert refused(recipe).startswith("decode pt2: cannot be made: ")


def test_a_fault_of_ours_keeps_its_traceback(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(*args: Any) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(pt2, "trace", trace)
    with pytest.raises(AssertionError, match="a bug"):
        build(recipe)
    assert recipe.output is not None
    assert not list(recipe.output.parent.iterdir())


COMMAND = """if True:
    import resource, sys
    from pathlib import Path
    from llama_artifacts.errors import BuildError
    from llama_export.build import build
    from llama_export.recipe import Recipe
    model, output, limit, format = sys.argv[1:]
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    try:
        build(Recipe(model, Path(output), ("decode",), (format,), max_seq=16))
    except BuildError as error:
        print(error)
        sys.exit(1)
"""


def run_build(
    model: Path, output: Path, *, limit: int = 0, format: str = "pt2", **environment: str
) -> str:
    command = [sys.executable, "-c", COMMAND, str(model), str(output), str(limit), format]
    settings = {**os.environ, **environment}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert not output.exists()
    return done.stdout


@pytest.mark.parametrize("what", ["weights", "program"])
def test_a_real_limit_on_the_size_of_files(tmp_path: Path, what: str) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = write_tiny(tmp_path / "m", has_tokenizer=False, **sizes)
    limit = {"weights": 2000, "program": 6000}[what]
    output = run_build(model, tmp_path / "out", limit=limit)
    assert output.startswith(str(tmp_path / "out"))
    assert output.count("\n") == 1
    assert not list(tmp_path.glob(".out*"))


def test_a_tmpdir_that_cannot_be_written(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m", has_tokenizer=False)
    (tmp_path / "file").write_text("")
    output = run_build(
        model, tmp_path / "out", format="aoti", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "file" / "c")
    )
    assert output.startswith("aoti: cannot be made: ")


def test_an_interrupt_leaves_nothing(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **settings: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(5)

    monkeypatch.setattr(pt2, "trace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(recipe)
    assert recipe.output is not None
    assert not list(recipe.output.parent.iterdir())


def test_a_program_that_computes_something_else_completes_no_bundle(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = pt2.Pt2Backend.lower

    def lower(self: pt2.Pt2Backend, job: Job, place: Place) -> Lowered:
        config = replace(job.config, rms_norm_eps=0.5)
        return original(self, replace(job, config=config), place)

    monkeypatch.setattr(pt2.Pt2Backend, "lower", lower)
    message = refused(recipe, VerificationError)
    assert message.startswith("decode/pt2 parity: max diff ")


def test_a_program_that_cannot_be_run_completes_no_bundle(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = pt2.Pt2Backend.lower

    def lower(self: pt2.Pt2Backend, job: Job, place: Place) -> Lowered:
        lowered = original(self, job, place)
        (place.folder / lowered.file).write_bytes(b"PK noise")
        return lowered

    monkeypatch.setattr(pt2.Pt2Backend, "lower", lower)
    assert "cannot be run" in refused(recipe, VerificationError)


# --- what is built --------------------------------------------------------------------------------


def built(recipe: Recipe, **changes: Any) -> tuple[BuildResult, manifests.Manifest]:
    result = build(replace(recipe, **changes))
    return result, manifests.read(result.folder)


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
