"""Builds that fail: what is refused and when, and what is left behind."""

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

from llama_artifacts.errors import BuildError, CheckpointError, VerificationError
from llama_export import build as building
from llama_export.build import build
from llama_export.lower import aoti, onnx, pt2
from llama_export.lower.backend import Lowered, Place
from llama_export.lower.failures import known_failures
from llama_export.recipe import Recipe
from llama_export.trace import Job
from tests.exporter.builds import refused
from tests.tiny import write_tiny


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


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("x.cpp: In function:\nx.cpp:7:3: error: 'v' was not declared\n  v = 1;", "CXX"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("x.s: fatal error: cannot write: No space left on device", "TMPDIR"),
        ("PytorchStreamWriter failed writing file", "TMPDIR"),
    ],
    ids=["code", "memory", "disk", "archive"],
)
def test_a_hint_fits_what_a_compiler_said(tmp_path: Path, said: str, hint: str) -> None:
    with pytest.raises(BuildError) as caught, known_failures("decode aoti", tmp_path):
        raise RuntimeError(said)
    hints = ("CXX", "--jobs 1", "TMPDIR")
    assert [part for part in hints if part in (caught.value.hint or "")] == [hint]


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


@pytest.mark.slow
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


@pytest.mark.slow
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
