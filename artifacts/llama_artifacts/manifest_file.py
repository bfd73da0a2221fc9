"""The file `manifest.json`: a manifest as bytes, read as untrusted text."""

from __future__ import annotations

import json
import logging
import re
import stat
from pathlib import Path

from llama_artifacts.codec import decode, encode
from llama_artifacts.errors import CompatibilityError, ManifestError
from llama_artifacts.links import LINK_HINT, leads_out
from llama_artifacts.manifest import FILE_NAME, SCHEMA_MAJOR, SCHEMA_MINOR, VERSION_PART, Manifest
from llama_artifacts.strict_json import json_type, parse_bounded, shown

MAX_MANIFEST_BYTES = 16 * 2**20
_SCHEMA = re.compile(rf"{VERSION_PART}\.{VERSION_PART}")
_HINT = "point at the folder that `llama-export build` wrote"
_log = logging.getLogger(__name__)


def to_json(manifest: Manifest) -> bytes:
    """Canonical JSON: two spaces, sorted keys, UTF-8, a newline at the end.

    Raises:
        ManifestError: a value could not be read back, such as a figure that is not finite.
    """
    value = encode(manifest)
    decode(Manifest, value, where=FILE_NAME)
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def from_json(data: bytes, *, where: object) -> Manifest:
    """A manifest from its bytes, checked in full.

    Unknown keys are refused, except in a newer minor version of the format: there they are
    ignored with a warning in the log.

    Raises:
        CompatibilityError: written by another major version of the format.
        ManifestError: anything else that breaks the format, with the key path.
    """
    value = parse_bounded(data, where=where, error=ManifestError)
    if not _is_newer(value.get("schema"), where):
        return decode(Manifest, value, where=str(where))
    ignored: list[str] = []
    manifest = decode(Manifest, value, where=str(where), ignored=ignored)
    _log.warning(
        "%s: bundle format %s is newer than %d.%d; ignored keys: %s",
        *(where, manifest.schema, SCHEMA_MAJOR, SCHEMA_MINOR, ", ".join(ignored) or "none"),
    )
    return manifest


def read(folder: Path) -> Manifest:
    """The manifest of a bundle's folder.

    Raises:
        CompatibilityError: it was written by another major version of the format.
        ManifestError: there is none, it is too large, or it breaks the format.
    """
    path = folder / FILE_NAME
    try:
        data = _read_bytes(path)
    except (FileNotFoundError, NotADirectoryError) as cause:
        if folder.is_dir():
            found = "a folder without it"
        else:
            found = "a file" if folder.exists() else "no such folder"
        raise ManifestError(
            f"expected a `{FILE_NAME}`, found {found}", where=folder, hint=_HINT
        ) from cause
    except OSError as cause:
        raise ManifestError(f"cannot be read: {cause.strerror}", where=path, hint=_HINT) from cause
    return from_json(data, where=path)


def _read_bytes(path: Path) -> bytes:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError("expected a plain file", where=path, hint=_HINT)
    if status.st_size > MAX_MANIFEST_BYTES:
        message = f"expected at most {MAX_MANIFEST_BYTES:,} bytes, got {status.st_size:,}"
        raise ManifestError(message, where=path, hint=_HINT)
    if leads_out(path):
        raise ManifestError("expected no link out of the bundle", where=path, hint=LINK_HINT)
    return path.read_bytes()


def _is_newer(schema: object, where: object) -> bool:
    match = _SCHEMA.fullmatch(schema) if isinstance(schema, str) else None
    if match is None:
        got = shown(schema) if isinstance(schema, str) else json_type(schema)
        message = f"expected a version such as `{SCHEMA_MAJOR}.{SCHEMA_MINOR}`, got {got}"
        raise ManifestError(message, where=f"{where}#schema")
    if int(match[1]) != SCHEMA_MAJOR:
        raise CompatibilityError(
            f"bundle format {schema} is not {SCHEMA_MAJOR}.x",
            where=f"{where}#schema",
            hint="use the version of llama-export that wrote it, or build it again",
        )
    return int(match[2]) > SCHEMA_MINOR
