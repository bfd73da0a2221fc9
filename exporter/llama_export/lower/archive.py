"""Rewrites the zip archives that torch makes: small, and the same bytes for the same content."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

_EPOCH = (1980, 1, 1, 0, 0, 0)
NATIVE_STEM = "program"
_HASH = re.compile(r"(?<=/)c[a-z2-7]{51}(?=\.(wrapper|kernel))")
"""How Inductor begins the names of files: with a hash of generated source, which names folders."""


def write_archive(path: Path, archive: io.BytesIO) -> None:
    """Writes what torch saved, without symbols, generated source, dates and the random id.

    Torch saves into memory, because its own writer of files ends the process on a full disk.
    """
    with zipfile.ZipFile(archive) as made:
        members = {item.filename: made.read(item) for item in made.infolist()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as rewritten:
        for name, data in members.items():
            if name.endswith(".cpp"):
                continue
            if name.endswith(".so"):
                data = _strip(data)
            if name.endswith(".data/serialization_id"):
                data = b"0" * len(data)
            item = zipfile.ZipInfo(_HASH.sub(NATIVE_STEM, name), _EPOCH)
            rewritten.writestr(item, data, zipfile.ZIP_DEFLATED, compresslevel=9)
    path.write_bytes(packed.getvalue())


def _strip(library: bytes) -> bytes:
    tool = shutil.which("strip")
    if tool is None:  # then symbols stay: larger, not wrong
        return library
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(library)
        file.flush()
        # The linker's id of a build is a hash of what is stripped, too.
        words = [tool, "--strip-unneeded", "--remove-section=.note.gnu.build-id", file.name]
        subprocess.run(words, check=True, capture_output=True)
        return Path(file.name).read_bytes()
