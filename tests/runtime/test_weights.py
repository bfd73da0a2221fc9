from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llama_artifacts.dtypes import DTYPES
from llama_artifacts.errors import IntegrityError
from llama_runtime.weights import map_weights


def write(path: Path, header: dict[str, object], data: bytes, *, pad: int = 0) -> Path:
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("dtype", [row.torch for row in DTYPES])
def test_every_dtype(tmp_path: Path, dtype: str) -> None:
    tensor = torch.arange(-3, 9).reshape(3, 4).to(getattr(torch, dtype))
    save_file({"a": tensor, "scalar": tensor[0, 0].clone()}, tmp_path / "w")
    weights = map_weights(tmp_path / "w")
    assert weights["a"].dtype == tensor.dtype
    assert torch.equal(weights["a"].view(torch.uint8), tensor.view(torch.uint8))
    assert weights["scalar"].shape == ()


@pytest.mark.parametrize("pad", range(8))
def test_tensors_at_odd_addresses(tmp_path: Path, pad: int) -> None:
    values = torch.tensor([1.5, -2.5, 3.0], dtype=torch.float64)
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "odd": {"dtype": "F64", "shape": [3], "data_offsets": [1, 25]},
    }
    path = write(tmp_path / "w", header, b"\x07" + values.numpy().tobytes(), pad=pad)
    weights = map_weights(path)
    assert torch.equal(weights["odd"], values)
    assert weights["odd"].data_ptr() % 8 == 0
    weights["odd"].zero_()
    assert torch.equal(map_weights(path)["odd"], values)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no large pages")
@pytest.mark.parametrize("refuses", [False, True])
def test_large_pages_are_asked_for_and_may_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    asked = []

    class Map(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            asked.append(option)
            if refuses:
                raise OSError(22, "Invalid argument")

    monkeypatch.setattr("llama_runtime.weights.mmap.mmap", Map)
    save_file({"a": torch.arange(4.0)}, tmp_path / "w")
    assert torch.equal(map_weights(tmp_path / "w")["a"], torch.arange(4.0))
    assert asked == [mmap.MADV_HUGEPAGE]


def test_a_tensor_beyond_four_gibibytes(tmp_path: Path) -> None:
    """The file is sparse, and little of it is ever read."""
    size = 2**32 + 64
    header = {
        "large": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        "last": {"dtype": "F32", "shape": [2], "data_offsets": [size, size + 8]},
    }
    path = write(tmp_path / "w", header, b"")
    with path.open("r+b") as file:
        file.seek(size - 1, os.SEEK_END)
        file.write(b"\x07" + torch.tensor([1.5, -2.5]).numpy().tobytes())
    weights = map_weights(path)
    assert weights["last"].tolist() == [1.5, -2.5]
    assert weights["large"].shape == (size,)
    assert weights["large"][-2:].tolist() == [0, 7]


def test_tensors_of_no_element(tmp_path: Path) -> None:
    header = {
        "none": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]},
        "some": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "end": {"dtype": "F32", "shape": [2, 0], "data_offsets": [4, 4]},
    }
    weights = map_weights(write(tmp_path / "w", header, bytes(4)))
    assert [tuple(weights[name].shape) for name in header] == [(0, 4), (1,), (2, 0)]


def test_a_file_of_no_tensor(tmp_path: Path) -> None:
    assert map_weights(write(tmp_path / "w", {}, b"")) == {}


def test_writing_changes_this_map_alone(tmp_path: Path) -> None:
    path = tmp_path / "w"
    save_file({"a": torch.ones(5000)}, path)
    content = path.read_bytes()
    first, second = map_weights(path), map_weights(path)
    first["a"].fill_(7)
    assert second["a"].sum() == 5000
    assert path.read_bytes() == content


def test_the_map_lives_as_long_as_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "w"
    save_file({"a": torch.ones(5000), "b": torch.zeros(5000)}, path)
    tensor = map_weights(path)["a"][10:20]
    path.unlink()
    assert tensor.sum() == 10


def test_a_read_only_file_can_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "w"
    save_file({"a": torch.ones(3)}, path)
    path.chmod(0o400)
    assert map_weights(path)["a"].sum() == 3


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (GOOD, bytes(7), "1 bytes shorter"),
        (GOOD, bytes(9), "1 bytes longer"),
        ({**GOOD, "b": GOOD["a"]}, bytes(8), "overlaps"),
        ({"a": {**GOOD["a"], "shape": [3]}}, bytes(8), "needs 12 bytes"),
        ({"a": {**GOOD["a"], "shape": [-2]}}, bytes(8), "non-negative"),
        ({"a": {**GOOD["a"], "shape": [2**62, 2**62]}}, bytes(8), "larger than any file"),
        ({"a": {**GOOD["a"], "data_offsets": [2**40, 2**40 + 8]}}, bytes(8), "belong to no tensor"),
        ({"a": {**GOOD["a"], "data_offsets": [-8, 0]}}, bytes(8), "data_offsets"),
        ({"a": {**GOOD["a"], "dtype": "F4"}}, bytes(8), "dtype `F4` is not supported"),
        ({"a": {"dtype": "F32"}}, bytes(8), "expected the keys"),
        ({"a": 3}, bytes(8), "expected an object"),
    ],
)
def test_a_hostile_header(
    tmp_path: Path, header: dict[str, object], data: bytes, words: str
) -> None:
    path = write(tmp_path / "w", header, data)
    with pytest.raises(IntegrityError) as caught:
        map_weights(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x01" + bytes(7), b"version https://git-lfs"]
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(IntegrityError):
        map_weights(tmp_path / "w")


MEASURE = """
import sys, torch
from pathlib import Path
from llama_runtime.weights import map_weights

def resident():
    text = Path("/proc/self/status").read_text()
    return [int(text.split(name + ":")[1].split()[0]) // 1024 for name in ("RssFile", "RssAnon")]

warm_up = torch.ones(1 << 20).sum()
before = resident()
weights = [map_weights(Path(sys.argv[1]))["a"] for _ in range(2)]
mapped = resident()
total = sum(int(tensor.sum()) for tensor in weights)
print(*before, *mapped, *resident(), total)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_map_is_no_copy(tmp_path: Path) -> None:
    """64 MiB mapped twice: nothing when mapped, pages of the file when read, no memory of ours."""
    save_file({"a": torch.ones(64 << 20, dtype=torch.uint8)}, tmp_path / "w")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "w")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    file0, anon0, file1, anon1, file2, anon2, total = map(int, done.stdout.split())
    assert total == 2 * (64 << 20)
    assert file1 - file0 < 8
    assert file2 - file1 > 100
    assert max(anon1, anon2) - anon0 < 16
