"""Builds that are killed, that run out of space, and bundles in odd places."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import llama_runtime
from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from llama_artifacts.bundle import put_file, staging
from llama_artifacts.errors import BuildError
from llama_artifacts.integrity import check_whole
from llama_artifacts.manifest import Manifest
from llama_export.build import build
from llama_export.recipe import Recipe
from llama_export.verify import verify
from tests.cli.running import environment
from tests.tiny import write_tiny

NUM_KILLS = 4


def recipe(model: Path, output: Path, **choices: bool) -> Recipe:
    return Recipe(str(model), output, ("next_token",), ("pt2",), max_seq=32, **choices)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def old(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(recipe(tiny_checkpoint, tmp_path_factory.mktemp("old") / "bundle")).folder


# --- killed ---------------------------------------------------------------------------------------

QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def command(model: Path, output: Path) -> list[str]:
    """Another model's build, in a process."""
    words = ["build", model, "-o", output, "--overwrite", "--no-cache", "-j", "1"]
    words += ["--entry", "next_token", "--format", "pt2", "--max-seq", "32"]
    return [sys.executable, "-m", "llama_export", *map(str, words)]


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest, float]:
    """The other model, the manifest of its bundle, and the seconds that the build takes."""
    folder = tmp_path_factory.mktemp("new")
    model = write_tiny(folder / "new", has_tokenizer=False, rms_norm_eps=1e-3)
    started = time.monotonic()
    subprocess.run(command(model, folder / "b"), env=environment(), check=True, **QUIET)
    return model, manifest_file.read(folder / "b"), time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_build_leaves_the_old_bundle_or_the_new_one(
    old: Path, new: tuple[Path, Manifest, float], tmp_path: Path, number: signal.Signals
) -> None:
    """At random moments, the first of them while the interpreter starts; then a build succeeds."""
    target = shutil.copytree(old, tmp_path / "bundle")
    model, manifest, whole = new
    before = manifest_file.read(old), manifest
    moments = random.Random(int(number))
    for _ in range(NUM_KILLS // 2):
        process = subprocess.Popen(command(model, target), env=environment(), **QUIET)
        time.sleep(moments.uniform(0, whole))
        process.send_signal(number)
        process.wait()
        assert check_whole(target).manifest in before
    subprocess.run(command(model, target), env=environment(), check=True, **QUIET)
    assert check_whole(target).manifest == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


# --- no space, no leave ---------------------------------------------------------------------------


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A file system in memory of a given size; skips, with the reason, who may not mount one."""
    folders: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"mount {len(folders)}"
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # maps may still be in use


def test_a_file_system_that_is_too_small_is_refused_before_work(
    tiny_checkpoint: Path, mounted: Callable[[str], Path]
) -> None:
    folder = mounted("1m")
    with pytest.raises(BuildError, match=rf"needs .* bytes, {folder} has .* free"):
        build(recipe(tiny_checkpoint, folder / "bundle"))
    assert not list(folder.iterdir())


@pytest.mark.parametrize("size", ["200k", "364k", "380k"])
def test_a_disk_that_fills_up_leaves_the_old_bundle(
    tiny_checkpoint: Path,
    mounted: Callable[[str], Path],
    old: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: str,
) -> None:
    """It is full in the weights, or in a file after them."""
    monkeypatch.setattr("llama_export.build.check_space", lambda *words: None)
    folder = mounted(size)
    kept = folder / "bundle"
    kept.mkdir()
    (kept / manifests.FILE_NAME).write_bytes((old / manifests.FILE_NAME).read_bytes())
    with pytest.raises(BuildError, match="the file system is full"):
        build(recipe(tiny_checkpoint, kept, overwrites=True))
    assert [path.name for path in folder.iterdir()] == ["bundle"]
    assert manifest_file.read(kept) == manifest_file.read(old)


def test_a_read_only_bundle_runs_and_is_not_written(
    tiny_checkpoint: Path, mounted: Callable[[str], Path], old: Path
) -> None:
    folder = mounted("64m")
    bundle = shutil.copytree(old, folder / "Bündel mit Lücke ☃")
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    assert all(result.passed for result in verify(bundle, uses_vectors=True))
    with pytest.raises(BuildError, match="cannot be written: Read-only file system") as caught:
        put_file(bundle, "samples.json", b"{}")
    assert "writable" in (caught.value.hint or "")
    with pytest.raises(BuildError, match="cannot be written: Read-only file system"):
        build(recipe(tiny_checkpoint, folder / "other"))


# --- odd places -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["with space", "ünïcödé ☃", "-dash", "a'b\"c", "new\nline"])
def test_a_bundle_may_be_moved_and_called_anything(old: Path, tmp_path: Path, name: str) -> None:
    moved = shutil.copytree(old, tmp_path / name)
    assert check_whole(moved).manifest == manifest_file.read(old)
    entry = llama_runtime.load(moved).entry("next_token")
    assert entry(tokens=[[1, 2, 3]]).shape == (1, 128)


def test_a_bundle_that_is_moved_while_it_is_used_goes_on(old: Path, tmp_path: Path) -> None:
    here = shutil.copytree(old, tmp_path / "here")
    entry = llama_runtime.load(here).entry("next_token")
    expected = entry(tokens=[[1, 2, 3]])
    here.rename(tmp_path / "there")
    assert (entry(tokens=[[1, 2, 3]]) == expected).all()


def test_two_builds_into_one_folder(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The second is refused and names the first, which ends well."""
    with (
        staging(tmp_path / "bundle") as folder,
        pytest.raises(BuildError, match=rf"another build \(process {os.getpid()}\)"),
    ):
        build(recipe(tiny_checkpoint, tmp_path / "bundle"))
    assert folder.name == f".bundle.partial-{os.getpid()}"
    assert (tmp_path / "bundle").is_dir()
