"""Several programs at a time, each made in a process of its own.

A worker is this module run by the same interpreter. It is told the recipe and then numbers of
drafts on its standard input, and answers with what it made, or with the known failure, on its
standard output. Both are pickles: the pipes are between two processes of one build, of one user and
one program, and nothing from outside goes through them as it came. A failure that nobody expected
ends the worker, with its traceback on stderr.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from llama_artifacts.errors import BuildError, LlamaExportError
from llama_export.blueprint import Blueprint, draw
from llama_export.cache import ProgramCache
from llama_export.processes import end_with
from llama_export.programs import Made, Maker
from llama_export.recipe import Recipe
from llama_export.report import Reporter

JOB_BYTES = 3 * 2**30
"""What one process is taken to need at most, compiler included."""


def make_all(
    blueprint: Blueprint, folder: Path, *, reporter: Reporter, cache: ProgramCache | None
) -> tuple[Made, ...]:
    """Puts every program of a blueprint into the folder.

    What the cache has is taken from it. The rest is made in as many processes as the recipe says;
    a single one is this process.

    Raises:
        BuildError: a program cannot be made or written; no other is begun then.
    """
    maker = Maker(blueprint, folder, cache)
    made = {index: maker.take(draft) for index, draft in enumerate(blueprint.drafts)}
    missing = [index for index, item in made.items() if item is None]
    num_jobs = min(blueprint.recipe.jobs or default_jobs(), len(missing))
    if num_jobs <= 1:
        for index in missing:
            draft = blueprint.drafts[index]
            with reporter.step(f"{draft.label} {draft.format}"):
                made[index] = maker.make(draft)
    else:
        made |= _make_apart(blueprint, folder, cache, missing, num_jobs, reporter)
    return tuple(item for item in made.values() if item is not None)


def default_jobs() -> int:
    """As many processes as there are cores, and as the free memory holds."""
    num_cores = len(os.sched_getaffinity(0))
    return max(1, min(num_cores, _free_bytes() // JOB_BYTES))


def _free_bytes() -> int:
    """What can be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return JOB_BYTES


def _make_apart(
    blueprint: Blueprint,
    folder: Path,
    cache: ProgramCache | None,
    indices: Sequence[int],
    num_jobs: int,
    reporter: Reporter,
) -> dict[int, Made]:
    start = (_pinned(blueprint), folder, None if cache is None else cache.folder.parent)
    idle: SimpleQueue[_Worker] = SimpleQueue()

    def make(index: int) -> Made:
        draft, worker = blueprint.drafts[index], idle.get()
        try:
            with reporter.step(f"{draft.label} {draft.format}"):
                return worker.make(index)
        finally:
            idle.put(worker)  # also one that died: whoever waits for it must learn that

    # The workers end first, so that no thread waits for one.
    with ThreadPoolExecutor(num_jobs) as threads, contextlib.ExitStack() as workers:
        for _ in range(num_jobs):
            idle.put(workers.enter_context(_worker(start)))
        futures = {index: threads.submit(make, index) for index in indices}
        try:
            return {index: future.result() for index, future in futures.items()}
        finally:
            for future in futures.values():
                future.cancel()


def _pinned(blueprint: Blueprint) -> Recipe:
    """The recipe, with the commit of the hub that was found."""
    source = blueprint.checkpoint.source
    if source.kind != "hub":
        return blueprint.recipe
    return replace(blueprint.recipe, model=f"{source.name}@{source.revision}")


class _Worker:
    """A process that makes one program at a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def make(self, index: int) -> Made:
        """What the process makes of the draft of this number.

        Raises:
            LlamaExportError: as the process met it.
            BuildError: the process ended.
        """
        answer = self._ask(index)
        if isinstance(answer, LlamaExportError):
            raise answer
        return answer

    def _ask(self, index: int) -> Made | LlamaExportError:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(index, self._process.stdin)
            self._process.stdin.flush()
            answer: Made | LlamaExportError = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as cause:
            raise BuildError(
                f"a process that makes programs ended with status {self._process.wait()}",
                hint="was it short of memory? build with -j 1",
            ) from cause
        return answer


@contextlib.contextmanager
def _worker(start: tuple[Recipe, Path, Path | None]) -> Iterator[_Worker]:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdin is not None
        pickle.dump((os.getpid(), *start), process.stdin)
        yield _Worker(process)
    finally:
        process.kill()
        process.communicate()


# --- in the worker --------------------------------------------------------------------------------


def _work() -> None:
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not answer
    parent, recipe, folder, cache_dir = pickle.load(questions)
    if not end_with(parent):  # a killed build leaves nothing behind that goes on writing
        return
    maker = None
    for index in _numbers(questions):
        try:
            if maker is None:
                blueprint = draw(recipe)
                cache = None if cache_dir is None else ProgramCache(cache_dir)
                maker = Maker(blueprint, folder, cache)
            answer: Made | LlamaExportError = maker.make(blueprint.drafts[index])
        except LlamaExportError as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


def _numbers(questions: BinaryIO) -> Iterator[int]:
    """Numbers of drafts, until the build closes the pipe."""
    while True:
        try:
            index: int = pickle.load(questions)
        except EOFError:
            return
        yield index


if __name__ == "__main__":
    _work()
