"""Runs the command line: in this process, or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from llama_export.cli import PROGRAM, command_line

SCRIPT = "from llama_export.cli import main; main()"


def invoke(*args: object, **settings: Any) -> Result:
    """The command in this process; unexpected exceptions pass."""
    words = [str(arg) for arg in args]
    return CliRunner().invoke(
        command_line, words, prog_name=PROGRAM, catch_exceptions=False, **settings
    )


def environment(**changes: str) -> dict[str, str]:
    names = ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "LLAMA_EXPORT_DEBUG", "PYTHONIOENCODING")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "TERM": "xterm-256color", **changes}


def start(*args: object, script: str = SCRIPT, **settings: Any) -> subprocess.Popen[str]:
    """The command in a process of its own, after what else the script does first."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
    settings.setdefault("env", environment())
    words = [sys.executable, "-c", script, *(str(arg) for arg in args)]
    return subprocess.Popen(words, text=True, **settings)
