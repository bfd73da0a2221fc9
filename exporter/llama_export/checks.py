"""One law on programs, and the verdict on what was found."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from llama_artifacts.errors import LlamaExportError
from llama_artifacts.manifest import Program, show_shards
from llama_export.laws.bench import Bench, limit_of
from llama_export.laws.finding import Finding
from llama_export.laws.registry import Law

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckResult:
    """One law on one program: the figure found, the most it may be, and where it was found.

    `entry` or `format` is empty where the law is about more than one; `shards` is how many
    processes ran the program together.
    """

    law: str
    entry: str
    format: str
    figure: float
    limit: float
    passed: bool
    detail: str
    shards: int = 1

    @property
    def place(self) -> str:
        """What was checked, as `decode_paged/onnx pages` or `decode of 2 shards/pt2 parity`."""
        entry = show_shards(self.entry, self.shards)
        program = "/".join(part for part in (entry, self.format) if part)
        return f"{program} {self.law}".strip()


@dataclass(frozen=True)
class Task:
    """A law to be checked on a program, or on the programs of an entry that are compared.

    The last program is the one that gives the result its name; others are what it is held against.
    """

    law: Law
    programs: tuple[Program, ...]

    @property
    def title(self) -> str:
        """For people, such as `decode of 2 shards pt2 parity`."""
        program = self.programs[-1]
        formats = [program.format] if self.law.scope == "program" else []
        return " ".join([program.title, *formats, self.law.name])

    def find(self, bench: Bench) -> Finding | None:
        """Checks the law; None where it says nothing of the programs.

        Raises:
            Exception: whatever a wrong program makes of it.
        """
        check = self.law.load()
        subject = self.programs[-1] if self.law.scope == "program" else self.programs
        found: Finding | None = check(bench, subject)
        return found

    def result(self, found: Finding) -> CheckResult:
        """The verdict on what was found."""
        program = self.programs[-1]
        format = program.format if self.law.scope == "program" else ""
        place = (self.law.name, program.label, format)
        return _result(place, found, program.shards)


def check(task: Task, bench: Bench) -> CheckResult | None:
    """The verdict of a task; None where the law says nothing of the programs."""
    limit = limit_of(task.programs[-1]) if task.law.scope == "program" else 0
    found = judged(partial(task.find, bench), task.title, limit)
    return None if found is None else task.result(found)


def judge(
    law: str, entry: str, format: str, find: Callable[[], Finding | None], limit: float
) -> CheckResult | None:
    """The verdict on one check; None where there is nothing to say."""
    found = judged(find, f"{entry}/{format} {law}", limit)
    return None if found is None else _result((law, entry, format), found, 1)


def judged(find: Callable[[], Finding | None], title: str, limit: float) -> Finding | None:
    """What was found; a failure is a finding too."""
    try:
        return find()
    except Exception as cause:  # a wrong program may fail in any way, and every way is a verdict
        _log.debug("%s failed", title, exc_info=cause)
        return Finding(math.nan, limit, failure(cause))


def failure(cause: Exception, who: str = "") -> str:
    """Why a check could not be run, in one line; `who` is where it failed, such as `rank 1: `."""
    if isinstance(cause, LlamaExportError):
        reason = str(cause)
    else:
        reason = next(iter(str(cause).splitlines()), "") or type(cause).__name__
    return f"cannot be run: {who}{reason:.300}"


def _result(place: tuple[str, str, str], found: Finding, num_shards: int) -> CheckResult:
    return CheckResult(*place, found.figure, found.limit, found.passed, found.detail, num_shards)
