"""How the C++ programs are built and run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "runtime" / "cpp"


def configure(source: Path, folder: Path, *options: str) -> None:
    """Configures a project and builds it."""
    for command in (
        ["cmake", "-S", str(source), "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "--parallel", "2"],
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout[-4000:]


def output_of(*command: object, stdin: str = "", status: int = 0) -> str:
    """What a program prints: on stdout where it succeeds, else on stderr."""
    done = subprocess.run(
        [str(word) for word in command],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout
