"""Laws on programs that several processes run together.

Each process, a rank, is this module run by the same interpreter. All of them check the same tasks
in the same order, so that their collectives meet; each holds what it got against the oracle, and
the worst of their findings counts. A rank is told its work on its standard input and answers with
a line of JSON for each task. One in which a task failed cannot know where the others are: it
ends, and so do they, and the tasks that are left are begun again by new ones.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import VerificationError
from llama_artifacts.manifest import Format, Program
from llama_export.checks import CheckResult, Task, failure
from llama_export.laws import registry
from llama_export.laws.bench import Bench, device_of
from llama_export.laws.finding import Finding, worst
from llama_export.processes import end_with
from llama_export.report import Reporter
from llama_runtime import shards

HOST = "127.0.0.1"
TIMEOUT = 300.0
"""Seconds that a rank waits for another; none is ahead by more than it takes to load a program."""

_END_TIMEOUT = 10.0


def check(
    bench: Bench, num_shards: int, tasks: Sequence[Task], reporter: Reporter
) -> Iterator[CheckResult]:
    """The verdict of each task on programs of one number of shards.

    Args:
        bench: of the bundle.
        num_shards: how many processes to start.
        tasks: whose last programs have that many shards.
        reporter: told about each task.

    Raises:
        VerificationError: the processes do not even start.
    """
    for device in dict.fromkeys(device_of(task.programs[-1]) for task in tasks):
        own = [task for task in tasks if device_of(task.programs[-1]) == device]
        if device == "cuda" and torch.cuda.device_count() < num_shards:
            there = f"this machine has {torch.cuda.device_count()} CUDA device(s)"
            reporter.note(f"programs of {num_shards} shards: {there}, not run here")
            continue
        while own:
            done = yield from _round(bench, num_shards, device, own, reporter)
            own = own[done:]


def _round(
    bench: Bench, num_shards: int, device: str, tasks: Sequence[Task], reporter: Reporter
) -> Generator[CheckResult, None, int]:
    """Verdicts up to the first task that fails; returns how many tasks were checked."""
    with _started(bench, num_shards, device, tasks) as ranks:
        for number, task in enumerate(tasks, 1):
            with reporter.step(f"check {task.title}"):
                answers = [rank.answer() for rank in ranks]
            found = [answer.finding for answer in answers if answer.finding is not None]
            failed = [answer for answer in answers if answer.has_failed]
            if failed:
                # The others mostly tell that this one is gone.
                first = min(failed, key=lambda answer: answer.time).finding
                assert first is not None
                yield task.result(first)
                return number
            if found:
                yield task.result(worst(found))
    return len(tasks)


@dataclass(frozen=True)
class _Answer:
    """What a rank found in a task, when, and whether it is at its end."""

    finding: Finding | None
    has_failed: bool
    time: float


class _Rank:
    """One of the processes that run programs together."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self._number = number
        self._process = process
        self._log = log

    def tell(self, work: Mapping[str, Any]) -> None:
        """Begins the work."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then it has no answer either
            self._process.stdin.write(json.dumps(work).encode())
            self._process.stdin.close()

    def wait_until_ready(self) -> None:
        """Returns when the process has joined the others.

        Raises:
            VerificationError: it ended before.
        """
        if not self._line():
            raise VerificationError(
                f"rank {self._number} cannot start: {self._last_words()}",
                hint="shards need torch.distributed and a network interface of this machine",
            )

    def answer(self) -> _Answer:
        """What it found in the next task."""
        line = self._line()
        if not line:
            detail = f"cannot be run: rank {self._number}: {self._last_words()}"
            return _Answer(Finding(math.nan, 0, detail), True, 0)
        value = json.loads(line)
        finding = None if value["finding"] is None else Finding(**value["finding"])
        return _Answer(finding, value["has_failed"], value["time"])

    def end(self) -> None:
        """Kills the process, if it is still there."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _last_words(self) -> str:
        """How the process ended, and the last line it wrote."""
        try:
            status = self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            return "answers nothing"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        words = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
        return f"ended with status {status}: {words}"


@contextlib.contextmanager
def _started(
    bench: Bench, num_shards: int, device: str, tasks: Sequence[Task]
) -> Iterator[list[_Rank]]:
    """Processes that check the tasks, until the block ends."""
    work = {
        "parent": os.getpid(),
        "folder": str(bench.folder),
        "weights_dir": None if bench.weights_dir is None else str(bench.weights_dir),
        "device": device,
        "tasks": [_spelled(task, bench.manifest.programs) for task in tasks],
    }
    # The ranks meet here, at a port that nobody else can take between choosing and using it.
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as stack:
        ranks = []
        for number in range(num_shards):
            log = stack.enter_context(tempfile.TemporaryFile())
            rank = _start(number, num_shards, store.port, log)
            stack.callback(rank.end)
            rank.tell(work)
            ranks.append(rank)
        for rank in ranks:
            rank.wait_until_ready()
        yield ranks


def _start(number: int, num_shards: int, port: int, log: IO[bytes]) -> _Rank:
    # More threads than cores would wait for each other at every collective.
    num_threads = max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) // num_shards))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(num_shards),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
    )
    return _Rank(number, process, log)


def _spelled(task: Task, programs: Sequence[Program]) -> tuple[str, list[int]]:
    """A task by the name of its law and the numbers of its programs."""
    return task.law.name, [programs.index(program) for program in task.programs]


# --- in the rank ----------------------------------------------------------------------------------


def _work() -> None:
    work = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not answer
    if not end_with(work["parent"]):
        return
    group = shards.join(work["device"], timeout=TIMEOUT)
    print("ready", file=answers, flush=True)
    folder, weights_dir = Path(work["folder"]), work["weights_dir"]
    manifest = open_bundle(folder).manifest
    bench = Bench(
        folder,
        manifest,
        weights_dir=None if weights_dir is None else Path(weights_dir),
        group=group,
    )
    for task in _tasks(work["tasks"], manifest.programs, bench):
        answer = _answer(partial(task.find, bench), f"rank {group.rank}: ")
        print(json.dumps(asdict(answer)), file=answers, flush=True)
        if answer.has_failed:
            os._exit(1)  # without waiting for ranks that wait for this one
    shards.leave()


def _tasks(
    spelled: Sequence[tuple[str, list[int]]], programs: Sequence[Program], bench: Bench
) -> Iterator[Task]:
    """The tasks, and before those of another format the bench lets go of programs."""
    before: Format | None = None
    for name, numbers in spelled:
        (law,) = registry.find([name])
        task = Task(law, tuple(programs[number] for number in numbers))
        if before is not None and before != task.programs[-1].format:
            bench.drop(before)
        before = task.programs[-1].format
        yield task


def _answer(find: Callable[[], Finding | None], who: str) -> _Answer:
    try:
        return _Answer(find(), False, time.monotonic())
    except Exception as cause:  # a wrong program may fail in any way, and every way is a verdict
        return _Answer(Finding(math.nan, 0, failure(cause, who)), True, time.monotonic())


if __name__ == "__main__":
    _work()
