"""`llama-run` and the library give what the Python runtime gives."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import llama_runtime
from llama_artifacts import manifest_file
from llama_artifacts.manifest import Cut
from llama_runtime.sampling import Sampler, SamplingParams
from tests.cpp.building import configure, output_of
from tests.runtime.loading import copied

pytestmark = pytest.mark.slow

PROMPT = [1, 10, 7]


def _generated(bundle: Path, **settings: object) -> list[int]:
    loaded = llama_runtime.load(bundle, format="aoti")
    return list(loaded.generate_tokens(PROMPT, **settings))  # type: ignore[arg-type]


def _run(build_folder: Path, bundle: Path, *options: object) -> list[int]:
    tokens = " ".join(map(str, PROMPT))
    output = output_of(build_folder / "llama-run", bundle, "--tokens", tokens, *options)
    return list(map(int, output.split()))


def test_greedy_tokens_are_those_of_python(build_folder: Path, tiny_bundle: Path) -> None:
    assert _run(build_folder, tiny_bundle, "--max-new", 40) == _generated(tiny_bundle, max_new=40)


def test_sampled_tokens_are_those_of_python(build_folder: Path, tiny_bundle: Path) -> None:
    found = _run(build_folder, tiny_bundle, "--temperature", 0.9, "--seed", 7)
    assert found == _generated(tiny_bundle, temperature=0.9, seed=7)
    assert found != _run(build_folder, tiny_bundle, "--temperature", 0.9, "--seed", 8)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.7, seed=3),
        SamplingParams(1.3, top_k=40, seed=2**64 - 1),
        SamplingParams(1.0, top_p=0.8, seed=5),
        SamplingParams(2.5, top_k=50, top_p=0.9, min_p=0.02, seed=11),
        SamplingParams(9.0, top_p=0.999, seed=1),
        SamplingParams(),
    ],
)
def test_draws_are_those_of_python(
    params: SamplingParams, build_folder: Path, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 5000, generator=generator) * 4).bfloat16()
    save_file({"logits": logits}, tmp_path / "logits.safetensors")
    fields = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed or 0)
    output = output_of(build_folder / "tests" / "sample", tmp_path / "logits.safetensors", *fields)
    sampler = Sampler(params)
    assert list(map(int, output.split())) == [
        token for _ in range(10) for token in sampler.sample(logits)
    ]


@pytest.mark.parametrize("name", ["tiny_bundle", "tiny_packed_bundle"])
def test_every_native_program_passes_its_vectors(
    name: str, build_folder: Path, request: pytest.FixtureRequest
) -> None:
    bundle: Path = request.getfixturevalue(name)
    program = build_folder / "llama-run"
    lines = output_of(program, bundle, "--vectors", "--format", "aoti").splitlines()
    programs = llama_runtime.load(bundle).manifest.programs
    wanted = [["ok", p.entry, "aoti"] for p in programs if p.format == "aoti" and not p.variant]
    assert [line.split()[:3] for line in lines] == wanted


def test_wrong_vectors_are_told(build_folder: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    path = bundle / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-4096:] = bytes(4096)
    path.write_bytes(data)
    done = subprocess.run(
        [build_folder / "llama-run", bundle, "--vectors"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "FAIL" in done.stdout


def test_a_stop_token_ends_the_tokens(build_folder: Path, tiny_bundle: Path) -> None:
    tokens = _generated(tiny_bundle, max_new=12)
    stops = f"{tokens[7]} {tokens[5]}"
    expected = tokens[: min(tokens.index(tokens[7]), tokens.index(tokens[5]))]
    assert _run(build_folder, tiny_bundle, "--max-new", 12, "--stop-tokens", stops) == expected


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--tokens", "1 999"], "error: tokens: expected at most 127, got 999"),
        (["--tokens", "1", "--top-p", "2"], "error: top_p: expected a number from 0 to 1, got 2"),
        (
            ["--tokens", "1", "--no-native", "--format", "aoti"],
            ": native code, which --no-native refuses",
        ),
        (["--tokens", "1", "--device", "tpu"], "device: expected cpu, cuda or one such as cuda:1"),
        (["--tokens", "1", "--device", "cuda:9"], "error: cuda:9: there is no such device"),
        (["--tokens", " ".join(["1"] * 256)], "256 tokens do not fit: 0 + 256 positions are more"),
        (["-p", "hello"], "#model.unk_token: expected none; what this one declares"),
    ],
)
def test_failures_are_one_line_and_a_hint(
    options: list[str], line: str, build_folder: Path, tiny_bundle: Path
) -> None:
    text = output_of(build_folder / "llama-run", tiny_bundle, *options, status=1)
    assert line in text
    assert [part.split(":")[0] for part in text.splitlines()] == ["error", "hint"]


def test_programs_of_several_processes_are_refused_by_name(
    build_folder: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    """Nothing of them is opened: these are whole, and only declared to be parts."""
    programs = manifest_file.read(tiny_bundle).programs
    parts = tuple(dataclasses.replace(p, shards=2) for p in programs if p.format != "onnx")
    cuts = {"none": Cut("x", "rows")}
    bundle = copied(tiny_bundle, tmp_path / "b", programs=parts, cuts=cuts)
    text = output_of(build_folder / "llama-run", bundle, "--tokens", "1", status=1)
    assert ".pt2: needs 2 processes with torch.distributed, which this runtime lacks" in text
    assert "hint: run it with torchrun --standalone --nproc-per-node 2 -m llama_runtime" in text


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--tokens", "x"],
        ["--tokens", "1", "-p", "x"],
        ["--tokens", "1", "--stop", "x"],
        ["--tokens", "1", "--stop-tokens", "x"],
        ["-p", "x", "--stop", ""],
        ["--tokens", "1", "--format", "pt2"],
        ["--nonsense"],
    ],
)
def test_wrong_usage_is_status_2(options: list[str], build_folder: Path, tiny_bundle: Path) -> None:
    assert output_of(build_folder / "llama-run", tiny_bundle, *options, status=2)


def test_a_damaged_program_is_refused_and_leaves_nothing(
    build_folder: Path, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, temporary = tmp_path / "bundle", tmp_path / "temporary"
    shutil.copytree(tiny_bundle, bundle)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    program = next(bundle.glob("decode.cpu-*.pt2"))
    data = bytearray(program.read_bytes())
    data[100] ^= 1
    program.write_bytes(data)
    text = output_of(build_folder / "llama-run", bundle, "--tokens", "1", status=1)
    assert f"{program}: damaged: sha256" in text
    program.write_bytes(next(tiny_bundle.glob("decode.cpu-*.pt2")).read_bytes())
    assert output_of(build_folder / "llama-run", bundle, "--tokens", "1", "--max-new", 1)
    assert not list(temporary.iterdir())


def test_eight_threads_give_what_one_gives_and_stop(build_folder: Path, tiny_bundle: Path) -> None:
    output_of(build_folder / "tests" / "threads", tiny_bundle, "aoti")


def test_the_c_interface_from_c_and_from_ctypes(build_folder: Path, tiny_bundle: Path) -> None:
    expected = _generated(tiny_bundle, max_new=8)
    logits = llama_runtime.load(tiny_bundle, format="aoti").session().prefill(PROMPT)
    *tokens, last, _, position = output_of(build_folder / "tests" / "from_c", tiny_bundle).split()
    assert list(map(int, tokens)) == expected
    assert (int(last), int(position)) == (int(logits[0].argmax()), len(PROMPT))
    script = Path(__file__).with_name("use_ctypes.py")
    library = build_folder / "libllama_runtime.so"
    output = output_of(sys.executable, script, library, tiny_bundle)
    assert output.split()[: len(expected)] == list(map(str, expected))
    assert "expected a `manifest.json`, found no such folder" in output


def test_an_installed_copy_is_found_by_another_project(
    build_folder: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    prefix = tmp_path / "prefix"
    output_of("cmake", "--install", build_folder, "--prefix", prefix)
    example = Path(__file__).parents[2] / "runtime" / "cpp" / "examples" / "embed"
    configure(example, tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    output = output_of(tmp_path / "build" / "embed", tiny_bundle)
    assert list(map(int, output.split())) == _generated(tiny_bundle, max_new=16)
    assert ctypes.CDLL(str(next(prefix.rglob("libllama_runtime.so")))).llama_last_error
