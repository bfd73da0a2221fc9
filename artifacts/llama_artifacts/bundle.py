"""A bundle on disk: opened with its sizes checked, written whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from llama_artifacts.digests import describe, difference
from llama_artifacts.errors import BuildError, IntegrityError
from llama_artifacts.links import LINK_HINT, leads_out
from llama_artifacts.manifest import File, Manifest
from llama_artifacts.strict_json import printable

_LOCK_ATTEMPTS = 100
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_FULL = {
    errno.ENOSPC: "the file system is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would be larger than the file system or a limit allows",
}
_HINT = "copy the bundle again, or build it again"


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

    A listed file may be a symlink to a file of the same folder, or of the hub's cache that the
    folder is in; not to others, which can change while the bundle is used. Files that are not
    listed are not looked at.

    Raises:
        CompatibilityError: the manifest is of another major version.
        ManifestError: no manifest, or a malformed one.
        IntegrityError: a file is missing, is not a plain file, has another size, or is a link out.
    """
    bundle = Bundle(folder, manifest_file.read(folder))
    for name, file in bundle.manifest.files.items():
        if (complaint := misfit(bundle.path(name), file)) is not None:
            raise complaint
    return bundle


def check_names(bundle: Bundle) -> None:
    """Checks that nothing lies in the folder but the manifest, what it lists, and a signature.

    Raises:
        IntegrityError: something else is there; or the folder cannot be read.
    """
    known = {*bundle.manifest.files, manifests.FILE_NAME, manifests.SIGNATURE_NAME}
    try:
        extra = sorted(path.name for path in bundle.folder.iterdir() if path.name not in known)
    except OSError as cause:
        message = f"cannot be read: {cause.strerror}"
        raise IntegrityError(message, where=bundle.folder, hint=_HINT) from cause
    if extra:
        message = "extra: expected only what the manifest lists"
        raise IntegrityError(message, where=bundle.path(extra[0]), hint="move it elsewhere")


def check_digest(bundle: Bundle, name: str) -> None:
    """Hashes one listed file, blocks of a large one side by side.

    Raises:
        IntegrityError: a digest differs from the manifest's, or the file cannot be read.
    """
    path = bundle.path(name)
    try:
        found = difference(path, bundle.manifest.files[name])
    except OSError as cause:
        raise IntegrityError(f"cannot be read: {cause.strerror}", where=path, hint=_HINT) from cause
    if found is not None:
        raise IntegrityError(f"damaged: {found}", where=path, hint=_HINT)


@contextlib.contextmanager
def staging(target: Path, *, overwrites: bool = False) -> Iterator[Path]:
    """A new folder beside `target` that takes its place when the block ends well.

    With `overwrites`, a bundle that is there stays until then, and is exchanged for the new one at
    once: at every moment one of the two is whole under the name.

    The folder is removed when the block fails, also by an interrupt; what a killed process left
    behind, the next build of the same target removes. Everything is synced before the rename, so
    a crash leaves either no bundle or a whole one. A locked file beside the target keeps a second
    writer out until this one ends or dies. Parents of the target that were made stay.

    Raises:
        BuildError: the target exists, or is no bundle where it may be replaced; it cannot be
            written, the file system is full, or another build holds it. Errors of the block that have nothing to do with it pass unchanged.
    """
    with _os_errors(target):
        _refuse_existing(target, overwrites)
        _make_parents(target)
    with _lock(target):
        folder = target.with_name(f".{target.name}.partial-{os.getpid()}")
        try:
            with _os_errors(target):
                _refuse_existing(target, overwrites)  # another build may just have ended
                _remove_left_overs(target)
                folder.mkdir()
            with _os_errors(target, within=folder):
                yield folder
            with _os_errors(target):
                _sync(folder)
                _refuse_existing(target, overwrites)
                if target.exists():
                    _exchange(folder, target)
                else:
                    folder.rename(target)
                _fsync(target.parent)
            shutil.rmtree(folder, ignore_errors=True)  # the old one, if it was exchanged
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def put_file(folder: Path, name: str, data: bytes) -> None:
    """Adds a file to a bundle that is there, or replaces it, and lists it in the manifest.

    At every moment, also after a crash, the bundle is whole: with the file as it was, without it,
    or with the new one. A second writer waits for the first.

    Raises:
        ManifestError: the folder holds no sound manifest.
        BuildError: the folder cannot be written.
    """
    with _changing(folder, folder / name):
        manifest = manifest_file.read(folder)
        if name in manifest.files:
            others = {key: file for key, file in manifest.files.items() if key != name}
            _write_manifest(folder, replace(manifest, files=others))
        _replace_bytes(folder / name, data)
        files = {**manifest.files, name: describe(folder / name)}
        _write_manifest(folder, replace(manifest, files=files))


def put_signature(folder: Path, data: bytes) -> None:
    """Puts a signature beside the manifest, or replaces the one that is there, at once.

    Raises:
        BuildError: the folder cannot be written.
    """
    path = folder / manifests.SIGNATURE_NAME
    with _changing(folder, path):
        _replace_bytes(path, data)


def rewrite_manifest(bundle: Bundle, manifest: Manifest) -> None:
    """Puts another manifest in the place of a bundle's, at once and for good, or not at all.

    Raises:
        IntegrityError: the bundle on disk is no longer the one that was opened.
        BuildError: the manifest cannot be written.
    """
    path = bundle.path(manifests.FILE_NAME)
    with _changing(bundle.folder, path):
        if manifest_file.read(bundle.folder) != bundle.manifest:
            message = "it changed since it was opened"
            raise IntegrityError(message, where=path, hint="verify it again")
        _write_manifest(bundle.folder, manifest)


@contextlib.contextmanager
def _changing(folder: Path, where: Path) -> Iterator[None]:
    """Keeps other writers of the bundle waiting, and says what cannot be written."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
    except OSError as cause:
        reason = _FULL.get(cause.errno or 0, f"cannot be written: {cause.strerror or cause}")
        hint = "make the bundle's folder writable, or copy it to one that is"
        raise BuildError(reason, where=where, hint=hint) from cause


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    _replace_bytes(folder / manifests.FILE_NAME, manifest_file.to_json(manifest))


def _replace_bytes(path: Path, data: bytes) -> None:
    """The file has either its old content or the new one, whatever happens."""
    staged = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        staged.write_bytes(data)
        _fsync(staged)
        staged.replace(path)
        _fsync(path.parent)
    finally:
        staged.unlink(missing_ok=True)


def check_space(target: Path, needed_bytes: int) -> None:
    """Refuses to start what the file system has no room for.

    Raises:
        BuildError: fewer bytes are free where `target` will be than are needed.
    """
    folder = target.parent
    with _os_errors(target):
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise BuildError(
            f"needs {needed_bytes:,} bytes, {folder} has {free:,} free",
            where=target,
            hint="free some space, or choose another folder with -o",
        )


def _refuse_existing(target: Path, overwrites: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    hint = "remove it, or choose another with -o"
    if not overwrites:
        raise BuildError("the output exists", where=target, hint=hint)
    if target.is_symlink() or not (target / manifests.FILE_NAME).is_file():
        raise BuildError("the output exists and is no bundle", where=target, hint=hint)


def _exchange(first: Path, second: Path) -> None:
    """Gives each of two folders the other's name, at once (renameat2(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = errno.ENOSYS
    if hasattr(libc, "renameat2"):
        names = os.fsencode(first), os.fsencode(second)
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        message = "this file system cannot exchange folders"
        raise BuildError(message, where=second, hint="remove the old bundle first")
    raise OSError(code, os.strerror(code), str(second))


def _make_parents(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as cause:
        message = "cannot be written: a parent is not a folder"
        raise BuildError(message, where=target, hint="choose another folder with -o") from cause


def _remove_left_overs(target: Path) -> None:
    pattern = re.compile(rf"\.{re.escape(target.name)}\.partial-[0-9]+")
    for path in target.parent.iterdir():
        if pattern.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    path = target.with_name(f".{target.name}.lock")
    with _os_errors(target):
        descriptor = _open_locked(path, target)
    try:
        with _os_errors(target):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            if _is_open_as(descriptor, path):
                path.unlink()  # while it is locked: nobody can hold it yet
        os.close(descriptor)


def _open_locked(path: Path, target: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(_LOCK_ATTEMPTS):
        with contextlib.ExitStack() as stack:
            descriptor = os.open(path, flags, 0o644)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as cause:
                owner = os.pread(descriptor, 20, 0).decode("ascii", "replace")
                raise _busy(target, printable(owner) or "unknown") from cause
            if _is_open_as(descriptor, path):
                stack.pop_all()
                return descriptor
            # Its last owner removed it after it was opened here: take the new one.
    raise _busy(target, "unknown")


def _busy(target: Path, owner: str) -> BuildError:
    return BuildError(
        f"another build (process {owner}) is writing it",
        where=target,
        hint="wait for it, or choose another folder with -o",
    )


def _is_open_as(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _os_errors(target: Path, *, within: Path | None = None) -> Iterator[None]:
    """Turns OSError into BuildError; with `within`, only of files there and of a full disk."""
    try:
        yield
    except OSError as cause:
        name = cause.filename
        if cause.errno in _FULL:
            name = cause.filename2 or name  # of a copy, what was being written
        path = Path(name).absolute() if isinstance(name, str) else None
        inside = None
        if within is not None and path is not None and path.is_relative_to(within.absolute()):
            inside = path.relative_to(within.absolute())
        if cause.errno in _FULL:
            message, hint = _FULL[cause.errno], "free some space, or choose another folder with -o"
        elif within is None or inside is not None:
            message = f"cannot be written: {cause.strerror or cause}"
            hint = "choose a folder that can be written with -o"
        else:
            raise
        where = name or target if inside is None else target / inside
        raise BuildError(message, where=where, hint=hint) from cause


def misfit(path: Path, file: File) -> IntegrityError | None:
    """Why a file is not a plain one of the listed size inside the bundle; None if it is.

    Its bytes are not looked at.
    """
    try:
        status = path.stat()
        is_out = leads_out(path)
    except OSError as cause:
        reason = "dangling symlink" if path.is_symlink() else cause.strerror
        return IntegrityError(f"missing: {reason}", where=path, hint=_HINT)
    if not stat.S_ISREG(status.st_mode):
        return IntegrityError("expected a plain file", where=path, hint=_HINT)
    if is_out:
        message = "expected no link out of the bundle"
        return IntegrityError(message, where=path, hint=LINK_HINT)
    if status.st_size != file.bytes:
        message = f"damaged: {status.st_size:,} bytes, expected {file.bytes:,}"
        return IntegrityError(message, where=path, hint=_HINT)
    return None


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as cause:
        if cause.errno not in (errno.EINVAL, errno.ENOTSUP):  # not offered for folders everywhere
            raise
    finally:
        os.close(descriptor)
