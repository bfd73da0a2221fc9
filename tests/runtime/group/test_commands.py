"""`python -m llama_runtime` by itself, and in an environment that is no group."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import environment, start

SCRIPT = """
import atexit, os, sys
heavy = ("torch", "onnxruntime", "fastapi", "tokenizers", "numpy")
atexit.register(lambda: print([n for n in heavy if n in sys.modules], file=sys.stderr))
from llama_runtime.cli import command_line
command_line.main(prog_name="python -m llama_runtime")
"""
MAIN = "from llama_runtime.cli import main; main()"


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["serve", "--help"]], ids=" ".join
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    with start(*words, script=SCRIPT) as process:
        stdout, stderr = process.communicate()
    assert process.returncode == 0
    assert "torchrun --standalone --nproc-per-node" in stdout
    assert stderr == "[]\n"


def test_an_unknown_command_is_wrong_usage() -> None:
    with start("verify", script=MAIN) as process:
        _, stderr = process.communicate()
    assert process.returncode == 2
    assert stderr.startswith("error: no such command 'verify'\nhint: see `python -m llama_runtime")


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"RANK": "0"},
            "error: expected to be one of several processes, but WORLD_SIZE is not set",
        ),
        (
            {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "error: RANK: expected a number, got `x`",
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "error: RANK: expected a rank below 2 (WORLD_SIZE), got 2",
        ),
    ],
    ids=["no size", "no number", "too large"],
)
def test_an_environment_that_is_no_group(
    tmp_path: Path, variables: dict[str, str], line: str
) -> None:
    words = ["run", tmp_path, "--tokens", "1"]
    with start(*words, script=MAIN, env=environment(**variables)) as process:
        _, stderr = process.communicate()
    assert process.returncode == 1
    assert stderr.splitlines()[0] == line
    assert stderr.splitlines()[1].startswith("hint: start it with torchrun --standalone")
