"""Writers of bundles that tests start, spoil and count."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from llama_artifacts.bundle import staging
from tests.bundles import write_sample

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
