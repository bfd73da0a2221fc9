"""A bundle that reads well and holds nothing that could run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from llama_artifacts.bundle import staging
from llama_artifacts.digests import describe
from llama_artifacts.manifest import Check, Manifest, Model, Program, Source, Target
from llama_artifacts.signature import Bounds, Dim, Signature, StateSpec, TensorSpec

NUM_LAYERS, VOCAB, MAX_SEQ = 2, 128, 64
MODEL = Model(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_layers=NUM_LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope="default theta=10000",
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    num_parameters=123_456,
)
STATES = tuple(
    StateSpec(f"cache.{layer}.{part}", "bf16", (1, 2, MAX_SEQ, 16))
    for layer in range(NUM_LAYERS)
    for part in ("key", "value")
)
TOKEN = Bounds(0, VOCAB - 1)
LOGITS = TensorSpec("logits", "bf16", (1, VOCAB))
DECODE = Signature(
    inputs=(
        TensorSpec("tokens", "i32", (1, 1), TOKEN),
        TensorSpec("pos", "i32", (), Bounds(0, MAX_SEQ - 2)),
    ),
    states=STATES,
    outputs=(LOGITS,),
    dims=(),
)
PREFILL = Signature(
    inputs=(
        TensorSpec("tokens", "i32", (1, "S"), TOKEN),
        TensorSpec("pos", "i32", (), Bounds(0, MAX_SEQ - 2, "S")),
    ),
    states=STATES,
    outputs=(LOGITS,),
    dims=(Dim("S", 1, MAX_SEQ - 1),),
)
NATIVE = Target("cpu", "x86_64", "avx512", ("avx512f",))
PROGRAMS = (
    Program("prefill", "pt2", "prefill.pt2", "bf16", Target("cpu"), PREFILL, (), {}),
    Program("decode", "pt2", "decode.pt2", "bf16", Target("cpu"), DECODE, (), {}),
    Program("decode", "aoti", "decode.cpu-avx512.pt2", "bf16", NATIVE, DECODE, (), {}),
)
DECODE_PAGED = Signature(
    inputs=(
        TensorSpec("tokens", "i32", ("Rows", 1), TOKEN),
        TensorSpec("positions", "i32", ("Rows",), Bounds(-1, MAX_SEQ - 1)),
        TensorSpec("table", "i32", ("Rows", "Pages"), Bounds(0, 99, dim="PoolPages", offset=-1)),
    ),
    states=(StateSpec("pool.0.key", "bf16", ("PoolPages", 2, 16, 16)),),
    outputs=(TensorSpec("logits", "bf16", ("Rows", VOCAB)),),
    dims=(Dim("Rows", 1, 8), Dim("Pages", 1, 4), Dim("PoolPages", 1, 100)),
)
PAGED = Program("decode_paged", "pt2", "decode.pt2", "bf16", Target("cpu"), DECODE_PAGED, (), {})
"""Of a bundle that serves; in none that does not say so."""
FILES = {
    "weights.safetensors": b"w" * 2000,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"",
    "prefill.pt2": b"p" * 300,
    "decode.pt2": b"d" * 200,
    "decode.cpu-avx512.pt2": b"n" * 1_500_000,
}


def write_bundle(folder: Path, files: dict[str, bytes] = FILES, **changes: Any) -> Path:
    """Writes the bundle, with some fields of its manifest changed."""
    with staging(folder) as stage:
        for name, data in files.items():
            (stage / name).write_bytes(data)
        manifest = Manifest(
            schema="1.0",
            name="tiny",
            source=Source("gguf", "tiny.gguf"),
            model=MODEL,
            dtype="bf16",
            max_seq=MAX_SEQ,
            batch=1,
            weights="copy",
            tokenizer="tokenizers",
            has_chat_template=True,
            stop_tokens=(2, 7),
            toolchain={"torch": "2.13.0", "llama-export": "0.1.0"},
            programs=PROGRAMS,
            checks=(Check("parity", "decode", "pt2", 1.25e-6, 2e-4),),
            files={name: describe(stage / name) for name in files},
            weights_headers={"weights.safetensors": "0" * 64},
        )
        manifest = dataclasses.replace(manifest, **changes)
        (stage / manifests.FILE_NAME).write_bytes(manifest_file.to_json(manifest))
    return folder
