"""One writer at a time, and what killed ones leave."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from llama_artifacts import bundle as bundles
from llama_artifacts.bundle import open_bundle, staging
from llama_artifacts.errors import BuildError, LlamaExportError
from tests.artifacts.writers import HOLD, names, num_descriptors, other_process, wait_until_ready
from tests.bundles import write_sample


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
