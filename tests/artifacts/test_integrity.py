from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_artifacts import integrity
from llama_artifacts.bundle import check_digest, open_bundle
from llama_artifacts.digests import Part
from llama_artifacts.errors import IntegrityError, ManifestError
from llama_artifacts.integrity import Fault
from llama_artifacts.manifest import BLOCK_BYTES, FILE_NAME
from tests.artifacts.patches import reseal
from tests.bundles import CONTENTS, sample_program, write_large, write_sample


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def link_out(path: Path) -> None:
    path.rename(path.parent.parent / "outside")
    path.symlink_to("../outside")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("gone")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "b")


def test_an_intact_bundle_has_no_faults(folder: Path) -> None:
    report = integrity.check(folder)
    assert report.faults == ()
    assert report.error() is None
    assert report.num_files == len(CONTENTS)
    assert report.num_bytes == sum(map(len, CONTENTS.values()))


@pytest.mark.parametrize(
    ("damage", "kind", "detail"),
    [
        (Path.unlink, "missing", "no such file"),
        (replace_by_dangling_link, "missing", "dangling link"),
        (replace_by_folder, "changed", "expected a plain file"),
        (link_out, "changed", "expected no link out of the bundle"),
        (lambda path: path.write_bytes(b"x"), "changed", "1 bytes, expected 19"),
        (change, "changed", "sha256 {found}..., expected {expected}..."),
    ],
)
def test_a_damaged_file_is_told(
    folder: Path, damage: Callable[[Path], None], kind: str, detail: str
) -> None:
    path = folder / "decode.pt2"
    expected = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    damage(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ""
    (fault,) = integrity.check(folder).faults
    detail = detail.format(found=found, expected=expected)
    assert fault == Fault("decode.pt2", kind, detail)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["notes.txt", ".decode.pt2.partial-7", ".git", "a\x1bb"])
def test_a_file_that_is_not_listed_is_extra(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"")
    (fault,) = integrity.check(folder).faults
    assert (fault.kind, fault.detail) == ("extra", "not listed in the manifest")
    assert fault.file == name.replace("\x1b", r"\x1b")


def test_a_folder_and_a_dangling_link_are_extra(folder: Path) -> None:
    (folder / "more").mkdir()
    (folder / "more" / "x").write_bytes(b"")
    (folder / "link").symlink_to("gone")
    assert integrity.check(folder).names("extra") == ("link", "more/")


def test_a_signature_is_not_extra(folder: Path) -> None:
    (folder / "model.sig").write_bytes(b"{}")
    assert integrity.check(folder).faults == ()


def test_faults_are_sorted_and_counted(folder: Path) -> None:
    change(folder / "tokenizer.json")
    (folder / "decode.onnx").unlink()
    (folder / "extra").write_bytes(b"")
    report = integrity.check(folder)
    assert [(fault.file, fault.kind) for fault in report.faults] == [
        ("decode.onnx", "missing"),
        ("extra", "extra"),
        ("tokenizer.json", "changed"),
    ]
    error = report.error()
    assert error is not None
    assert str(error) == f"{folder}/decode.onnx: missing: no such file"
    assert error.hint is not None
    assert error.hint.startswith("3 files are not as listed")


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_report_does_not_depend_on_the_threads(folder: Path, threads: int) -> None:
    for name in ("tokenizer.json", "decode.pt2", "prefill.pt2"):
        change(folder / name)
    advanced: list[int] = []
    report = integrity.check(folder, threads=threads, advance=advanced.append)
    assert report == integrity.check(folder)
    assert sum(advanced) == report.num_bytes


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A bundle with a file of a block and a byte more."""
    return write_large(tmp_path / "large", BLOCK_BYTES + 1)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_changed_block_of_a_large_file_is_told(large: Path, threads: int) -> None:
    assert integrity.check(large, threads=threads).faults == ()
    with (large / "large.bin").open("r+b") as file:
        file.seek(BLOCK_BYTES)
        file.write(b"!")
    advanced: list[int] = []
    report = integrity.check(large, threads=threads, advance=advanced.append)
    (fault,) = report.faults
    assert (fault.file, fault.kind) == ("large.bin", "changed")
    assert fault.detail.startswith("bytes 64-65 MiB: sha256 ")
    assert sum(advanced) == report.num_bytes
    assert len(advanced) == report.num_files + 1
    with pytest.raises(IntegrityError, match=r"large\.bin: damaged: bytes 64-65 MiB: sha256 "):
        check_digest(open_bundle(large), "large.bin")


def test_a_large_file_without_block_digests_is_compared_whole(large: Path) -> None:
    value = json.loads((large / FILE_NAME).read_bytes())
    assert len(value["files"]["large.bin"].pop("blocks")) == 2
    (large / FILE_NAME).write_text(json.dumps(value))
    assert integrity.check(large).faults == ()
    with (large / "large.bin").open("r+b") as file:
        file.write(b"!")
    (fault,) = integrity.check(large).faults
    assert fault.detail.startswith("sha256 ")


def test_a_file_that_cannot_be_read_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Part, "difference", refuse)
    faults = integrity.check(folder).faults
    assert {fault.detail for fault in faults} == {"cannot be read: Permission denied"}
    assert len(faults) == len(CONTENTS)


def test_files_swapped_with_each_other_are_changed(folder: Path) -> None:
    first, second = folder / "prefill.pt2", folder / "decode.pt2"
    shutil.move(first, folder / "x")
    shutil.move(second, first)
    shutil.move(folder / "x", second)
    assert integrity.check(folder).names("changed") == ("decode.pt2", "prefill.pt2")


def test_no_manifest_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ManifestError):
        integrity.check(tmp_path)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (b"", "file is empty, 0 bytes (incomplete download?)"),
        (CONTENTS["weights.safetensors"] + b"x", "file is 1 bytes longer than its header declares"),
        (
            CONTENTS["weights.safetensors"].replace(b"norm", b"Norm"),
            "its header is not the one that the programs were built for",
        ),
    ],
)
def test_weights_as_listed_may_still_be_malformed(
    folder: Path, weights: bytes, expected: str
) -> None:
    (folder / "weights.safetensors").write_bytes(weights)
    headers = json.loads((folder / FILE_NAME).read_bytes())["weights_headers"]
    reseal(folder)
    value = json.loads((folder / FILE_NAME).read_bytes()) | {"weights_headers": headers}
    (folder / FILE_NAME).write_text(json.dumps(value))
    (fault,) = integrity.check(folder).faults
    assert (fault.file, fault.kind) == ("weights.safetensors", "malformed")
    assert fault.detail.startswith(expected)
    with pytest.raises(IntegrityError):
        integrity.check_index(open_bundle(folder))


def test_a_tensor_that_a_program_binds_must_be_there(folder: Path) -> None:
    value = json.loads((folder / FILE_NAME).read_bytes())
    value["programs"][1]["constants"].append("lm_head.weight")
    (folder / FILE_NAME).write_text(json.dumps(value))
    (fault,) = integrity.check(folder).faults
    expected = "expected `lm_head.weight`, which `decode.pt2` binds, found none"
    assert fault == Fault("weights.safetensors", "malformed", expected)


def test_a_bundle_without_weights_has_no_index(tmp_path: Path) -> None:
    contents = {"decode.pt2": b"a program"}
    folder = write_sample(
        tmp_path / "b",
        contents=contents,
        programs=(sample_program("decode", "pt2", "decode.pt2"),),
        weights="none",
        weights_headers={},
        tokenizer=None,
        has_chat_template=False,
    )
    assert integrity.check(folder).faults == ()
