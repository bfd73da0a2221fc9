"""Whether a bundle's folder holds what its manifest lists, byte for byte, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llama_artifacts import manifest_file
from llama_artifacts.bundle import Bundle, misfit, open_bundle
from llama_artifacts.digests import Part, num_processors, parts, told
from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import FILE_NAME, SIGNATURE_NAME
from llama_artifacts.safetensors import header_digest, read_header
from llama_artifacts.strict_json import printable, shown

UNLISTED = frozenset({FILE_NAME, SIGNATURE_NAME})
"""What a bundle may hold beside the files it lists. Any other exemption, also of left-overs of a
killed writer, would be a place for bytes that nobody checks."""


@dataclass(frozen=True)
class Fault:
    """One file that is not as listed.

    Attributes:
        file: its name in the bundle, printable; a folder's ends in a slash.
        kind: `missing`, `changed` (other bytes, another size, not a plain file), `extra` (not
            listed), or `malformed` (as listed, but a weights file that breaks its format).
        detail: what was found, in a few words.
    """

    file: str
    kind: Literal["missing", "changed", "extra", "malformed"]
    detail: str


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        folder: the bundle.
        num_files: listed files.
        num_bytes: their bytes, as listed.
        faults: sorted by file; none if the bundle is intact.
    """

    folder: Path
    num_files: int
    num_bytes: int
    faults: tuple[Fault, ...]

    def names(self, kind: str) -> tuple[str, ...]:
        """The files with that kind of fault."""
        return tuple(fault.file for fault in self.faults if fault.kind == kind)

    def error(self) -> IntegrityError | None:
        """The first fault as an error, with the number of all in its hint; None if intact."""
        if not self.faults:
            return None
        first, count = self.faults[0], len(self.faults)
        hint = "remove what is not listed; copy or build again what is damaged"
        if count > 1:
            hint = f"{count} files are not as listed; copy the bundle again, or build it again"
        message = f"{first.kind}: {first.detail}"
        return IntegrityError(message, where=self.folder / first.file, hint=hint)


def check(
    folder: Path, *, threads: int | None = None, advance: Callable[[int], None] | None = None
) -> Report:
    """Compares every file of a bundle with its manifest: names, sizes, SHA-256, weights index.

    Files, and the blocks of large ones, are hashed side by side, the largest files first.

    Args:
        folder: the bundle.
        threads: how many at a time; None: one for each processor this process may use.
        advance: is told how many bytes were dealt with, from any thread.

    Raises:
        CompatibilityError: the manifest is of another major version.
        ManifestError: no manifest, or a malformed one.
        IntegrityError: the folder cannot be listed.
    """
    bundle = Bundle(folder, manifest_file.read(folder))
    files = bundle.manifest.files
    faults = [fault for name in files if (fault := _misfit(bundle, name)) is not None]
    if faults and advance is not None:
        advance(sum(files[fault.file].bytes for fault in faults))
    faults += _changed(bundle, files.keys() - {fault.file for fault in faults}, threads, advance)
    if not faults:
        faults += _index_faults(bundle)
    faults += _extra(bundle)
    num_bytes = sum(file.bytes for file in files.values())
    return Report(folder, len(files), num_bytes, tuple(sorted(faults, key=lambda x: x.file)))


def check_whole(folder: Path) -> Bundle:
    """Opens a bundle that holds what its manifest lists, byte for byte, and nothing else.

    Raises:
        ManifestError, CompatibilityError, IntegrityError: as `check`, or it does not.
    """
    if (error := check(folder).error()) is not None:
        raise error
    return open_bundle(folder)


def check_index(bundle: Bundle) -> None:
    """Checks the headers of weights, without their data, against the manifest and the programs.

    Raises:
        IntegrityError: one breaks the format or is another than the manifest's, or they lack a
            tensor that a program binds. Bundles without weights pass; of weights that are
            elsewhere nothing is known.
    """
    manifest = bundle.manifest
    found: set[str] = set()
    for name in sorted(manifest.weights_headers.keys() - manifest.referenced.keys()):
        path = bundle.path(name)
        found |= read_header(path, error=IntegrityError).tensors.keys()
        if header_digest(path) != manifest.weights_headers[name]:
            message = "its header is not the one that the programs were built for"
            raise IntegrityError(message, where=path)
    if manifest.referenced or manifest.weights == "none":
        return
    for program in manifest.programs:
        for name in program.constants:
            if name not in found:
                path = bundle.path(sorted(manifest.weights_headers)[0])
                message = f"expected {shown(name)}, which {shown(program.file)} binds, found none"
                raise IntegrityError(message, where=path)


def _misfit(bundle: Bundle, name: str) -> Fault | None:
    path = bundle.path(name)
    if not path.exists():
        detail = "dangling link" if path.is_symlink() else "no such file"
        return Fault(name, "missing", detail)
    if (complaint := misfit(path, bundle.manifest.files[name])) is not None:
        return Fault(name, "changed", complaint.message.removeprefix("damaged: "))
    return None


def _changed(
    bundle: Bundle,
    names: Iterable[str],
    threads: int | None,
    advance: Callable[[int], None] | None,
) -> Iterator[Fault]:
    """Hashes files of the right size."""
    files = bundle.manifest.files
    largest_first = sorted(names, key=lambda name: (-files[name].bytes, name))
    pieces = [(name, part) for name in largest_first for part in parts(files[name])]

    def examine(piece: tuple[str, Part]) -> str | None:
        name, part = piece
        try:
            return part.difference(bundle.path(name))
        except OSError as cause:
            return f"cannot be read: {cause.strerror}"
        finally:
            if advance is not None:
                advance(part.num_bytes)

    found: dict[str, list[str | None]] = {name: [] for name in largest_first}
    with ThreadPoolExecutor(threads or num_processors()) as pool:
        for (name, _), text in zip(pieces, pool.map(examine, pieces), strict=True):
            found[name].append(text)
    for name, texts in found.items():
        if (detail := told(texts)) is not None:
            yield Fault(name, "changed", detail)


def _index_faults(bundle: Bundle) -> Iterator[Fault]:
    try:
        check_index(bundle)
    except IntegrityError as error:
        path, _, place = (error.where or "").partition("#")
        detail = f"{place}: {error.message}" if place else error.message
        yield Fault(Path(path).name, "malformed", detail)


def _extra(bundle: Bundle) -> Iterator[Fault]:
    known = bundle.manifest.files.keys() | UNLISTED
    try:
        paths = [path for path in bundle.folder.iterdir() if path.name not in known]
        for path in paths:
            is_folder = path.is_dir() and not path.is_symlink()
            name = f"{printable(path.name)}/" if is_folder else printable(path.name)
            yield Fault(name, "extra", "not listed in the manifest")
    except OSError as cause:
        message = f"cannot be listed: {cause.strerror}"
        raise IntegrityError(message, where=bundle.folder) from cause
