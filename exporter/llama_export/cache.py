"""Programs that were made before, by everything that they depend on.

An entry is a folder of one program and its record. It appears whole, by a rename, and is named by
the SHA-256 of what went into the program, so it is never changed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_artifacts.codec import decode, encode
from llama_artifacts.digests import sha256
from llama_artifacts.errors import BuildError, LlamaExportError
from llama_artifacts.manifest import Format, Target
from llama_artifacts.places import cache_folder
from llama_artifacts.strict_json import parse_object
from llama_export.lower.backend import Lowered, Place, backend
from llama_export.trace import Job

LAYOUT = 1
"""Raised when entries of an earlier release could no longer be read."""
RECORD = "record.json"
PROGRAM = "program"
_CODE = (
    "llama_export/model",
    "llama_export/entries",
    "llama_export/lower",
    "llama_export/trace.py",
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """What is known of a cached program.

    Attributes:
        label: its file's name begins so: the entry and what is fixed.
        format: of the program.
        file: its name in a bundle.
        target: where it runs.
        requires: see `llama_artifacts.manifest.Program`.
        constants: the weights it binds.
        bytes: size of the program.
        sha256: its digest.
        seconds: that making it took.
    """

    label: str
    format: Format
    file: str
    target: Target
    requires: dict[str, str]
    constants: tuple[str, ...]
    bytes: int
    sha256: str
    seconds: float


@dataclass(frozen=True)
class CachedProgram:
    """An entry of the cache: its key, its record, and when it was last used (seconds since 1970)."""

    key: str
    record: Record
    used: float


class ProgramCache:
    """A folder of programs; any number of processes may use it at once."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or cache_folder()) / "programs"

    def take(self, format: Format, job: Job, place: Place) -> Lowered | None:
        """Copies the job's program into the place's folder, if it was made before.

        Raises:
            BuildError: the cache cannot be written.
        """
        key = key_of(format, job, place)
        with self._locked(key, waits=False) as is_free:
            return self._take(key, place.folder) if is_free else None

    def lower(self, format: Format, job: Job, place: Place) -> Lowered:
        """Makes the job's program in the place's folder, and keeps a copy.

        A second process that makes the same one waits for the first, and takes its copy.

        Raises:
            BuildError: the program cannot be made, or the cache cannot be written.
        """
        key = key_of(format, job, place)
        with self._locked(key):
            found = self._take(key, place.folder)
            if found is not None:
                return found
            started = time.perf_counter()
            lowered = backend(format).lower(job, place)
            self._keep(key, job.stem, format, lowered, place.folder, time.perf_counter() - started)
        return lowered

    def programs(self) -> tuple[CachedProgram, ...]:
        """Every entry, the most recently used first; damaged ones are left out."""
        found = []
        for path in self.folder.glob(f"*/{RECORD}"):
            record = _read(path)
            if record is not None:
                found.append(CachedProgram(path.parent.name, record, path.stat().st_mtime))
        return tuple(sorted(found, key=lambda item: (-item.used, item.key)))

    def prune(
        self, *, max_bytes: int | None = None, max_age: float | None = None
    ) -> tuple[CachedProgram, ...]:
        """Removes programs, the least recently used first.

        Args:
            max_bytes: what may stay; None: no limit.
            max_age: seconds since the last use of what may stay; None: no limit.

        Returns:
            The programs that were removed.

        Raises:
            BuildError: the cache cannot be written.
        """
        total, now, removed = 0, time.time(), []
        for item in self.programs():
            total += item.record.bytes
            is_old = max_age is not None and now - item.used > max_age
            if is_old or (max_bytes is not None and total > max_bytes):
                total -= item.record.bytes
                with self._locked(item.key):
                    shutil.rmtree(self.folder / item.key, ignore_errors=True)
                removed.append(item)
        return tuple(removed)

    def _take(self, key: str, target: Path) -> Lowered | None:
        path = self.folder / key / RECORD
        record = _read(path)
        if record is None:
            return None
        program = path.with_name(PROGRAM)
        shutil.copyfile(program, target / record.file)
        if sha256(target / record.file) != record.sha256:
            _log.warning("%s: damaged, made again", program)
            (target / record.file).unlink()
            shutil.rmtree(path.parent)
            return None
        os.utime(path)
        return Lowered(record.file, record.target, dict(record.requires), record.constants)

    def _keep(
        self, key: str, label: str, format: Format, lowered: Lowered, made: Path, seconds: float
    ) -> None:
        program = made / lowered.file
        record = Record(
            label=label,
            format=format,
            file=lowered.file,
            target=lowered.target,
            requires=lowered.requires,
            constants=lowered.constants,
            bytes=program.stat().st_size,
            sha256=sha256(program),
            seconds=round(seconds, 3),
        )
        try:
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=self.folder) as scratch:
                staged = Path(scratch) / key
                staged.mkdir()
                shutil.copyfile(program, staged / PROGRAM)
                (staged / RECORD).write_text(json.dumps(encode(record)))
                shutil.rmtree(self.folder / key, ignore_errors=True)
                staged.rename(self.folder / key)
        except OSError as cause:
            raise self._unwritable(cause) from cause

    def _unwritable(self, cause: OSError) -> BuildError:
        return BuildError(
            f"the cache cannot be written: {cause.strerror}",
            where=self.folder,
            hint="choose another with --cache-dir, or use --no-cache",
        )

    @contextlib.contextmanager
    def _locked(self, key: str, *, waits: bool = True) -> Iterator[bool]:
        """Keeps others from an entry; without waiting, says whether nobody else has it."""
        try:
            locks = self.folder / ".locks"
            locks.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(locks / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as cause:
            raise self._unwritable(cause) from cause
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(descriptor)


def key_of(format: Format, job: Job, place: Place) -> str:
    """The SHA-256, in hexadecimal, of all that a program depends on."""
    form = {**vars(job.form), "dtype": str(job.form.dtype)}
    facts: dict[str, Any] = {
        "layout": LAYOUT,
        "code": _code(),
        "format": format,
        "config": encode(job.config),
        "method": job.spec.method,
        "arguments": dict(job.spec.arguments),
        "stem": job.stem,
        "signature": encode(job.signature),
        "form": form,
        "weights": [[name, info.dtype, list(info.shape)] for name, info in job.weights.items()],
        "device": place.device,
        "numerics": place.numerics,
        "backend": backend(format).facts(job, place),
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _code() -> str:
    """A digest of the code that makes programs, so that a changed one makes them anew."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for name in _CODE:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _read(path: Path) -> Record | None:
    """The record, or None where there is none that this version can read."""
    try:
        data = path.read_bytes()
        return decode(Record, parse_object(data, where=path, error=BuildError), where=str(path))
    except OSError as cause:
        if cause.errno not in (errno.ENOENT, errno.ENOTDIR):
            _log.warning("%s: cannot be read: %s", path, cause.strerror)
    except LlamaExportError as cause:
        _log.warning("%s", cause)
    return None
