"""No file of a bundle is a pickle, and none holds one, however deep.

torch's archives have a member `sample_inputs/model.pt`, which must be empty: its name alone is no harm.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MIN_OPCODES = 5
"""A shorter run of bytes that reads as a pickle is chance: it could call nothing."""
SUFFIXES = (".pkl", ".pickle", ".pt", ".pth")
_PROTOCOL = re.compile(rb"\x80[\x02-\x05]")
# What a pickle of protocol 0 or 1 begins with: it has no mark of its own.
_OLD_START = re.compile(rb"[(\]}c]")


def members(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """A file and, where it is an archive, what is in it, and so on."""
    yield name, data
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                yield from members(f"{name}!{info.filename}", archive.read(info))


def is_pickle(data: bytes) -> bool:
    """Whether the bytes begin with a whole pickle whose stack adds up."""
    try:
        opcodes = [opcode.name for opcode, _, _ in pickletools.genops(data)]  # up to STOP
        pickletools.dis(data, out=io.StringIO())
    except Exception:
        return False
    return len(opcodes) >= MIN_OPCODES


def pickles(name: str, data: bytes) -> list[str]:
    """Where pickles are, and files that are named as if they were."""
    found = []
    for member, content in members(name, data):
        if content and member.endswith(SUFFIXES) and not zipfile.is_zipfile(io.BytesIO(content)):
            found.append(f"{member} by name")
        starts = [match.start() for match in _PROTOCOL.finditer(content)]
        starts += [0] if _OLD_START.match(content) else []
        found += [f"{member} at {start}" for start in starts if is_pickle(content[start:])]
    return found


def as_archive(**contents: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return data.getvalue()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_found_wherever_it_is(protocol: int) -> None:
    data = pickle.dumps({"weights": [1, 2.5, print]}, protocol)
    assert pickles("f", data)
    assert pickles("f", as_archive(inner=as_archive(data=data)))
    assert protocol < 2 or pickles("f", b"an ONNX model" + data + bytes(100))


def test_a_checkpoint_of_torch_is_found(tmp_path: Path) -> None:
    import torch

    torch.save({"a": torch.zeros(2)}, tmp_path / "weights")
    assert pickles("weights", (tmp_path / "weights").read_bytes())


@pytest.mark.parametrize("bundle", ["tiny_bundle", "golden"])
def test_no_file_of_a_bundle_is_or_holds_a_pickle(
    bundle: str, request: pytest.FixtureRequest
) -> None:
    is_golden = bundle == "golden"
    golden = Path(__file__).parent / "golden" / "v1" / "bundle"
    folder = golden if is_golden else request.getfixturevalue(bundle)
    names = {path.name for path in folder.iterdir()}
    assert {".pt2", ".onnx", ".safetensors"} <= {Path(name).suffix for name in names}
    found = [
        place for name in sorted(names) for place in pickles(name, (folder / name).read_bytes())
    ]
    assert found == []


def test_the_archives_of_programs_are_looked_into() -> None:
    golden = Path(__file__).parent / "golden" / "v1" / "bundle"
    inside = [name for name, _ in members("decode.pt2", (golden / "decode.pt2").read_bytes())]
    assert any(name.endswith("model.json") for name in inside)
