from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import llama_runtime
from llama_artifacts.errors import CompatibilityError, LlamaExportError
from llama_artifacts.manifest import Program, Target
from llama_runtime import compat, machine
from tests.bundles import sample_program, write_sample

FLAGS = ("avx2", "fma")
AOTI = dataclasses.replace(
    sample_program("decode", "pt2", "decode.pt2"),
    format="aoti",
    target=Target("cpu", "x86_64", "avx2", FLAGS),
)
PT2 = sample_program("decode", "pt2", "decode.pt2")
ONNX = sample_program("decode", "onnx", "decode.onnx")
CUDA = dataclasses.replace(AOTI, target=Target("cuda", "x86_64", capability="9.0"))


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """An x86-64 with AVX2; the versions can be changed by the test."""
    versions: dict[str, str | None] = {"torch": "2.13.0+cpu", "onnxruntime": "1.24.1"}
    monkeypatch.setattr(compat, "version", versions.get)
    monkeypatch.setattr(compat, "architecture", lambda: "x86_64")
    monkeypatch.setattr(compat, "cpu_flags", lambda: frozenset((*FLAGS, "sse2")))
    return versions


def reason(program: Program, *, device: str = "cpu", allow_native: bool = True) -> str:
    assert not compat.fits(program, device=device, allow_native=allow_native)
    with pytest.raises(CompatibilityError) as caught:
        compat.check(program, device=device, allow_native=allow_native)
    assert caught.value.where == program.file
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return caught.value.message


@pytest.mark.parametrize("program", [AOTI, PT2, ONNX], ids=lambda p: p.format)
def test_a_machine_that_fits(program: Program) -> None:
    compat.check(program, device="cpu", allow_native=True)
    assert compat.fits(program, device="cpu", allow_native=True)


@pytest.mark.parametrize("program", [AOTI, PT2], ids=lambda p: p.format)
@pytest.mark.parametrize("here", ["2.11.0", "2.130.0", "3.13.0", None])
def test_another_torch(this_machine: dict[str, Any], program: Program, here: str | None) -> None:
    this_machine["torch"] = here
    assert reason(program) == f"made with torch 2.13, this is {here or 'none'}"


@pytest.mark.parametrize("here", ["2.13.0", "2.13.1", "2.13.0+cu130", "2.13.2.dev1"])
def test_another_release_of_the_same_minor(this_machine: dict[str, Any], here: str) -> None:
    this_machine["torch"] = here
    compat.check(AOTI, device="cpu", allow_native=True)


def test_a_program_that_names_no_torch() -> None:
    program = dataclasses.replace(PT2, requires={})
    assert reason(program) == "made with torch unknown, this is 2.13.0+cpu"


def test_another_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "architecture", lambda: "aarch64")
    assert reason(AOTI) == "made for x86_64, this machine is aarch64"
    compat.check(PT2, device="cpu", allow_native=True)


@pytest.mark.parametrize("flags", [(), ("avx2",), ("sse2", "avx")])
def test_a_cpu_that_lacks_features(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]) -> None:
    monkeypatch.setattr(compat, "cpu_flags", lambda: frozenset(flags))
    lacking = ", ".join(sorted(set(FLAGS) - set(flags)))
    assert reason(AOTI) == f"needs CPU features that this machine lacks: {lacking}"


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_program_for_the_cpu_on_a_gpu(device: str) -> None:
    assert reason(PT2, device=device).startswith("made for cpu, asked for cuda")


def test_a_program_for_a_gpu_on_the_cpu() -> None:
    assert reason(CUDA) == "made for cuda, asked for cpu"


def test_a_gpu_of_another_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {"cuda:0": (9, 0), "cuda:1": (8, 9)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    compat.check(CUDA, device="cuda:0", allow_native=True)
    message = "made for compute capability 9.0, this device has 8.9"
    assert reason(CUDA, device="cuda:1") == message


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reason(CUDA, device="cuda:0") == "made for CUDA, and no CUDA device is here"


@pytest.mark.parametrize(
    ("here", "message"),
    [
        (None, "onnxruntime is not installed"),
        ("1.21.9", "needs onnxruntime 1.22, this is 1.21.9"),
        ("1.9.0", "needs onnxruntime 1.22, this is 1.9.0"),
        ("0.30", "needs onnxruntime 1.22, this is 0.30"),
    ],
)
def test_another_onnxruntime(this_machine: dict[str, Any], here: str | None, message: str) -> None:
    this_machine["onnxruntime"] = here
    assert reason(ONNX) == message
    compat.check(PT2, device="cpu", allow_native=True)


@pytest.mark.parametrize("here", ["1.22.0", "1.100.0", "2.0"])
def test_a_newer_onnxruntime(this_machine: dict[str, Any], here: str) -> None:
    this_machine["onnxruntime"] = here
    compat.check(ONNX, device="cpu", allow_native=True)


def test_the_gpu_package_of_onnxruntime_serves(this_machine: dict[str, Any]) -> None:
    this_machine |= {"onnxruntime": None, "onnxruntime-gpu": "1.22.0"}
    compat.check(ONNX, device="cpu", allow_native=True)


def test_native_code_refused() -> None:
    assert reason(AOTI, allow_native=False) == "native code, which --no-native refuses"
    for program in (PT2, ONNX):
        compat.check(program, device="cpu", allow_native=False)


Opened = list[str]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The files that the loader would have opened as programs."""
    files: Opened = []

    def open_nothing(loading: Any) -> Any:
        files.append(loading.path.name)

    monkeypatch.setattr("llama_runtime.loader.load_program", open_nothing)
    return files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    contents = {"decode.cpu-avx2.pt2": b"native code"}
    from tests.bundles import CONTENTS

    aoti = dataclasses.replace(AOTI, file="decode.cpu-avx2.pt2")
    return write_sample(
        tmp_path / "b", contents={**CONTENTS, **contents}, programs=(ONNX, PT2, aoti)
    )


def test_the_fastest_format_that_fits_is_taken(folder: Path, opened: Opened) -> None:
    llama_runtime.load(folder).entry("decode")
    assert opened == ["decode.cpu-avx2.pt2"]


def too_old_a_cpu(patch: pytest.MonkeyPatch, versions: dict[str, Any]) -> None:
    patch.setattr(compat, "cpu_flags", frozenset)


def another_architecture(patch: pytest.MonkeyPatch, versions: dict[str, Any]) -> None:
    patch.setattr(compat, "architecture", lambda: "riscv64")


def another_torch(patch: pytest.MonkeyPatch, versions: dict[str, Any]) -> None:
    versions["torch"] = "2.12.0"


Change = Callable[[pytest.MonkeyPatch, dict[str, Any]], None]


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (too_old_a_cpu, "decode.pt2"),
        (another_architecture, "decode.pt2"),
        (another_torch, "decode.onnx"),
    ],
)
def test_the_next_format_serves_where_the_fastest_does_not_fit(
    folder: Path,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    this_machine: dict[str, Any],
    change: Change,
    file: str,
) -> None:
    change(monkeypatch, this_machine)
    llama_runtime.load(folder).entry("decode")
    assert opened == [file]


@pytest.mark.parametrize("change", [too_old_a_cpu, another_architecture, another_torch])
def test_a_format_asked_for_is_not_replaced(
    folder: Path,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    this_machine: dict[str, Any],
    change: Change,
) -> None:
    change(monkeypatch, this_machine)
    with pytest.raises(CompatibilityError):
        llama_runtime.load(folder, format="aoti").entry("decode")
    assert opened == []


def test_no_native_takes_the_next_format_or_refuses(folder: Path, opened: Opened) -> None:
    with pytest.raises(CompatibilityError, match="native code, which --no-native refuses"):
        llama_runtime.load(folder, format="aoti", allow_native=False).entry("decode")
    assert opened == []
    llama_runtime.load(folder, allow_native=False).entry("decode")
    assert opened == ["decode.pt2"]


def test_nothing_fits(folder: Path, opened: Opened, this_machine: dict[str, Any]) -> None:
    this_machine |= {"torch": "2.12.0", "onnxruntime": None}
    with pytest.raises(CompatibilityError, match=r"made with torch 2\.13, this is 2\.12\.0"):
        llama_runtime.load(folder).entry("decode")
    assert opened == []


def test_a_format_that_is_not_there(folder: Path, opened: Opened) -> None:
    with pytest.raises(LlamaExportError, match="the bundle has no entry `prefill`") as caught:
        llama_runtime.load(folder).entry("prefill")
    assert caught.value.hint == "it has decode"
    assert opened == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "expected cpu, cuda or cuda:N, got `gpu`"),
        ("", "expected cpu, cuda or cuda:N, got ``"),
        ("meta", "expected cpu, cuda or cuda:N, got `meta`"),
        ("cuda:-1", "expected cpu, cuda or cuda:N, got `cuda:-1`"),
        (0, "expected cpu, cuda or cuda:N, got `0`"),
        (None, "expected cpu, cuda or cuda:N, got `None`"),
    ],
)
def test_a_device_of_no_such_name(folder: Path, name: Any, message: str) -> None:
    with pytest.raises(LlamaExportError) as caught:
        llama_runtime.load(folder, device=name)
    assert caught.value.message == message
    assert caught.value.hint == "where none is named, programs run on the CPU"


def test_a_device_that_is_not_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CompatibilityError, match="no CUDA device is here"):
        llama_runtime.load(folder, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(CompatibilityError, match="no device `cuda:1`: this machine has 1"):
        llama_runtime.load(folder, device="cuda:1")


def test_this_machine_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine.architecture()
    assert machine.version("no-such-package") is None
    assert machine.version("torch") == torch.__version__
    assert machine.minor("2.13.0+cpu") == "2.13"
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor: 0\nflags\t\t: fpu avx2\n\nflags: other\n")
    for path, flags in ((cpuinfo, {"fpu", "avx2"}), (tmp_path / "none", set())):
        machine.cpu_flags.cache_clear()
        monkeypatch.setattr(machine, "_CPUINFO", path)
        assert machine.cpu_flags() == flags
    machine.cpu_flags.cache_clear()
