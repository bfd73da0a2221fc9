"""A bundle on disk: opened with its sizes checked, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llama_artifacts import manifest as manifests
from llama_artifacts.errors import BuildError, IntegrityError
from llama_artifacts.manifest import File, Manifest

CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder and its checked manifest."""

    folder: Path
    manifest: Manifest

    def path(self, name: str) -> Path:
        """The path of a listed file."""
        return self.folder / name


def open_bundle(folder: Path) -> Bundle:
    """Reads the manifest and checks that every listed file is there with its size.

    Raises:
        ManifestError: no manifest, or a malformed one.
        IntegrityError: a file is missing, is not a plain file of the folder, or has another size.
    """
    bundle = Bundle(folder, manifests.read(folder))
    for name, file in bundle.manifest.files.items():
        _check_size(bundle.path(name), file)
    return bundle


def check_digest(bundle: Bundle, name: str) -> None:
    """Hashes one listed file.

    Raises:
        IntegrityError: the digest differs from the manifest's.
    """
    expected = bundle.manifest.files[name].sha256
    actual = sha256(bundle.path(name))
    if actual != expected:
        raise IntegrityError(
            f"damaged: sha256 {actual[:12]}..., expected {expected[:12]}...",
            where=bundle.path(name),
            hint="copy the bundle again, or build it again",
        )


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def describe(path: Path) -> File:
    """Size and digest of a file, as the manifest lists them."""
    return File(bytes=path.stat().st_size, sha256=sha256(path))


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that takes its place when the block ends well.

    The folder is removed when the block fails. Everything in it is synced before the rename, so a
    crash leaves either no bundle or a whole one. A lock file beside the target keeps a second
    writer out and vanishes with its owner.

    Raises:
        BuildError: the target exists, its parent cannot be written, or another build holds it.
    """
    if target.exists() or target.is_symlink():
        raise BuildError(
            "the output exists", where=target, hint="remove it, or choose another with -o"
        )
    with _os_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target):
        folder = target.with_name(f".{target.name}.partial-{os.getpid()}")
        try:
            with _os_errors(target):
                for left_over in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
                    shutil.rmtree(left_over, ignore_errors=True)
                folder.mkdir()
                yield folder
                _sync(folder)
                folder.rename(target)
                _sync_folder(target.parent)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def check_space(target: Path, needed_bytes: int) -> None:
    """Refuses to start what the file system has no room for.

    Raises:
        BuildError: fewer bytes are free where `target` will be than are needed.
    """
    folder = target.parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise BuildError(
            f"needs {needed_bytes:,} bytes, {folder} has {free:,} free",
            where=target,
            hint="free some space, or choose another folder with -o",
        )


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    path = target.with_name(f".{target.name}.lock")
    with _os_errors(target), path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            file.seek(0)
            owner = file.read(200).strip() or "unknown"
            raise BuildError(
                f"another build (process {owner}) is writing it",
                where=target,
                hint="wait for it, or choose another folder with -o",
            ) from cause
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _os_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        if cause.errno == errno.ENOSPC:
            message, hint = "the file system is full", "free some space, or choose another folder"
        else:
            message = f"cannot be written: {cause.strerror or cause}"
            hint = "choose a folder that can be written with -o"
        raise BuildError(message, where=cause.filename or target, hint=hint) from cause


def _check_size(path: Path, file: File) -> None:
    hint = "copy the bundle again, or build it again"
    try:
        size = path.stat().st_size
    except OSError as cause:
        raise IntegrityError(f"missing: {cause.strerror}", where=path, hint=hint) from cause
    if not path.is_file():
        raise IntegrityError("expected a plain file", where=path, hint=hint)
    if size != file.bytes:
        raise IntegrityError(
            f"damaged: {size:,} bytes, expected {file.bytes:,}", where=path, hint=hint
        )


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
