from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_artifacts import digests
from llama_artifacts.digests import describe, difference, hashing, parts, sha256
from llama_artifacts.manifest import BLOCK_BYTES, File
from tests.bundles import CONTENTS, sample_manifest, write_sample

MARKS = (b"first", b"second", b"third")


def sparse(path: Path, num_bytes: int) -> Path:
    """A file with a mark at the start of each block, else zeros that take no space."""
    with path.open("wb") as file:
        file.truncate(num_bytes)
        for start, mark in zip(range(0, num_bytes, BLOCK_BYTES), MARKS, strict=False):
            file.seek(start)
            file.write(mark[: num_bytes - start])
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks and a byte."""
    return sparse(tmp_path_factory.mktemp("large") / "large.bin", 2 * BLOCK_BYTES + 1)


@pytest.fixture(scope="module")
def listed(large: Path) -> File:
    return describe(large)


def test_a_large_file_has_a_digest_for_each_block(large: Path, listed: File) -> None:
    data = large.read_bytes()
    assert listed == File(
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        blocks=tuple(
            hashlib.sha256(data[start : start + BLOCK_BYTES]).hexdigest()
            for start in range(0, len(data), BLOCK_BYTES)
        ),
    )
    assert len(listed.blocks) == 3
    assert sha256(large) == listed.sha256


def test_digests_are_those_of_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "CHUNK_BYTES", 3)
    folder = write_sample(tmp_path / "b")
    files = {name: describe(folder / name) for name in CONTENTS}
    assert files == sample_manifest().files


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES])
def test_a_file_of_at_most_one_block_has_none(tmp_path: Path, num_bytes: int) -> None:
    found = describe(sparse(tmp_path / "x", num_bytes))
    assert (found.bytes, found.blocks) == (num_bytes, ())


def test_bytes_are_hashed_alike_however_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "BLOCK_BYTES", 10)
    path, data = tmp_path / "x", bytes(range(35))
    path.write_bytes(data)
    for size in (1, 3, 10, 14, 35):
        with hashing() as hasher:
            for start in range(0, len(data), size):
                hasher.update(data[start : start + size])
            assert hasher._blocks == [
                hashlib.sha256(data[start : start + 10]).hexdigest() for start in (0, 10, 20)
            ]


def test_a_file_is_read_once(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    real: Callable[..., object] = Path.open

    def counted(path: Path, *args: object, **settings: object) -> object:
        opened.append(path)
        return real(path, *args, **settings)

    monkeypatch.setattr(Path, "open", counted)
    assert len(describe(large).blocks) == 3
    assert opened == [large]


def test_parts_are_the_blocks_or_the_whole(listed: File) -> None:
    assert [(part.start, part.end, part.num_bytes) for part in parts(listed)] == [
        (0, BLOCK_BYTES, BLOCK_BYTES),
        (BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES),
        (2 * BLOCK_BYTES, None, 1),
    ]
    (whole,) = parts(File(listed.bytes, listed.sha256))
    assert (whole.start, whole.end, whole.num_bytes) == (0, None, listed.bytes)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ((), None),
        ((0,), "bytes 0-64 MiB: sha256 "),
        ((2 * BLOCK_BYTES - 1,), "bytes 64-128 MiB: sha256 "),
        ((2 * BLOCK_BYTES,), "bytes 128-129 MiB: sha256 "),
        ((2 * BLOCK_BYTES + 1,), "bytes 128-129 MiB: sha256 "),  # appended
    ],
)
def test_a_changed_block_is_told_by_its_place(
    tmp_path: Path, listed: File, places: tuple[int, ...], expected: str | None
) -> None:
    path = sparse(tmp_path / "x", listed.bytes)
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            file.write(b"!")
    found = difference(path, listed)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(expected)
    whole = difference(path, File(listed.bytes, listed.sha256))
    assert (whole is None) == (expected is None)
    assert whole is None or whole.startswith("sha256 ")


def test_several_changed_blocks_are_counted(tmp_path: Path, listed: File) -> None:
    path = sparse(tmp_path / "x", listed.bytes)
    with path.open("r+b") as file:
        for place in (BLOCK_BYTES, 2 * BLOCK_BYTES):
            file.seek(place)
            file.write(b"!")
    found = difference(path, listed)
    assert found is not None
    assert found.startswith("bytes 64-128 MiB: ")
    assert found.endswith("... (2 such blocks)")


def test_blocks_swapped_with_each_other_are_noticed(tmp_path: Path, listed: File) -> None:
    swapped = File(listed.bytes, listed.sha256, (*listed.blocks[1::-1], listed.blocks[2]))
    path = sparse(tmp_path / "x", listed.bytes)
    assert difference(path, swapped) is not None
    with path.open("r+b") as file:
        file.write(MARKS[1])
        file.seek(BLOCK_BYTES)
        file.write(MARKS[0].ljust(len(MARKS[1]), b"\0"))
    assert difference(path, listed) is not None


def test_a_file_cut_short_is_noticed(tmp_path: Path, listed: File) -> None:
    found = difference(sparse(tmp_path / "x", BLOCK_BYTES + 3), listed)
    assert found is not None
    assert found.startswith("bytes 64-128 MiB: ")
