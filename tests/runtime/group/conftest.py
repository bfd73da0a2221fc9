"""A bundle for several processes whose programs are those of one: what is tested is the group."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from llama_artifacts.digests import describe
from llama_artifacts.manifest import Cut


@pytest.fixture(scope="session")
def declared_bundle(short_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`prefill` and `decode` as pt2, declared to be of two shards, too. Do not write into it."""
    return declared(short_bundle, tmp_path_factory.mktemp("declared") / "b")


def declared(bundle: Path, folder: Path) -> Path:
    """A copy in which each pt2 program is there once more, as one of two shards."""
    shutil.copytree(bundle, folder)
    manifest = manifest_file.read(folder)
    whole = [program for program in manifest.programs if program.format == "pt2"]
    parts = [replace(p, shards=2, file=f"{Path(p.file).stem}.2-shards.pt2") for p in whole]
    for program, part in zip(whole, parts, strict=True):
        shutil.copyfile(folder / program.file, folder / part.file)
    names = sorted(path.name for path in folder.iterdir() if path.name != manifests.FILE_NAME)
    manifest = replace(
        manifest,
        programs=(*whole, *parts),
        files={name: describe(folder / name) for name in names},
        cuts={"none": Cut("x", "rows")},  # a name that no program binds
    )
    (folder / manifests.FILE_NAME).write_bytes(manifest_file.to_json(manifest))
    return folder
