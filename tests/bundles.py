"""Small bundles in the right format, whose programs are dummies that nothing can run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_artifacts import digests
from llama_artifacts.manifest import (
    FILE_NAME,
    Check,
    File,
    Format,
    Manifest,
    Model,
    Program,
    Source,
    Target,
)
from llama_artifacts.manifest_file import to_json
from llama_artifacts.signature import Bounds, Dim, Signature, StateSpec, TensorSpec

VOCAB_SIZE, HIDDEN_SIZE, MAX_SEQ = 8, 4, 16
CONSTANTS = ("model.embed_tokens.weight", "model.norm.weight")
MODEL = Model(
    vocab_size=VOCAB_SIZE,
    hidden_size=HIDDEN_SIZE,
    intermediate_size=6,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    rms_norm_eps=1e-05,
    rope="default, base 10000",
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    num_parameters=HIDDEN_SIZE * (VOCAB_SIZE + 1),
)


def _weights() -> bytes:
    middle, end = 4 * VOCAB_SIZE * HIDDEN_SIZE, 4 * HIDDEN_SIZE * (VOCAB_SIZE + 1)
    shapes = ([VOCAB_SIZE, HIDDEN_SIZE], [HIDDEN_SIZE])
    offsets = ([0, middle], [middle, end])
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": place}
        for name, shape, place in zip(CONSTANTS, shapes, offsets, strict=True)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)
    return len(text).to_bytes(8, "little") + text + bytes(end)


def _header(weights: bytes) -> bytes:
    return weights[: 8 + int.from_bytes(weights[:8], "little")]


CONTENTS: dict[str, bytes] = {
    "chat_template.jinja": b"{{ messages[0].content }}",
    "decode.onnx": b"an ONNX model",
    "decode.pt2": b"an exported program",
    "prefill.pt2": b"another exported program",
    "tokenizer.json": b"{}",
    "weights.safetensors": _weights(),
}


def sample_signature(*, is_prefill: bool) -> Signature:
    """One row's `prefill` or `decode` over a key and a value cache."""
    cache = (1, MODEL.num_kv_heads, MAX_SEQ, MODEL.head_dim)
    length = "S" if is_prefill else 1
    return Signature(
        inputs=(
            TensorSpec("tokens", "i32", (1, length), Bounds(0, VOCAB_SIZE - 1)),
            TensorSpec("pos", "i32", (), Bounds(0, MAX_SEQ - 2, "S" if is_prefill else None)),
        ),
        states=(StateSpec("cache.0.key", "f32", cache), StateSpec("cache.0.value", "f32", cache)),
        outputs=(TensorSpec("logits", "f32", (1, VOCAB_SIZE)),),
        dims=(Dim("S", 1, MAX_SEQ - 1),) if is_prefill else (),
    )


def sample_program(entry: str, format: Format, file: str) -> Program:
    """A program of the sample model for the CPU."""
    return Program(
        entry=entry,
        format=format,
        file=file,
        dtype="f32",
        target=Target("cpu"),
        signature=sample_signature(is_prefill=entry == "prefill"),
        constants=CONSTANTS,
        requires={"onnxruntime": "1.22"} if format == "onnx" else {"torch": "2.13"},
    )


def describe(content: bytes) -> File:
    """The size and digest of some bytes."""
    return File(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def sample_manifest(**changes: Any) -> Manifest:
    """The manifest of a bundle that holds `CONTENTS`, with some fields changed."""
    manifest = Manifest(
        schema="1.0",
        name="tiny",
        source=Source("folder", "tiny"),
        model=MODEL,
        dtype="f32",
        max_seq=MAX_SEQ,
        batch=1,
        weights="copy",
        tokenizer="tokenizers",
        has_chat_template=True,
        stop_tokens=(2, 7),
        toolchain={"torch": "2.13.0", "llama-export": "0.1.0"},
        programs=(
            sample_program("prefill", "pt2", "prefill.pt2"),
            sample_program("decode", "pt2", "decode.pt2"),
            sample_program("decode", "onnx", "decode.onnx"),
        ),
        checks=(Check("parity", "decode", "pt2", 1.5e-05, 2e-04),),
        files={name: describe(content) for name, content in CONTENTS.items()},
        weights_headers={
            "weights.safetensors": hashlib.sha256(
                _header(CONTENTS["weights.safetensors"])
            ).hexdigest()
        },
    )
    return dataclasses.replace(manifest, **changes)


def write_large(folder: Path, num_bytes: int) -> Path:
    """Writes the sample with a further file, `large.bin`, of zeros that take no space."""
    write_sample(folder)
    with (folder / "large.bin").open("wb") as file:
        file.truncate(num_bytes)
    files = {**sample_manifest().files, "large.bin": digests.describe(folder / "large.bin")}
    (folder / FILE_NAME).write_bytes(to_json(sample_manifest(files=files)))
    return folder


def write_sample(folder: Path, *, contents: Mapping[str, bytes] = CONTENTS, **changes: Any) -> Path:
    """Writes a bundle of these files, with a manifest that lists them; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    files = {name: describe(content) for name, content in contents.items()}
    manifest = sample_manifest(**{"files": files, **changes})
    (folder / FILE_NAME).write_bytes(to_json(manifest))
    return folder
