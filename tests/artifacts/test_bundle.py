"""Bundles as they are opened, and a file more in one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_artifacts.bundle import check_digest, open_bundle, put_file
from llama_artifacts.digests import sha256
from llama_artifacts.errors import BuildError, IntegrityError, LlamaExportError, ManifestError
from llama_artifacts.manifest import FILE_NAME
from tests.artifacts.writers import other_process
from tests.bundles import CONTENTS, sample_manifest, write_sample


@pytest.mark.parametrize("name", ["b", "with space", "größe-模型", "line\nbreak", "[x]*?"])
def test_a_bundle_opens_wherever_it_is_moved(tmp_path: Path, name: str) -> None:
    write_sample(tmp_path / "old")
    folder = tmp_path / name
    (tmp_path / "old").rename(folder)
    bundle = open_bundle(folder)
    assert bundle.manifest == sample_manifest()
    for listed in bundle.manifest.files:
        check_digest(bundle, listed)
    assert bundle.path("decode.pt2") == folder / "decode.pt2"


def test_a_bundle_opens_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_sample(tmp_path / "b"))
    check_digest(open_bundle(Path()), "decode.pt2")


def test_files_that_are_not_listed_are_let_alone(tmp_path: Path) -> None:
    folder = write_sample(tmp_path / "b")
    (folder / "notes.txt").write_text("mine")
    open_bundle(folder)


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"expected a `manifest\.json`, found a folder"):
        open_bundle(tmp_path)


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, 1)


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("gone")


def replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (remove, "missing: No such file or directory"),
        (truncate, "damaged: 1 bytes, expected 19"),
        (extend, "damaged: 20 bytes, expected 19"),
        (replace_by_folder, "expected a plain file"),
        (replace_by_pipe, "expected a plain file"),
        (replace_by_dangling_link, "missing: dangling symlink"),
        (replace_by_loop, "missing: dangling symlink"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, damage: Callable[[Path], None], expected: str
) -> None:
    path = write_sample(tmp_path / "b") / "decode.pt2"
    damage(path)
    with pytest.raises(IntegrityError) as caught:
        open_bundle(tmp_path / "b")
    assert str(caught.value) == f"{path}: {expected}"
    assert caught.value.hint == "copy the bundle again, or build it again"


def test_links_are_followed_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    folder, blobs = write_sample(tmp_path / "snapshots" / "rev"), tmp_path / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        blob = path.rename(blobs / sha256(path))
        path.symlink_to(f"../../blobs/{blob.name}")
    bundle = open_bundle(folder)
    check_digest(bundle, "decode.pt2")
    bundle.path("decode.pt2").write_bytes(b"an EXPORTED program")
    with pytest.raises(IntegrityError, match="damaged: sha256"):
        check_digest(open_bundle(folder), "decode.pt2")


@pytest.mark.parametrize("target", ["../decode.pt2", "../blobs/decode.pt2", "/{folder}/decode.pt2"])
@pytest.mark.parametrize("name", ["decode.pt2", FILE_NAME])
def test_a_link_out_of_the_bundle_is_refused(tmp_path: Path, name: str, target: str) -> None:
    path = write_sample(tmp_path / "b") / name
    outside = tmp_path / "b" / target.format(folder=tmp_path).replace("decode.pt2", name)
    outside.parent.mkdir(exist_ok=True)
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(LlamaExportError) as caught:
        open_bundle(tmp_path / "b")
    assert str(caught.value) == f"{path}: expected no link out of the bundle"
    assert caught.value.hint == "copy the bundle with its files in place of the links (cp -rL)"


def test_a_link_within_the_bundle_and_a_linked_bundle_are_followed(tmp_path: Path) -> None:
    folder = write_sample(tmp_path / "b")
    (folder / "decode.pt2").rename(folder / "other.pt2")
    (folder / "decode.pt2").symlink_to("other.pt2")
    (tmp_path / "linked").symlink_to("b")
    check_digest(open_bundle(tmp_path / "linked"), "decode.pt2")


def test_another_content_of_the_same_size_has_another_digest(tmp_path: Path) -> None:
    folder = write_sample(tmp_path / "b")
    shutil.copy(folder / "decode.pt2", folder / "x")
    expected = sha256(folder / "x")
    (folder / "decode.pt2").write_bytes(b"an exported pr0gram")
    actual = sha256(folder / "decode.pt2")
    with pytest.raises(IntegrityError) as caught:
        check_digest(open_bundle(folder), "decode.pt2")
    place = folder / "decode.pt2"
    message = f"damaged: sha256 {actual[:12]}..., expected {expected[:12]}..."
    assert str(caught.value) == f"{place}: {message}"


def test_a_file_that_vanishes_after_opening_is_named(tmp_path: Path) -> None:
    bundle = open_bundle(write_sample(tmp_path / "b"))
    bundle.path("decode.pt2").unlink()
    with pytest.raises(IntegrityError, match=r"decode\.pt2: cannot be read: No such file"):
        check_digest(bundle, "decode.pt2")


def test_an_opened_bundle_needs_every_listed_file(tmp_path: Path) -> None:
    for name in CONTENTS:
        folder = write_sample(tmp_path / name)
        (folder / name).unlink()
        with pytest.raises(IntegrityError, match="missing"):
            open_bundle(folder)
    assert FILE_NAME not in CONTENTS


# --- a file more ----------------------------------------------------------------------------------


def test_a_file_is_added_and_replaced_with_its_digest(tmp_path: Path) -> None:
    folder = write_sample(tmp_path / "b")
    for content in (b"first", b"second, longer"):
        put_file(folder, "samples.json", content)
        bundle = open_bundle(folder)
        check_digest(bundle, "samples.json")
        assert bundle.path("samples.json").read_bytes() == content
    assert set(bundle.manifest.files) == {*CONTENTS, "samples.json"}
    assert {path.name for path in folder.iterdir()} == {*CONTENTS, "samples.json", FILE_NAME}
    assert {path.name for path in tmp_path.iterdir()} == {"b"}


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_a_crash_while_a_file_is_replaced_leaves_a_whole_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_done: int
) -> None:
    folder = write_sample(tmp_path / "b")
    put_file(folder, "samples.json", b"first")
    original, calls = Path.replace, []

    def replace(path: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) > num_done:
            raise KeyboardInterrupt
        return original(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        put_file(folder, "samples.json", b"second, longer")
    bundle = open_bundle(folder)
    assert ("samples.json" in bundle.manifest.files) == (num_done == 0)
    for name in bundle.manifest.files:
        check_digest(bundle, name)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_folder_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_sample(tmp_path / "b")
    before = (folder / FILE_NAME).read_bytes()

    def refuse(path: Path, data: bytes) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(BuildError, match="cannot be written: Permission denied"):
        put_file(folder, "samples.json", b"x")
    assert (folder / FILE_NAME).read_bytes() == before


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    folder = write_sample(tmp_path / "b")
    code = """
    from llama_artifacts.bundle import put_file
    for number in range(20):
        put_file(target, f"other-{number}.json", b"{}")
    """
    with other_process(code, folder) as process:
        for number in range(20):
            put_file(folder, f"own-{number}.json", b"{}")
        assert process.wait() == 0
    files = open_bundle(folder).manifest.files
    assert set(files) == {
        *CONTENTS,
        *(f"{who}-{number}.json" for who in ("own", "other") for number in range(20)),
    }
