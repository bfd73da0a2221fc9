"""Which program of a bundle an entry's name stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from llama_artifacts.errors import CompatibilityError, InputError
from llama_artifacts.manifest import Format, Program

# Fastest first; taken in this order where the caller names no format.
_PREFERENCE: tuple[Format, ...] = ("aoti", "pt2", "onnx")


def choose(
    programs: Sequence[Program],
    name: str,
    format: Format | None,
    *,
    fits: Callable[[Program], bool],
    where: Path,
) -> Program:
    """The general program of an entry, the fastest that fits if no format is named.

    Args:
        programs: those that may be taken.
        name: of the entry; `generate` is enough where there is one `generate<N>`.
        format: which; None: any.
        fits: whether this machine can run a program.
        where: the bundle, for messages.

    Raises:
        InputError: there is no such entry, or there are several.
        CompatibilityError: it is not there in the format.
    """
    wanted = [
        program for program in _named(programs, name, where) if format in (None, program.format)
    ]
    if not wanted:
        formats = ", ".join(program.format for program in _named(programs, name, where))
        raise CompatibilityError(
            f"`{name}` is not there in format {format}",
            where=where,
            hint=f"it is there in {formats}",
        )
    wanted.sort(key=lambda program: _PREFERENCE.index(program.format))
    return ([program for program in wanted if fits(program)] or wanted)[0]


def _named(programs: Sequence[Program], name: str, where: Path) -> list[Program]:
    general = [program for program in programs if not program.variant]
    found = [program for program in general if program.entry == name]
    if not found:
        found = [program for program in general if program.entry.startswith(f"{name}<")]
    entries = list(dict.fromkeys(program.entry for program in found))
    if len(entries) > 1:
        raise InputError(
            f"the bundle has several entries `{name}`",
            where=where,
            hint=f"say which: {', '.join(entries)}",
        )
    if not found:
        known = dict.fromkeys(program.entry for program in programs)
        raise InputError(
            f"the bundle has no entry `{name}`", where=where, hint=f"it has {', '.join(known)}"
        )
    return found
