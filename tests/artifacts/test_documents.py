"""A file that a command writes: whole or as it was; what is no plain file stays what it is."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llama_artifacts.documents import write_whole


def test_a_file_is_written_or_replaced(tmp_path: Path) -> None:
    for data in (b"first", b"second"):
        write_whole(tmp_path / "f", data)
        assert (tmp_path / "f").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_pipe_takes_the_bytes_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit((tmp_path / "pipe").read_bytes)
        write_whole(tmp_path / "pipe", b"text")
        assert read.result(10) == b"text"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "link").symlink_to("f")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "f").read_bytes() == b"new"


def test_a_link_to_nowhere_makes_its_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("f")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"


def test_a_disk_that_fills_up_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    (tmp_path / "f").write_bytes(b"old")
    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_folder_is_none(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, b"text")
