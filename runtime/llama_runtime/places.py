"""Where the weights of a bundle are: in it, in a folder that the caller names, or on the hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from pathlib import Path

from llama_artifacts.bundle import Bundle
from llama_artifacts.digests import difference
from llama_artifacts.errors import CompatibilityError, IntegrityError
from llama_artifacts.manifest import File
from llama_artifacts.places import cache_folder
from llama_runtime.downloads import Remote, fetch_cached


def find_weights(bundle: Bundle, *, weights_dir: Path | None = None) -> dict[str, Path]:
    """The path of each weights file of a bundle, by name.

    Files that the bundle refers to are taken from `weights_dir`; without one from the hub's local
    cache, and what is not there is downloaded; what a download had when its connection or process
    broke off is kept, and the next one asks for the rest. Each such file is hashed when it is first
    met, and again when its place, size or time of change are others.

    Args:
        bundle: opened.
        weights_dir: the folder of the checkpoint.

    Raises:
        CompatibilityError: the bundle has no weights, or the files cannot be had.
        IntegrityError: a file has another size or digest than recorded.
    """
    manifest = bundle.manifest
    if manifest.weights == "none":
        raise CompatibilityError(
            "the bundle holds programs without weights",
            where=bundle.folder,
            hint="build it with --weights copy to run it",
        )
    places = {name: bundle.path(name) for name in manifest.weights_headers}
    for name, file in manifest.referenced.items():
        places[name] = (
            _from_folder(weights_dir, name) if weights_dir else _from_hub(bundle, name, file)
        )
        _check(places[name], file)
    return places


def _from_folder(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        message = "not there, but the bundle's weights are in a file of this name"
        raise CompatibilityError(message, where=path, hint="name the checkpoint's folder")
    return path


def _from_hub(bundle: Bundle, name: str, file: File) -> Path:
    source = bundle.manifest.source
    if source.kind != "hub":
        raise CompatibilityError(
            f"the weights are not in the bundle: they are `{name}` of the checkpoint `{source.name}`",
            where=bundle.folder,
            hint="name the checkpoint's folder (--weights-dir, or load(weights_dir=...))",
        )
    from huggingface_hub import errors

    bases = errors.HfHubHTTPError.__bases__  # the transport's own; they depend on the version
    transport = tuple(base for base in bases if issubclass(base, Exception))
    known: tuple[type[Exception], ...] = (errors.HfHubHTTPError, errors.EntryNotFoundError, OSError)
    try:
        remote = Remote(source.name, source.revision or "main", name, file.bytes)
        return fetch_cached(remote, lambda path: _check(path, file, where=remote.place))
    except (*known, *transport) as cause:
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        raise CompatibilityError(
            f"the weights `{name}` cannot be fetched: {(*lines, type(cause).__name__)[0]:.200}",
            where=f"{source.name}@{source.revision}",
            hint="check the network and HF_TOKEN, or name a folder that holds it (--weights-dir)",
        ) from cause


def _check(path: Path, file: File, *, where: object = None) -> None:
    """Refuses a file of another content; what was hashed before and did not change is believed."""
    where = path if where is None else where
    hint = "name the folder of the very checkpoint that the bundle was built from"
    status = path.stat()
    if status.st_size != file.bytes:
        message = f"{status.st_size:,} bytes, the bundle was built from {file.bytes:,}"
        raise IntegrityError(message, where=where, hint=hint)
    identity = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]
    seen = cache_folder() / "digests" / f"{_key(file)}.json"
    if _read(seen) == identity:
        return
    if (found := difference(path, file)) is not None:
        message = f"not what the bundle was built from: {found}"
        raise IntegrityError(message, where=where, hint=hint)
    _write(seen, identity)


def _key(file: File) -> str:
    """Of all digests: another manifest may list the same whole with other blocks."""
    return hashlib.sha256(" ".join((file.sha256, *file.blocks)).encode()).hexdigest()


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _write(path: Path, identity: list[int]) -> None:
    """A cache that cannot be written only costs the next run its time."""
    staged = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.write_text(json.dumps(identity))
        staged.replace(path)
