"""SHA-256 of files: made in one pass over the bytes, compared block by block with all processors.

SHA-256 of a whole file is a chain that one processor has to follow. So a large file is listed with
the digests of its blocks as well; they are independent of each other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llama_artifacts.manifest import BLOCK_BYTES, File

CHUNK_BYTES = 2**20
_MEBI = 2**20


@dataclass(frozen=True)
class Part:
    """A piece of a listed file with a digest of its own: a block, or the whole file.

    Attributes:
        start: its first byte.
        end: the byte after its last one; None: it goes on to the end of the file, wherever that is,
            so that what was appended is noticed.
        num_bytes: how many it should have.
        sha256: its digest as listed.
    """

    start: int
    end: int | None
    num_bytes: int
    sha256: str

    def difference(self, path: Path) -> str | None:
        """How the bytes of the file differ from this part, in a few words; None if they do not.

        Raises:
            OSError: the file cannot be read.
        """
        actual = _sha256_between(path, self.start, self.end)
        if actual == self.sha256:
            return None
        text = f"sha256 {actual[:12]}..., expected {self.sha256[:12]}..."
        if self.start == 0 and self.end is None:
            return text
        last = -(-(self.start + self.num_bytes) // _MEBI)
        return f"bytes {self.start // _MEBI}-{last} MiB: {text}"


class FileHasher:
    """Computes what a manifest lists of a file from its bytes as they pass by, once.

    `hashing` makes one. The whole file's digest is computed beside those of the blocks, by a
    second thread.
    """

    def __init__(self, beside: ThreadPoolExecutor) -> None:
        self._beside = beside
        self._num_bytes = 0
        self._whole, self._block = hashlib.sha256(), hashlib.sha256()
        self._blocks: list[str] = []

    def update(self, data: bytes | memoryview) -> None:
        """Takes the next bytes; they may change once this has returned."""
        whole = self._beside.submit(self._whole.update, data)
        view = memoryview(data)
        while view:
            room = BLOCK_BYTES - self._num_bytes % BLOCK_BYTES
            self._block.update(view[:room])
            self._num_bytes += len(view[:room])
            view = view[room:]
            if self._num_bytes % BLOCK_BYTES == 0:
                self._end_block()
        whole.result()

    def file(self) -> File:
        """Size and digests of the bytes so far, which must be all."""
        if self._num_bytes % BLOCK_BYTES:
            self._end_block()
        blocks = tuple(self._blocks) if self._num_bytes > BLOCK_BYTES else ()
        return File(bytes=self._num_bytes, sha256=self._whole.hexdigest(), blocks=blocks)

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block = hashlib.sha256()


@contextmanager
def hashing() -> Iterator[FileHasher]:
    """A hasher of one file, and its second thread until the block ends."""
    with ThreadPoolExecutor(1) as beside:
        yield FileHasher(beside)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    return _sha256_between(path, 0, None)


def describe(path: Path) -> File:
    """Size and digests of a file, as the manifest lists them; it is read once."""
    with hashing() as hasher:
        for chunk in _chunks(path, 0, None):
            hasher.update(chunk)
        return hasher.file()


def parts(file: File) -> tuple[Part, ...]:
    """What has to be compared for a file to be as listed: its blocks, or where it has none, all."""
    if not file.blocks:
        return (Part(0, None, file.bytes, file.sha256),)
    starts = range(0, file.bytes, BLOCK_BYTES)
    ends: list[int | None] = [*starts[1:], None]
    sizes = [(end or file.bytes) - start for start, end in zip(starts, ends, strict=True)]
    return tuple(map(Part, starts, ends, sizes, file.blocks))


def difference(path: Path, file: File) -> str | None:
    """How the bytes of a file differ from what is listed, in a few words; None if they do not.

    Its blocks are hashed side by side, one for each processor this process may use.

    Raises:
        OSError: the file cannot be read.
    """
    pieces = parts(file)
    if len(pieces) == 1:
        return pieces[0].difference(path)
    with ThreadPoolExecutor(num_processors()) as pool:
        return told([*pool.map(lambda part: part.difference(path), pieces)])


def told(differences: Sequence[str | None]) -> str | None:
    """The first difference of a file's parts, with the number of the others."""
    found = [text for text in differences if text is not None]
    if not found:
        return None
    return found[0] if len(found) == 1 else f"{found[0]} ({len(found)} such blocks)"


def num_processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


def _sha256_between(path: Path, start: int, end: int | None) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(path, start, end):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path, start: int, end: int | None) -> Iterator[memoryview]:
    """The bytes from `start` up to `end`, or to the end of the file, in one buffer filled anew."""
    buffer = memoryview(bytearray(CHUNK_BYTES))  # small enough to stay in the processor's cache
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while end is None or start < end:
            count = file.readinto(buffer if end is None else buffer[: end - start])
            if not count:
                return
            start += count
            yield buffer[:count]
