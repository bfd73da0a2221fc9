"""The page that describes the format says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_artifacts import (
    codec,
    integrity,
    manifest,
    manifest_file,
    safetensors,
    signature,
    strict_json,
)
from llama_artifacts.dtypes import BY_NAME
from llama_artifacts.limits import FileName, split
from llama_artifacts.schema import manifest_schema

PAGE = (Path(__file__).parents[2] / "artifacts" / "FORMAT.md").read_text()
_, (FILE_NAME,) = split(FileName)


@pytest.mark.parametrize(
    "text",
    [
        f"# The bundle format, version {manifest.SCHEMA_MAJOR}.{manifest.SCHEMA_MINOR}",
        f"MUST match `{FILE_NAME.schema()['pattern'][1:-1]}`",
        f"at most {manifest_file.MAX_MANIFEST_BYTES // 2**20} MiB, at most 2^{strict_json.MAX_VALUES.bit_length() - 1}\n",
        f"more than {manifest.BLOCK_BYTES // 2**20} MiB ({manifest.BLOCK_BYTES:,} bytes)",
        f"at most {strict_json.MAX_DEPTH} levels",
        f"at most {codec.MAX_TEXT_CHARS:,} characters",
        f"{safetensors.MAX_HEADER_BYTES:,}); the header",
        f"`shape` (at most {safetensors.MAX_DIMS} sizes)",
        f"`dtype` is one of `{' '.join(BY_NAME)}`",
        *(f"`{name}`" for name in sorted(integrity.UNLISTED)),
        *(f"`{name}`" for name in manifest.FORMATS),
    ],
)
def test_its_figures_are_those_of_the_code(text: str) -> None:
    assert text in PAGE


def test_the_header_takes_as_many_axes_as_a_signature() -> None:
    assert signature.MAX_RANK == safetensors.MAX_DIMS


def test_every_weights_mode_is_explained() -> None:
    for mode in manifest_schema()["properties"]["weights"]["enum"]:
        assert f"`{mode}`" in PAGE, mode


def test_the_page_is_short_enough_to_be_read() -> None:
    assert len(PAGE.splitlines()) < 150
