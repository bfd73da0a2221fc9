"""A runtime that takes signed bundles only: refused before anything of them is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llama_runtime
from llama_artifacts.errors import LlamaExportError, SignatureError
from llama_artifacts.signing import PrivateKey, sign
from llama_runtime import loader
from tests.bundles import CONTENTS, write_sample
from tests.keys import Pair, write_pair


@pytest.fixture(autouse=True)
def nothing_is_mapped_or_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **settings: Any) -> None:
        pytest.fail("something of the bundle was used")

    monkeypatch.setattr(loader, "bundle_weights", fail)
    monkeypatch.setattr(loader, "load_program", fail)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair(tmp_path / "keys")


@pytest.fixture
def signed(tmp_path: Path, pair: Pair) -> Path:
    folder = write_sample(tmp_path / "bundle")
    sign(folder, PrivateKey(pair.private))
    return folder


def test_a_signed_bundle_is_opened(signed: Path, pair: Pair) -> None:
    loaded = llama_runtime.load(signed, require_signature=str(pair.public))
    assert loaded.folder == signed
    assert loaded.manifest.name == "tiny"


def test_an_unsigned_one_is_refused(tmp_path: Path, pair: Pair) -> None:
    folder = write_sample(tmp_path / "bundle")
    llama_runtime.load(folder)
    with pytest.raises(SignatureError, match="not signed"):
        llama_runtime.load(folder, require_signature=pair.public)


def test_another_key_is_refused(signed: Path, tmp_path: Path) -> None:
    other = write_pair(tmp_path / "other")
    with pytest.raises(SignatureError, match="another key"):
        llama_runtime.load(signed, require_signature=other.public)


@pytest.mark.parametrize("name", [*CONTENTS, "manifest.json"])
def test_a_changed_file_is_refused(signed: Path, pair: Pair, name: str) -> None:
    with (signed / name).open("ab") as file:
        file.write(b"\n")
    with pytest.raises(SignatureError, match="changed since it was signed"):
        llama_runtime.load(signed, require_signature=pair.public)


def test_a_bundle_swapped_during_the_check_is_refused(
    signed: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest that is used is the one whose bytes were signed, not what is there later."""
    from llama_artifacts import signing

    other = write_sample(tmp_path / "other", name="swapped")
    open_bundle = signing.open_bundle

    def swap(folder: Path) -> Any:
        (folder / "manifest.json").write_bytes((other / "manifest.json").read_bytes())
        return open_bundle(folder)

    monkeypatch.setattr(signing, "open_bundle", swap)
    with pytest.raises(LlamaExportError, match="changed since it was signed"):
        llama_runtime.load(signed, require_signature=pair.public)
