"""`python -m llama_runtime`, but that one rank meets a fault in one of its calls.

FAULT is `RANK:CALL:KIND`: what happens in that rank as it begins that call of a program, counted
from 0; the kinds `absent` and `bundle=FOLDER` happen at its start. Without it all goes well. PIDS
names a folder in which each rank leaves its process id.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama_runtime.cli import main
from llama_runtime.programs.aoti import AotiProgram
from llama_runtime.programs.pt2 import Pt2Program

CALLS = 0


def happen(kind: str) -> None:
    sys.stderr.write(f"fault {time.time():.3f}\n")
    sys.stderr.flush()
    if kind == "raise":
        raise MemoryError("no room for this")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "exit":
        os._exit(7)
    if kind == "hang":
        time.sleep(1000)
    if kind == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if kind == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)


def patch(rank: int, call: int, kind: str) -> None:
    if int(os.environ["RANK"]) != rank:
        return
    if kind == "absent":
        os._exit(7)
    if kind.startswith("bundle="):
        sys.argv[2] = kind.removeprefix("bundle=")
    for cls in (Pt2Program, AotiProgram):

        def faulty(self: Any, *args: Any, run: Callable[..., Any] = cls.run) -> Any:
            global CALLS
            CALLS += 1
            if call + 1 == CALLS:
                happen(kind)
            return run(self, *args)

        cls.run = faulty  # type: ignore[method-assign]


Path(os.environ["PIDS"], f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
if fault := os.environ.get("FAULT"):
    number, at, what = fault.split(":")
    patch(int(number), int(at), what)
main()
