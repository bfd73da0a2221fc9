"""Bundles over a checkpoint's own files: linked into them, or referred to."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

import llama_runtime
from llama_artifacts import manifest_file
from llama_artifacts.digests import describe
from llama_artifacts.errors import BuildError, ChoiceError, CompatibilityError, IntegrityError
from llama_artifacts.manifest import BLOCK_BYTES, WEIGHTS_NAME, File, Source
from llama_artifacts.safetensors import read_header
from llama_artifacts.summary import show_bytes
from llama_export.build import build
from llama_export.cache import ProgramCache
from llama_export.checkpoint import hub
from llama_export.checkpoint.hf import HfCheckpoint
from llama_export.recipe import Recipe
from llama_export.verify import verify
from llama_runtime import places
from tests.cli.running import invoke
from tests.hub_server import Hub, Repository, point_at, serving
from tests.runtime.loading import copied, expected_logits, random_tokens
from tests.tiny import write_tiny
from tests.tiny_fp8 import write_tiny_fp8
from tests.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.slow  # it builds bundles of its own

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("sharded") / "tiny", num_shards=2)


def made(checkpoint: Path, folder: Path, **choices: Any) -> Path:
    given: dict[str, Any] = {"formats": ("pt2", "onnx"), "max_seq": 64, **choices}
    recipe = Recipe(str(checkpoint), folder, ("forward",), **given)
    return build(recipe, cache=ProgramCache()).folder


@pytest.fixture(scope="module")
def bundles(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("modes")
    modes: tuple[Any, ...] = ("copy", "link", "reference")
    return {mode: made(checkpoint, folder / mode, weights=mode) for mode in modes}


@pytest.mark.parametrize("format", ["pt2", "onnx"])
@pytest.mark.parametrize("mode", ["link", "reference"])
def test_logits_are_those_of_the_checkpoint(
    bundles: dict[str, Path], checkpoint: Path, mode: str, format: Any
) -> None:
    tokens = random_tokens(2, 40)
    loaded = llama_runtime.load(bundles[mode], format=format, weights_dir=checkpoint)
    actual = loaded.entry("forward")(tokens=tokens)
    torch.testing.assert_close(actual, expected_logits(checkpoint, tokens), rtol=0, atol=1e-5)
    copy = llama_runtime.load(bundles["copy"], format=format).entry("forward")
    assert torch.equal(actual, copy(tokens=tokens))


@pytest.mark.parametrize("mode", ["link", "reference"])
def test_every_law_holds(bundles: dict[str, Path], checkpoint: Path, mode: str) -> None:
    results = verify(bundles[mode], weights_dir=checkpoint, uses_vectors=True, laws=("layout",))
    assert {result.law for result in results} == {"integrity", "layout", "vectors"}
    assert all(result.passed for result in results)
    recorded = {check.law for check in manifest_file.read(bundles[mode]).checks}
    assert recorded == {"layout", "parity", "room"}  # they were run when it was built


def test_the_weights_are_there_once(bundles: dict[str, Path], checkpoint: Path) -> None:
    link, reference = bundles["link"], bundles["reference"]
    for name in SHARDS:
        data = (checkpoint / name).read_bytes()
        assert (link / name).read_bytes() == data
        assert not (link / name).is_symlink()
        assert not (reference / name).exists()
        recorded = manifest_file.read(reference).referenced[name]
        assert recorded == manifest_file.read(link).files[name]
        assert recorded.bytes == len(data)
    for folder in (link, reference):
        assert (folder / WEIGHTS_NAME).stat().st_size < 500  # the rotary frequencies alone
    with pytest.raises(KeyError):
        manifest_file.read(reference).files[SHARDS[0]]
    assert not manifest_file.read(link).referenced


def test_the_checkpoint_is_not_touched(checkpoint: Path, tmp_path: Path) -> None:
    own = shutil.copytree(checkpoint, tmp_path / "own")
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    folder = made(own, tmp_path / "b", weights="link", formats=("pt2",))
    shutil.rmtree(folder)
    assert {path.name: path.read_bytes() for path in own.iterdir()} == before


def test_programs_are_those_of_a_bundle_that_copies(bundles: dict[str, Path]) -> None:
    first, second = ((bundles[mode] / "forward.pt2").read_bytes() for mode in ("copy", "link"))
    assert first == second
    first, second = ((bundles[m] / "forward.onnx").read_bytes() for m in ("link", "reference"))
    assert first == second


def test_inspect_tells_where_the_weights_are(bundles: dict[str, Path]) -> None:
    assert f"in 3 files, {SHARDS[0]} and others" in invoke("inspect", bundles["link"]).stdout
    text = invoke("inspect", bundles["reference"]).stdout
    size = show_bytes(sum((bundles["link"] / name).stat().st_size for name in SHARDS))
    assert f"not here: {size} in 2 files, {SHARDS[0]} and others of the checkpoint" in text


# --- where a reference leads ----------------------------------------------------------------------


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest is remembered from before."""
    monkeypatch.setenv("LLAMA_EXPORT_CACHE", str(tmp_path / "cache"))


def test_without_a_folder_the_checkpoint_is_named(bundles: dict[str, Path]) -> None:
    message = f"they are `{SHARDS[0]}` of the checkpoint `tiny`"
    with pytest.raises(CompatibilityError, match=message) as caught:
        llama_runtime.load(bundles["reference"])
    assert "--weights-dir" in (caught.value.hint or "")
    result = invoke("verify", bundles["reference"])
    assert (result.exit_code, result.stderr.count("error:")) == (1, 1)


def test_a_folder_without_a_file_is_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError, match=f"{SHARDS[0]}: not there"):
        llama_runtime.load(bundles["reference"], weights_dir=tmp_path)


def test_weights_of_another_size_or_digest_are_refused(
    bundles: dict[str, Path], checkpoint: Path, tmp_path: Path, own_places: None
) -> None:
    other = shutil.copytree(checkpoint, tmp_path / "other")
    path = other / SHARDS[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=f"{SHARDS[1]}: not what the bundle was"):
        llama_runtime.load(bundles["reference"], weights_dir=other)
    path.write_bytes(data[:-1])
    with pytest.raises(IntegrityError, match=f"{SHARDS[1]}: .* bytes, the bundle was built from"):
        llama_runtime.load(bundles["reference"], weights_dir=other)


def test_a_file_is_hashed_once_until_it_changes(
    bundles: dict[str, Path],
    checkpoint: Path,
    tmp_path: Path,
    own_places: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[str] = []

    def difference(path: Path, file: File) -> str | None:
        hashed.append(path.name)
        return real(path, file)

    real = places.difference
    monkeypatch.setattr(places, "difference", difference)
    own = shutil.copytree(checkpoint, tmp_path / "own")
    for _ in range(2):
        llama_runtime.load(bundles["reference"], weights_dir=own)
    assert hashed == list(SHARDS)
    os.utime(own / SHARDS[0], ns=(1, 1))
    llama_runtime.load(bundles["reference"], weights_dir=own)
    assert hashed == [*SHARDS, SHARDS[0]]


def test_digests_of_blocks_are_remembered_with_the_whole(tmp_path: Path, own_places: None) -> None:
    """Else a manifest with false blocks would vouch for a file to one with the true digests."""
    path, num_bytes = tmp_path / "model.safetensors", BLOCK_BYTES + 1
    with path.open("wb") as file:
        file.truncate(num_bytes)
    places._check(path, dataclasses.replace(describe(path), sha256="0" * 64))
    with pytest.raises(IntegrityError, match="not what the bundle was built from: sha256"):
        places._check(path, File(num_bytes, "0" * 64))


def test_a_changed_block_of_large_weights_is_told(tmp_path: Path, own_places: None) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(BLOCK_BYTES + 1)
    listed = describe(path)
    places._check(path, listed)
    path.write_bytes(bytes(BLOCK_BYTES) + b"!")
    with pytest.raises(IntegrityError, match="not what the bundle was built from: bytes 64-65 MiB"):
        places._check(path, listed)


def test_a_cache_that_cannot_be_written_costs_time_only(
    bundles: dict[str, Path], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLAMA_EXPORT_CACHE", str(tmp_path / "file"))
    assert llama_runtime.load(bundles["reference"], weights_dir=checkpoint).weights


REVISION = "0" * 40


@pytest.fixture
def from_hub(bundles: dict[str, Path], tmp_path: Path) -> Path:
    source = Source("hub", "someone/Tiny", REVISION)
    return copied(bundles["reference"], tmp_path / "hub bundle", source=source)


@pytest.fixture
def online(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_places: None
) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    with serving() as online:
        point_at(online, monkeypatch)
        files = {name: (checkpoint / name).read_bytes() for name in SHARDS}
        online.repositories["someone/Tiny"] = Repository(commits={REVISION: files})
        yield online


def test_the_hub_is_asked_for_the_pinned_commit(
    from_hub: Path, checkpoint: Path, online: Hub
) -> None:
    online.repositories["someone/Tiny"].commit("main", {}, "a newer one")
    loaded = llama_runtime.load(from_hub, format="pt2")
    tokens = random_tokens(1, 20)
    actual = loaded.entry("forward")(tokens=tokens)
    torch.testing.assert_close(actual, expected_logits(checkpoint, tokens), rtol=0, atol=1e-5)
    llama_runtime.load(from_hub, format="pt2")
    assert online.ranges == {name: [""] for name in SHARDS}


def test_weights_come_on_from_where_they_broke_off_and_are_hashed_once(
    from_hub: Path, online: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    real = places.difference
    monkeypatch.setattr(places, "difference", lambda *a: (hashed.append(a[0].name), real(*a))[1])
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's own retries
    online.walls[SHARDS[1]] = 5500
    with pytest.raises(CompatibilityError, match=f"`{SHARDS[1]}` cannot be fetched"):
        llama_runtime.load(from_hub)
    online.walls.clear()
    online.ranges.clear()
    assert llama_runtime.load(from_hub).weights
    assert online.ranges == {SHARDS[1]: ["bytes=5000-"]}
    assert len(hashed) == len(SHARDS)


def test_other_weights_at_the_pinned_commit_are_refused(from_hub: Path, online: Hub) -> None:
    online.damages.add(SHARDS[1])
    place = f"someone/Tiny@{REVISION}/{SHARDS[1]}"
    for _ in range(2):
        with pytest.raises(IntegrityError, match=f"{place}: not what the bundle was built from"):
            llama_runtime.load(from_hub)


def test_a_hub_that_is_offline_is_one_line(
    from_hub: Path, online: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CompatibilityError, match=f"`{SHARDS[0]}` cannot be fetched") as caught:
        llama_runtime.load(from_hub)
    assert "--weights-dir" in (caught.value.hint or "")


def test_a_full_disk_under_the_hubs_cache_is_one_line(
    from_hub: Path, online: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    with pytest.raises(CompatibilityError, match=r"cannot be fetched: .*No space left"):
        llama_runtime.load(from_hub)


# --- what cannot be used in place -----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["link", "reference"])
def test_a_dtype_that_converts_needs_a_copy(checkpoint: Path, tmp_path: Path, mode: Any) -> None:
    with pytest.raises(ChoiceError, match="is stored as f32 and has to be converted") as caught:
        made(checkpoint, tmp_path / "b", weights=mode, dtype="bf16")
    assert "--weights copy" in (caught.value.hint or "")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("mode", ["link", "reference"])
def test_a_gguf_file_needs_a_copy(tmp_path: Path, mode: Any) -> None:
    path = write_tiny_gguf(tmp_path, write_tiny(tmp_path / "m"))
    with pytest.raises(ChoiceError, match="has to be converted"):
        made(path, tmp_path / "b", weights=mode)


def test_a_checkpoint_file_of_a_bundles_name_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", num_shards=2)
    index = folder / "model.safetensors.index.json"
    for old, new in zip(SHARDS, ("weights.safetensors", "other.safetensors"), strict=True):
        (folder / old).rename(folder / new)
        index.write_text(index.read_text().replace(old, new))
    with pytest.raises(ChoiceError, match=r"`weights\.safetensors` has the name of a file of"):
        made(folder, tmp_path / "b", weights="link")


def test_a_link_over_file_systems_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    monkeypatch.setattr("fcntl.ioctl", refuse)
    with pytest.raises(BuildError, match="cannot be linked into the bundle: Invalid cross") as e:
        made(checkpoint, tmp_path / "b", weights="link", formats=("pt2",))
    assert "--weights copy" in (e.value.hint or "")
    assert not (tmp_path / "b").exists()


def test_fp8_weights_are_used_in_place_and_looked_through(tmp_path: Path) -> None:
    folder = write_tiny_fp8(tmp_path / "m")
    linked = made(folder, tmp_path / "b", weights="link", formats=("pt2",))
    weights = llama_runtime.load(linked).weights
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert (linked / WEIGHTS_NAME).stat().st_size < 500
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[read_header(path).tensors["model.layers.0.mlp.up_proj.weight"].start] = 0x7F
    path.unlink()  # the bundle above may share its blocks
    path.write_bytes(data)
    with pytest.raises(BuildError, match="holds NaN among its FP8 weights"):
        made(folder, tmp_path / "c", weights="link", formats=("pt2",))


def test_headers_alone_make_a_bundle_that_was_not_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from the hub, where the weights need not be fetched to be referred to."""
    cut = shutil.copytree(checkpoint, tmp_path / "cut")
    for name in SHARDS:
        data = (cut / name).read_bytes()
        (cut / name).write_bytes(data[: read_header(cut / name).data_start])
    monkeypatch.setattr(hub, "describe", lambda _, __, name: describe(checkpoint / name))
    monkeypatch.setattr(
        "llama_export.blueprint.open_checkpoint",
        lambda model, *, keeps_codes, **options: HfCheckpoint.open(
            cut, source=Source("hub", "someone/Tiny", "0" * 40), **options
        ),
    )
    folder = made(cut, tmp_path / "b", weights="reference")
    assert not manifest_file.read(folder).checks
    assert verify(folder, weights_dir=checkpoint, laws=("parity",))[-1].passed
    tokens = random_tokens(1, 20)
    loaded = llama_runtime.load(folder, format="onnx", weights_dir=checkpoint)
    actual = loaded.entry("forward")(tokens=tokens)
    torch.testing.assert_close(actual, expected_logits(checkpoint, tokens), rtol=0, atol=1e-5)
