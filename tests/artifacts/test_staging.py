"""A bundle appears whole or not at all, also where an old one is replaced."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_artifacts import bundle as bundles
from llama_artifacts import manifest_file
from llama_artifacts.bundle import check_space, open_bundle, staging
from llama_artifacts.errors import BuildError
from tests.artifacts.writers import build, names, num_descriptors, other_process, raiser
from tests.bundles import write_sample


def test_a_staged_bundle_appears_when_the_block_ends(tmp_path: Path) -> None:
    target, before = tmp_path / "new" / "parents" / "b", num_descriptors()
    with staging(target) as folder:
        assert folder.parent == target.parent
        write_sample(folder)
        assert not target.exists()
    open_bundle(target)
    assert names(target.parent) == ["b"]
    assert num_descriptors() == before


def test_a_relative_target_is_staged_beside_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with staging(Path("b")) as folder:
        write_sample(folder)
    open_bundle(tmp_path / "b")
    assert names(tmp_path) == ["b"]


@pytest.mark.parametrize(
    "failure",
    [RuntimeError("x"), KeyboardInterrupt(), SystemExit(3), ConnectionError("no route to hub")],
)
def test_a_failed_block_leaves_nothing_and_its_error_passes(
    tmp_path: Path, failure: BaseException
) -> None:
    before = num_descriptors()
    with pytest.raises(type(failure)) as caught:
        build(tmp_path / "b", raiser(failure))
    assert caught.value is failure
    assert names(tmp_path) == []
    assert num_descriptors() == before
    with staging(tmp_path / "b") as folder:
        write_sample(folder)


def test_a_missing_file_of_the_user_is_no_fault_of_the_output(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), staging(tmp_path / "b"):
        (tmp_path / "checkpoint").read_bytes()
    assert names(tmp_path) == []


def test_a_staged_file_that_cannot_be_written_is_named_by_its_final_place(tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:
        build(tmp_path / "b", lambda folder: (folder / "decode.pt2").mkdir())
    assert str(caught.value) == f"{tmp_path}/b/decode.pt2: cannot be written: File exists"


@pytest.mark.parametrize("kind", ["file", "folder", "full folder", "link", "dangling link"])
def test_an_existing_target_is_refused_and_kept(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "b"
    if kind == "file":
        target.write_text("mine")
    elif "link" in kind:
        target.symlink_to("gone" if "dangling" in kind else ".")
    else:
        target.mkdir()
        if "full" in kind:
            (target / "mine").touch()
    before = target.lstat()
    with pytest.raises(BuildError) as caught, staging(target):
        pytest.fail("entered")
    assert str(caught.value) == f"{target}: the output exists"
    assert caught.value.hint == "remove it, or choose another with -o"
    assert target.lstat() == before
    assert names(tmp_path) == ["b"]


@pytest.mark.parametrize("kind", ["file", "empty folder"])
def test_a_target_that_appears_meanwhile_is_refused_and_kept(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "b"
    with pytest.raises(BuildError, match="the output exists"):
        build(target, lambda folder: target.touch() if kind == "file" else target.mkdir())
    assert names(tmp_path) == ["b"]
    assert target.is_file() == (kind == "file")


def test_a_target_that_another_build_just_finished_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "b"

    @contextlib.contextmanager
    def lock_late(target: Path) -> Iterator[None]:
        write_sample(target)
        yield

    monkeypatch.setattr(bundles, "_lock", lock_late)
    with pytest.raises(BuildError, match="the output exists"), staging(target):
        pytest.fail("entered")
    open_bundle(target)


@pytest.mark.parametrize("target", ["/dev/null/b", "/dev/null/deep/b"])
def test_a_target_under_a_file_is_refused(target: str) -> None:
    with pytest.raises(BuildError) as caught, staging(Path(target)):
        pytest.fail("entered")
    assert str(caught.value) == f"{target}: cannot be written: a parent is not a folder"


def test_a_target_with_too_long_a_name_is_refused(tmp_path: Path) -> None:
    for length in (250, 300):
        with pytest.raises(BuildError, match="cannot be written: File name too long"):
            staging(tmp_path / ("x" * length)).__enter__()
    with pytest.raises(BuildError, match="cannot be written: File name too long"):
        check_space(tmp_path / ("x" * 300) / "b", 1)
    assert names(tmp_path) == []


def test_a_parent_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *args: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(BuildError) as caught, staging(tmp_path / "b"):
        pytest.fail("entered")
    assert str(caught.value) == f"{tmp_path}/.b.lock: cannot be written: Read-only file system"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, "the file system is full"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EFBIG, "a file would be larger than the file system or a limit allows"),
    ],
)
def test_a_full_disk_in_the_block_leaves_nothing(tmp_path: Path, code: int, expected: str) -> None:
    with pytest.raises(BuildError) as caught:
        build(tmp_path / "b", raiser(OSError(code, os.strerror(code))))
    assert str(caught.value) == f"{tmp_path}/b: {expected}"
    assert names(tmp_path) == []


def test_a_full_disk_names_what_was_being_written(tmp_path: Path) -> None:
    """Of a copy, the error names both files, the source first."""
    staged = f"{tmp_path}/.b.partial-{os.getpid()}/decode.pt2"
    cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/other/source", None, staged)
    with pytest.raises(BuildError, match=r"b/decode\.pt2: the file system is full"):
        build(tmp_path / "b", raiser(cause))


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_at_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    fail = raiser(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    before = num_descriptors()
    monkeypatch.setattr(os if call == "fsync" else Path, call, fail)
    with pytest.raises(BuildError, match="the file system is full"), staging(tmp_path / "b") as f:
        write_sample(f)
    assert names(tmp_path) == []
    assert num_descriptors() == before


def test_a_limit_on_file_sizes_leaves_nothing(tmp_path: Path) -> None:
    code = """
    from llama_artifacts.errors import BuildError
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    try:
        with staging(target) as folder:
            (folder / "weights.safetensors").write_bytes(bytes(10000))
    except BuildError as error:
        print(error.message)
    """
    with other_process(code, tmp_path / "b") as process:
        assert process.communicate()[0].startswith("a file would be larger than")
    assert names(tmp_path) == []


def test_file_systems_that_cannot_sync_folders_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", raiser(OSError(errno.EINVAL, os.strerror(errno.EINVAL))))
    with staging(tmp_path / "b") as folder:
        write_sample(folder)
    open_bundle(tmp_path / "b")


def test_everything_is_synced_before_the_bundle_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, bool]] = []
    target = tmp_path / "b"
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((os.fstat(fd).st_ino, target.exists()))
    )
    with staging(target) as folder:
        write_sample(folder)
    early = {inode for inode, is_there in synced if not is_there}
    assert early == {path.stat().st_ino for path in (target, *target.iterdir())}
    assert synced[-1] == (tmp_path.stat().st_ino, True)


def test_too_little_space_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=12345)
    monkeypatch.setattr(shutil, "disk_usage", {tmp_path: usage}.__getitem__)
    target = tmp_path / "not" / "yet" / "b"
    check_space(target, 12345)
    with pytest.raises(BuildError) as caught:
        check_space(target, 23456)
    assert str(caught.value) == f"{target}: needs 23,456 bytes, {tmp_path} has 12,345 free"
    assert caught.value.hint == "free some space, or choose another folder with -o"


def test_space_is_asked_for_a_relative_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_space(Path("b"), 1)
    check_space(Path("not/yet/b"), 1)
    assert names(tmp_path) == []


# --- replacing a bundle ---------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A bundle that is there already."""
    return write_sample(tmp_path / "b", name="old")


def test_a_bundle_is_replaced_at_once_by_a_whole_one(old: Path) -> None:
    with staging(old, overwrites=True) as folder:
        write_sample(folder, name="new")
        assert manifest_file.read(old).name == "old"
    assert manifest_file.read(old).name == "new"
    assert [path.name for path in old.parent.iterdir()] == ["b"]


def test_where_nothing_is_to_be_replaced_the_new_one_appears(tmp_path: Path) -> None:
    with staging(tmp_path / "b", overwrites=True) as folder:
        write_sample(folder)
    assert manifest_file.read(tmp_path / "b")


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, ValueError])
def test_the_old_bundle_survives_a_failure(old: Path, failure: type[BaseException]) -> None:
    before = {path.name: path.read_bytes() for path in old.iterdir()}

    def build_new() -> None:
        with staging(old, overwrites=True) as folder:
            write_sample(folder, name="new")
            raise failure

    with pytest.raises(failure):
        build_new()
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    assert [path.name for path in old.parent.iterdir()] == ["b"]


def test_only_a_bundle_is_replaced(tmp_path: Path, old: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("x")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(old)
    for name in ("notes", "file", "link"):
        with (
            pytest.raises(BuildError, match="exists and is no bundle"),
            staging(tmp_path / name, overwrites=True),
        ):
            raise AssertionError
    assert (tmp_path / "notes" / "mine.txt").read_text() == "x"


def test_a_file_system_without_exchange_is_told(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        @staticmethod
        def renameat2(*words: object) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *words, **options: Libc)
    with (
        pytest.raises(BuildError, match="cannot exchange"),
        staging(old, overwrites=True) as folder,
    ):
        write_sample(folder, name="new")
    assert manifest_file.read(old).name == "old"
    assert [path.name for path in old.parent.iterdir()] == ["b"]
