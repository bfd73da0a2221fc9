"""Bundles for a CUDA device: built, checked and run there. Deselected where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

import llama_runtime
from llama_artifacts.manifest import FORMATS, Format
from llama_export.build import build
from llama_export.recipe import Recipe
from tests.conftest import ALL_ENTRIES

pytestmark = pytest.mark.gpu
PROMPT = [1, 5, 9, 33, 2, 17]


@pytest.fixture(scope="module")
def cuda_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("cuda") / "tiny"
    return build(Recipe(str(tiny_checkpoint), output, ALL_ENTRIES, device="cuda")).folder


def test_every_program_was_checked_on_the_device(cuda_bundle: Path) -> None:
    manifest = llama_runtime.load(cuda_bundle, device="cuda").manifest
    checked = {(check.entry, check.format) for check in manifest.checks}
    assert checked == {(program.entry, program.format) for program in manifest.programs}


@pytest.mark.parametrize("format", FORMATS)
def test_the_device_gives_the_tokens_of_the_cpu(
    cuda_bundle: Path, tiny_bundle: Path, format: Format
) -> None:
    on_cpu = llama_runtime.load(tiny_bundle, format="pt2").generate_tokens(PROMPT, max_new=32)
    loaded = llama_runtime.load(cuda_bundle, device="cuda", format=format)
    assert list(loaded.generate_tokens(PROMPT, max_new=32)) == list(on_cpu)
