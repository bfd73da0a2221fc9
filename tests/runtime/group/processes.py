"""Real groups of processes for tests, none of which outlives its test."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).parents[3]
SCRIPT = Path(__file__).parent / "faulty.py"
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LIMIT = 120.0


@dataclass
class Job:
    """Processes of one group, and where each leaves its number and what it writes.

    Attributes:
        launcher: torchrun's process; None where the ranks were started one by one.
    """

    folder: Path
    size: int
    ranks: list[subprocess.Popen[bytes]]
    launcher: subprocess.Popen[bytes] | None = None

    def number(self, rank: int) -> int:
        """The process id of a rank, as soon as it is known."""
        return int(wait_for(lambda: self._read(f"pid-{rank}")))

    def wait(self) -> float:
        """Waits for the end of every process; seconds since the fault that one of them met."""
        for process in [*self.ranks, *filter(None, [self.launcher])]:
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"it hangs:\n{self.text}") from None
        ended = time.time()
        found = re.search(r"^fault ([0-9.]+)", self.text, re.MULTILINE)
        return ended - float(found[1]) if found else 0.0

    @property
    def text(self) -> str:
        """What all of them wrote to stderr so far."""
        return self._read("stderr")

    @property
    def output(self) -> str:
        """What all of them wrote to stdout."""
        return self._read("stdout")

    @property
    def errors(self) -> list[str]:
        """The lines in which errors are told."""
        return re.findall(r"^error: (.*)", self.text, re.MULTILINE)

    @property
    def statuses(self) -> list[int | None]:
        """The exit statuses of ranks that were started one by one."""
        return [process.poll() for process in self.ranks]

    def is_gone(self, rank: int) -> bool:
        """Whether the process of a rank has ended."""
        try:
            state = (
                Path(f"/proc/{self.number(rank)}/stat").read_text().rpartition(")")[2].split()[0]
            )
        except FileNotFoundError:
            return True
        return state == "Z"

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


def wait_for(get: object, limit: float = LIMIT) -> str:
    """What a function gives as soon as that is something."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if found := get():  # type: ignore[operator]
            return str(found)
        time.sleep(0.05)
    raise AssertionError("it did not come")


@contextlib.contextmanager
def started(
    folder: Path, size: int, words: Sequence[object], *, fault: str = "", is_launched: bool = False
) -> Iterator[Job]:
    """A group that runs `python -m llama_runtime` with these words; see `faulty`.

    With `is_launched` torchrun starts it, else each rank is started with torchrun's environment.
    """
    folder.mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "COV"))}
    environment = {**kept, "FAULT": fault, "PIDS": str(folder), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])
    arguments = [str(SCRIPT), *map(str, words)]
    job = Job(folder, size, [])
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        try:
            if is_launched:
                launch = [*LAUNCHER, "--nproc-per-node", str(size)]
                job.launcher = _start([*launch, *arguments], environment, out, err)
            else:
                place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
                place |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
                for rank in range(size):
                    own = environment | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    job.ranks.append(_start([sys.executable, *arguments], own, out, err))
            yield job
        finally:
            _end(job)


def _start(
    words: list[str], environment: dict[str, str], out: IO[bytes], err: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
    )


def _end(job: Job) -> None:
    numbers = [int(path.read_text() or 0) for path in job.folder.glob("pid-*")]
    started = [process for process in [job.launcher, *job.ranks] if process is not None]
    for number in [*numbers, *(process.pid for process in started if process.poll() is None)]:
        with contextlib.suppress(ProcessLookupError):
            if number and _is_ours(number):
                os.kill(number, signal.SIGKILL)
    for process in started:
        process.wait()


def _is_ours(number: int) -> bool:
    """Whether the process is still the one that the test started."""
    try:
        words = Path(f"/proc/{number}/cmdline").read_bytes()
    except FileNotFoundError:
        return False
    return str(SCRIPT).encode() in words


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
