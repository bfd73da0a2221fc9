"""Bundles that were damaged, moved, or made to do harm; and what a loaded one shares."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import llama_runtime
from llama_artifacts.errors import (
    CompatibilityError,
    InputError,
    IntegrityError,
    LlamaExportError,
    ManifestError,
)
from llama_artifacts.manifest import FILE_NAME, FORMATS, WEIGHTS_NAME, Format
from tests.runtime.loading import (
    TOKENS,
    copied,
    each_format,
    flip_bit,
    logits,
    program_file,
    reduced,
    refusal,
    rewrite_programs,
    sealed,
    sealed_header,
)


@each_format
def test_a_damaged_program_is_refused_before_it_is_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, format: Format
) -> None:
    path = program_file(folder, "next_token", format)
    flip_bit(path)

    def never(loading: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("llama_runtime.loader.load_program", never)
    assert "damaged: sha256" in refusal(folder, format)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match=r"damaged: .* bytes, expected"):
        llama_runtime.load(folder)
    path.unlink()
    with pytest.raises(IntegrityError, match="missing"):
        llama_runtime.load(folder)


@each_format
def test_swapped_programs(folder: Path, format: Format) -> None:
    first, second = (program_file(folder, name, format) for name in ("forward", "next_token"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(IntegrityError, match="damaged"):
        llama_runtime.load(folder, format=format).entry("forward")


@each_format
@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"\x08\x0a", b"{}" * 500])
def test_a_file_that_is_no_program(folder: Path, format: Format, content: bytes) -> None:
    path = program_file(folder, "next_token", format)
    path.write_bytes(content)
    sealed(folder, path.name)
    assert path.name in refusal(folder, format)


@each_format
def test_a_truncated_program_that_the_manifest_agrees_with(folder: Path, format: Format) -> None:
    path = program_file(folder, "next_token", format)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    sealed(folder, path.name)
    assert path.name in refusal(folder, format)


@pytest.mark.parametrize(
    ("format", "change"),
    [(format, change) for format in ("pt2", "aoti") for change in ("more", "fewer", "other")]
    + [("onnx", "more"), ("onnx", "other")],
)
def test_constants_that_are_not_the_program_s(folder: Path, format: Format, change: str) -> None:
    def change_constants(program: Any) -> Any:
        names = program.constants
        other = {
            "more": (*names, "model.layers.9.weight"),
            "fewer": names[1:],
            "other": ("no.such.weight", *names[1:]),
        }
        return dataclasses.replace(program, constants=other[change])

    rewrite_programs(folder, change_constants)
    assert "weight" in refusal(folder, format)


@each_format
def test_another_program_that_the_manifest_agrees_with(folder: Path, format: Format) -> None:
    """An ONNX model says how it is called; the others show it when they run."""
    path = program_file(folder, "next_token", format)
    shutil.copy(program_file(folder, "forward", format), path)
    sealed(folder, path.name)
    with pytest.raises(IntegrityError) as caught:
        logits(folder, format)
    words = "its inputs and outputs" if format == "onnx" else "its signature declares"
    assert words in str(caught.value)


def test_onnx_with_other_names_dtypes_and_shapes(folder: Path) -> None:
    def renamed(program: Any) -> Any:
        inputs = tuple(
            dataclasses.replace(s, name=f"my_{s.name}") for s in program.signature.inputs
        )
        signature = dataclasses.replace(program.signature, inputs=inputs)
        return dataclasses.replace(program, signature=signature)

    def retyped(program: Any) -> Any:
        outputs = tuple(dataclasses.replace(s, dtype="f16") for s in program.signature.outputs)
        signature = dataclasses.replace(program.signature, outputs=outputs)
        return dataclasses.replace(program, signature=signature)

    before = (folder / FILE_NAME).read_bytes()
    for change, words in ((renamed, "tokens"), (retyped, "their dtypes or shapes differ")):
        (folder / FILE_NAME).write_bytes(before)
        rewrite_programs(folder, change)
        assert f"are not the manifest's: {words}" in refusal(folder, "onnx")


def test_truncated_weights(folder: Path) -> None:
    path = folder / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(IntegrityError, match=r"weights\.safetensors: damaged: .* bytes, expected"):
        llama_runtime.load(folder)


def with_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the header of the weights and keeps the size of the file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= length
    path.write_bytes(content[:8] + text.ljust(length) + content[8 + length :])


@each_format
def test_weights_whose_header_is_hostile(folder: Path, format: Format) -> None:
    def overlap(header: dict[str, Any]) -> None:
        header["lm_head.weight"]["data_offsets"] = header["model.embed_tokens.weight"][
            "data_offsets"
        ]

    with_header(folder / WEIGHTS_NAME, overlap)
    message = refusal(folder, format)
    assert "overlaps" in message or "belong to no tensor" in message


def reshape(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["shape"] = [8, 8]


@each_format
def test_weights_of_another_shape(folder: Path, format: Format) -> None:
    with_header(folder / WEIGHTS_NAME, reshape)
    assert "its header is not the one that the programs were built for" in refusal(folder, format)


def test_weights_of_another_shape_do_not_reach_a_graph(folder: Path) -> None:
    with_header(folder / WEIGHTS_NAME, reshape)
    sealed_header(folder)
    message = refusal(folder, "pt2")
    assert (
        "expects `model.norm.weight` as [64] of torch.float32, the weights hold [8, 8]" in message
    )


@each_format
def test_weights_that_lack_a_tensor(folder: Path, format: Format) -> None:
    def rename(header: dict[str, Any]) -> None:
        header["odd"] = header.pop("model.norm.weight")

    with_header(folder / WEIGHTS_NAME, rename)
    sealed_header(folder)
    assert "the weights lack `model.norm.weight`" in refusal(folder, format)


def test_other_odd_choices(tiny_bundle: Path, tmp_path: Path) -> None:
    unknown: Any = "tflite"
    with pytest.raises(InputError, match="format: expected one of pt2, aoti, onnx, got `tflite`"):
        llama_runtime.load(tiny_bundle, format=unknown)
    threads: Any
    for threads in (0, -1, True, "2", 1.5):
        with pytest.raises(InputError, match="threads: expected at least 1"):
            llama_runtime.load(tiny_bundle, threads=threads)
    with pytest.raises(ManifestError, match="no such folder"):
        llama_runtime.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match="the bundle has no entry `prefil`") as caught:
        llama_runtime.load(tiny_bundle).entry("prefil")
    assert caught.value.hint == "it has forward, next_token, prefill, decode, decode_rows"
    folder = reduced(tiny_bundle, tmp_path / "b", lambda p: p.format == "onnx")
    with pytest.raises(CompatibilityError, match="`decode` is not there in format aoti") as other:
        llama_runtime.load(folder, format="aoti").entry("decode")
    assert other.value.hint == "it is there in onnx"


def test_a_bundle_without_weights(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = copied(tiny_bundle, tmp_path / "b", weights="none", weights_headers={})
    with pytest.raises(CompatibilityError, match="programs without weights"):
        llama_runtime.load(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_damaged_tokenizer(folder: Path, name: str) -> None:
    flip_bit(folder / name)
    bundle = llama_runtime.load(folder)
    with pytest.raises(IntegrityError, match=f"{name}: damaged"):
        _ = bundle.tokenizer


@each_format
def test_a_bundle_is_where_it_is_moved_to(
    folder: Path, tiny_bundle: Path, tmp_path: Path, format: Format
) -> None:
    expected = logits(tiny_bundle, format)
    target = tmp_path / "a folder" / "mit Umlaut ä, 漢字 & 'quotes'"
    target.parent.mkdir()
    folder.rename(target)
    for path in (*target.iterdir(), target):
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        assert torch.equal(logits(target, format), expected)
    finally:
        target.chmod(0o700)


@each_format
def test_a_linked_bundle(tiny_bundle: Path, tmp_path: Path, format: Format) -> None:
    (tmp_path / "link").symlink_to(tiny_bundle, target_is_directory=True)
    assert torch.equal(logits(tmp_path / "link", format), logits(tiny_bundle, format))


@each_format
def test_a_relative_path_outlives_the_working_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: Format
) -> None:
    monkeypatch.chdir(folder.parent)
    bundle = llama_runtime.load(folder.name, format=format)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    bundle.entry("next_token")(tokens=TOKENS)
    assert bundle.tokenizer.decode([70])


def test_a_bundle_that_goes_away_after_loading(folder: Path) -> None:
    bundle = llama_runtime.load(folder, format="onnx")
    bundle.entry("next_token")
    folder.rename(folder.with_name("gone"))
    bundle.entry("next_token")(tokens=TOKENS)
    with pytest.raises(IntegrityError, match="cannot be read: No such file"):
        bundle.entry("forward")


@each_format
def test_an_entry_is_loaded_once_by_eight_threads_at_once(
    tiny_bundle: Path, format: Format
) -> None:
    shared = llama_runtime.load(tiny_bundle, format=format)
    barrier = threading.Barrier(8)
    found: list[Any] = [None] * 8

    def load(index: int) -> None:
        barrier.wait()
        own = llama_runtime.load(tiny_bundle, format=format) if index >= 6 else shared
        entry = own.entry("next_token")
        found[index] = (entry, own.weights, entry(tokens=TOKENS) if index >= 5 else None)

    threads = [threading.Thread(target=load, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert None not in found
    assert all(entry is found[0][0] and weights is found[0][1] for entry, weights, _ in found[:6])
    assert torch.equal(found[5][2], found[6][2])
    assert torch.equal(found[5][2], found[7][2])


@pytest.mark.parametrize("formats", [("pt2", "pt2"), ("aoti", "aoti")], ids=lambda pair: pair[0])
def test_entries_read_the_same_memory(folder: Path, formats: tuple[Format, Format]) -> None:
    """What is written to the mapped weights shows in every entry, and never in the file."""
    content = (folder / WEIGHTS_NAME).read_bytes()
    bundle = llama_runtime.load(folder, format=formats[0])
    entries = [bundle.entry(name) for name in ("forward", "next_token")]
    pointers = {tensor.data_ptr() for tensor in bundle.weights.values()}
    bundle.weights["lm_head.weight"].zero_()
    for entry in entries:
        result = entry(tokens=TOKENS)
        assert isinstance(result, torch.Tensor)
        assert not result.any()
    assert {tensor.data_ptr() for tensor in bundle.weights.values()} == pointers
    assert (folder / WEIGHTS_NAME).read_bytes() == content


def test_a_graph_keeps_the_mapped_tensors(tiny_bundle: Path) -> None:
    bundle = llama_runtime.load(tiny_bundle, format="pt2")
    for name in ("forward", "next_token"):
        module: Any = bundle.entry(name)._program
        held = {tensor.data_ptr() for tensor in module._module.state_dict().values()}
        assert held == {tensor.data_ptr() for tensor in bundle.weights.values()}


IMPORTS = """
import sys
import llama_runtime
from llama_runtime import *
bundle = llama_runtime.load(sys.argv[1], format=sys.argv[2])
list(bundle.generate("Hello", max_new=2))
print(*sorted(set(name.partition(".")[0] for name in sys.modules)))
"""


@each_format
def test_a_process_that_runs_a_bundle_imports_no_exporter(
    tiny_bundle: Path, format: Format
) -> None:
    command = [sys.executable, "-W", "error", "-c", IMPORTS, str(tiny_bundle), format]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert not imported & {"llama_export", "transformers", "onnxscript"}
    assert ("onnxruntime" in imported) == (format == "onnx")
    assert done.stderr == ""


def test_native_code_is_run_where_no_compiler_is(tiny_bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", IMPORTS, str(tiny_bundle), "aoti"]
    places = {"PATH": str(tmp_path), "HOME": str(tmp_path), "CXX": "none", "CC": "none"}
    subprocess.run(command, capture_output=True, check=True, env={**os.environ, **places})


def test_the_preferred_order_covers_every_format() -> None:
    from llama_runtime.choice import _PREFERENCE

    assert sorted(_PREFERENCE) == sorted(FORMATS)
    assert issubclass(IntegrityError, LlamaExportError)
