"""A bundle is built once more and compared, file by file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from llama_artifacts.bundle import put_file
from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import FILE_NAME
from llama_export.build import build
from llama_export.rebuild import differences
from llama_export.recipe import Recipe
from tests.cli.running import environment, invoke
from tests.conftest import TINY_BATCH, TINY_MAX_SEQ
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("again") / "tiny")


def recipe(checkpoint: Path, output: Path | None = None, max_seq: int = 32) -> Recipe:
    return Recipe(str(checkpoint), output, ("next_token",), ("pt2",), max_seq=max_seq)


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(recipe(checkpoint, tmp_path_factory.mktemp("built") / "bundle")).folder


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "moved and renamed")


def test_the_same_recipe_gives_the_same_bytes(bundle: Path, checkpoint: Path) -> None:
    put_file(bundle, "samples.json", b"{}")  # recorded later
    assert differences(recipe(checkpoint), bundle) == ()


def test_the_command_takes_the_choices_from_the_bundle(bundle: Path, checkpoint: Path) -> None:
    result = invoke("build", checkpoint, "--check", bundle)
    assert (result.exit_code, result.stdout) == (0, "no difference\n"), result.stderr
    assert invoke("build", "--check", bundle).exit_code == 2  # a local model is to be named


@pytest.mark.slow
def test_other_weights_and_sizes_are_named(bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(checkpoint, tmp_path / "tiny")
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    found = differences(recipe(changed), bundle)
    assert ("weights", "model.norm.weight") in {(x.area, x.name) for x in found}
    result = invoke("build", checkpoint, "--check", bundle, "--max-seq", "48", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert not report["same"]
    found = {(x["area"], x["name"]): (x["before"], x["after"]) for x in report["changes"]}
    assert found["config", "max_seq"] == ("32", "48")


def test_a_damaged_bundle_is_no_measure(bundle: Path, checkpoint: Path) -> None:
    (bundle / "next_token.pt2").write_bytes(b"")
    with pytest.raises(IntegrityError):
        differences(recipe(checkpoint), bundle)


@pytest.mark.slow
def test_another_process_in_another_folder_gives_the_same_bytes(
    tiny_checkpoint: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    """Nothing is shared: other folders for temporary files, an empty cache of the compiler."""
    moved = shutil.copytree(tiny_checkpoint, tmp_path / "elsewhere" / tiny_checkpoint.name)
    scratch = tmp_path / "a-longer-name-for-temporary-files"
    scratch.mkdir()
    changes = {"TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
    words = ["build", moved, "-o", tmp_path / "again", "--entry", "decode", "--no-cache", "-j", "1"]
    words += ["--max-seq", TINY_MAX_SEQ, "--batch", TINY_BATCH]
    command = [sys.executable, "-m", "llama_export", *map(str, words)]
    subprocess.run(command, env=environment(**changes), check=True, capture_output=True)
    compared = 0
    for path in (tmp_path / "again").iterdir():
        if path.name != FILE_NAME:
            assert path.read_bytes() == (tiny_bundle / path.name).read_bytes(), path.name
            compared += path.name.startswith("decode.")
    assert compared == 4  # three programs and the vectors


def test_native_code_names_no_file_of_the_build_machine(tiny_bundle: Path) -> None:
    """Messages of failed checks would, and with them the program would differ from place to place."""
    for path in tiny_bundle.glob("*.cpu-*.pt2"):
        with zipfile.ZipFile(path) as archive:
            data = b"".join(archive.read(name) for name in archive.namelist())
            assert all("/program." in name for name in archive.namelist() if "model/" in name)
        assert b"program.cpp" in data
        for folder in (b"/tmp", b"/site-packages/", b"torchinductor", str(Path.home()).encode()):
            assert folder not in data, (path.name, folder)
