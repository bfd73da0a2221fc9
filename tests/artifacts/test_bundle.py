from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llama_artifacts import bundle as bundles
from llama_artifacts import manifest as manifests
from llama_artifacts.bundle import (
    check_digest,
    check_space,
    open_bundle,
    put_file,
    staging,
)
from llama_artifacts.digests import sha256
from llama_artifacts.errors import BuildError, IntegrityError, LlamaExportError, ManifestError
from llama_artifacts.manifest import FILE_NAME
from tests.bundles import CONTENTS, sample_manifest, write_sample

OTHER_PROCESS = """
import os, resource, signal, sys, time
from pathlib import Path
from llama_artifacts.bundle import staging
target = Path(sys.argv[1])
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def other_process(code: str, target: Path) -> Iterator[subprocess.Popen[str]]:
    """A second Python that runs the code; killed at the end."""
    command = [sys.executable, "-c", OTHER_PROCESS + textwrap.dedent(code), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


HOLD = """
with staging(target) as folder:
    (folder / "half").write_bytes(b"x")
    print("ready", flush=True)
    time.sleep(60)
"""


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def build(target: Path, last_step: Callable[[Path], object]) -> None:
    with staging(target) as folder:
        write_sample(folder)
        last_step(folder)


def raiser(failure: BaseException) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise failure

    return fail


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


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


def test_a_second_writer_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    target, before = tmp_path / "b", num_descriptors()
    with other_process(HOLD, target) as process:
        wait_until_ready(process)
        there = names(tmp_path)
        for _ in range(3):
            with pytest.raises(BuildError) as caught, staging(target):
                pytest.fail("entered")
        expected = f"another build (process {process.pid}) is writing it"
        assert str(caught.value) == f"{target}: {expected}"
        assert caught.value.hint == "wait for it, or choose another folder with -o"
        assert names(tmp_path) == there == [".b.lock", f".b.partial-{process.pid}"]
        with staging(tmp_path / "c") as folder:
            write_sample(folder)
        process.send_signal(signal.SIGINT)
        process.wait()
    assert names(tmp_path) == ["c"]
    assert num_descriptors() <= before + 1  # the pipe of the other process


def test_a_second_thread_of_this_process_is_refused(tmp_path: Path) -> None:
    with staging(tmp_path / "b") as folder:
        with pytest.raises(BuildError, match=rf"another build \(process {os.getpid()}\)"):
            staging(tmp_path / "b").__enter__()
        write_sample(folder)
    open_bundle(tmp_path / "b")


def test_a_killed_build_leaves_nothing_that_loads_and_the_next_one_tidies_up(
    tmp_path: Path,
) -> None:
    target = tmp_path / "b"
    with other_process(HOLD, target) as process:
        wait_until_ready(process)
        process.kill()
        process.wait()
    partial = f".b.partial-{process.pid}"
    assert names(tmp_path) == [".b.lock", partial]
    for folder in (target, tmp_path / partial):
        with pytest.raises(LlamaExportError):
            open_bundle(folder)
    with staging(target) as folder:
        assert names(tmp_path) == [".b.lock", f".b.partial-{os.getpid()}"]
        write_sample(folder)
    assert names(tmp_path) == ["b"]


def test_only_left_overs_of_the_same_target_are_removed(tmp_path: Path) -> None:
    others = [".b.partial-c.partial-7", ".b.partial-7.partial-7", ".bb.partial-7", "b.partial-7"]
    for name in (*others, ".b.partial-7"):
        (tmp_path / name).mkdir()
    with staging(tmp_path / "b") as folder:
        write_sample(folder)
    assert names(tmp_path) == sorted([*others, "b"])


def test_a_left_over_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / ".b.partial-7").symlink_to("mine")
    with staging(tmp_path / "b") as folder:
        write_sample(folder)
    assert names(tmp_path / "mine") == ["file"]


@pytest.mark.parametrize("content", [b"", b"4194305", b"\xff\xfe junk \x1b[2J" * 99])
def test_a_lock_file_that_nobody_holds_is_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".b.lock").write_bytes(content)
    with staging(tmp_path / "b") as folder:
        assert (tmp_path / ".b.lock").read_text() == str(os.getpid())
        write_sample(folder)
    assert names(tmp_path) == ["b"]


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / ".b.lock").symlink_to("mine")
    with pytest.raises(BuildError, match=r"\.b\.lock: cannot be written"):
        staging(tmp_path / "b").__enter__()
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_lock_that_its_owner_removed_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def open_late(path: Path, *args: int) -> int:
        descriptor = really_open(path, *args)
        monkeypatch.undo()
        path.unlink()  # the last owner ends between the opening and the locking
        path.touch()
        return descriptor

    before = num_descriptors()
    monkeypatch.setattr(os, "open", open_late)
    refused, target = pytest.raises(BuildError, match="another build"), tmp_path / "b"
    with bundles._lock(target), refused, bundles._lock(target):
        pytest.fail("two writers")
    assert names(tmp_path) == []
    assert num_descriptors() == before


def test_the_lock_of_another_owner_is_not_removed(tmp_path: Path) -> None:
    with bundles._lock(tmp_path / "b"):
        (tmp_path / ".b.lock").unlink()
        (tmp_path / ".b.lock").write_text("theirs")
    assert (tmp_path / ".b.lock").read_text() == "theirs"


def test_many_writers_take_turns(tmp_path: Path) -> None:
    code = """
    from llama_artifacts.bundle import _lock
    from llama_artifacts.errors import BuildError
    mark = target.with_name("inside")
    for _ in range(300):
        try:
            with _lock(target):
                mark.touch(exist_ok=False)
                mark.unlink()
        except BuildError:
            pass
    print("good")
    """
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(other_process(code, tmp_path / "b")) for _ in range(3)]
        assert [process.communicate()[0] for process in crowd] == ["good\n"] * 3
    assert names(tmp_path) == []


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


# --- replacing a bundle ---------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A bundle that is there already."""
    return write_sample(tmp_path / "b", name="old")


def test_a_bundle_is_replaced_at_once_by_a_whole_one(old: Path) -> None:
    with staging(old, replaces=True) as folder:
        write_sample(folder, name="new")
        assert manifests.read(old).name == "old"
    assert manifests.read(old).name == "new"
    assert [path.name for path in old.parent.iterdir()] == ["b"]


def test_where_nothing_is_to_be_replaced_the_new_one_appears(tmp_path: Path) -> None:
    with staging(tmp_path / "b", replaces=True) as folder:
        write_sample(folder)
    assert manifests.read(tmp_path / "b")


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, ValueError])
def test_the_old_bundle_survives_a_failure(old: Path, failure: type[BaseException]) -> None:
    before = {path.name: path.read_bytes() for path in old.iterdir()}

    def build_new() -> None:
        with staging(old, replaces=True) as folder:
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
            staging(tmp_path / name, replaces=True),
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
    with pytest.raises(BuildError, match="cannot exchange"), staging(old, replaces=True) as folder:
        write_sample(folder, name="new")
    assert manifests.read(old).name == "old"
    assert [path.name for path in old.parent.iterdir()] == ["b"]
