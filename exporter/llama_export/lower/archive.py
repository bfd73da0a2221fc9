"""Rewrites the zip archives that torch makes: small, and the same bytes for the same content."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

_EPOCH = (1980, 1, 1, 0, 0, 0)


def repack(path: Path) -> None:
    """Compresses every member, strips native code of its symbols and leaves generated source out."""
    with zipfile.ZipFile(path) as archive:
        members = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            if name.endswith(".cpp"):
                continue
            if name.endswith(".so"):
                data = _strip(data)
            item = zipfile.ZipInfo(name, _EPOCH)
            archive.writestr(item, data, zipfile.ZIP_DEFLATED, compresslevel=9)


def _strip(library: bytes) -> bytes:
    tool = shutil.which("strip")
    if tool is None:  # then symbols stay: larger, not wrong
        return library
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(library)
        file.flush()
        subprocess.run([tool, "--strip-unneeded", file.name], check=True, capture_output=True)
        return Path(file.name).read_bytes()
