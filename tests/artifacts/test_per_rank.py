"""What a rank binds and sends, from hand-made manifests; the numbers are worked out here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from llama_artifacts import summary
from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import Cut, Program, Target
from llama_artifacts.per_rank import Collective, collectives, rank_weights, stored_name
from llama_artifacts.signature import Dim, Signature, StateSpec, TensorSpec
from tests.cli.synthetic import DECODE, DECODE_PAGED, FILES, MODEL, PROGRAMS, VOCAB, write_bundle

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUERY, OUTPUT, NORM = "q_proj.weight", "o_proj.weight", "model.norm.weight"
SIZES = {EMBEDDING: 1000, QUERY: 600, OUTPUT: 400, NORM: 10}
CUTS = {
    HEAD: Cut(EMBEDDING, "rows"),
    QUERY: Cut(QUERY, "rows"),
    OUTPUT: Cut(OUTPUT, "columns"),
}
HALVES = tuple(replace(state, shape=(1, 1, *state.shape[2:])) for state in DECODE.states)
SHARDED = replace(
    PROGRAMS[1],
    signature=replace(DECODE, states=HALVES),
    constants=(EMBEDDING, HEAD, QUERY, OUTPUT, NORM),
    shards=2,
)
H = MODEL.hidden_size


def bundle(folder: Path, **changes: Any) -> Path:
    """Programs of one and of two shards, and weights whose header can be read."""
    weights = {name: torch.zeros(size, dtype=torch.uint8) for name, size in SIZES.items()}
    files = {**FILES, "weights.safetensors": save(weights)}
    settings: dict[str, Any] = {"programs": (*PROGRAMS, SHARDED), "cuts": CUTS, **changes}
    return write_bundle(folder, files=files, **settings)


def rows(folder: Path, title: str) -> list[dict[str, str]]:
    found = (table for table in summary.tables(open_bundle(folder)) if table.title == title)
    return [dict(zip(t.columns, row, strict=True)) for t in found for row in t.rows]


# --- weights --------------------------------------------------------------------------------------


def test_a_rank_binds_its_parts_and_what_is_whole(tmp_path: Path) -> None:
    manifest = open_bundle(bundle(tmp_path / "b")).manifest
    found = rank_weights(manifest, SIZES, 2)
    # The head's rows lie in the embedding, which is bound whole.
    assert found.bound == 1000 + 600 // 2 + 400 // 2 + 10
    assert found.copied == 400 // 2
    assert found.embedding == 1000


def test_rows_of_a_tensor_that_nobody_binds_whole_are_a_part(tmp_path: Path) -> None:
    program = replace(SHARDED, constants=(HEAD, NORM))
    manifest = open_bundle(bundle(tmp_path / "b", programs=(*PROGRAMS, program))).manifest
    found = rank_weights(manifest, SIZES, 2)
    assert (found.bound, found.copied, found.embedding) == (1000 // 2 + 10, 0, 0)


def test_a_constant_is_a_tensor_or_a_part_of_one(tmp_path: Path) -> None:
    manifest = open_bundle(bundle(tmp_path / "b")).manifest
    assert stored_name(manifest, SHARDED, HEAD) == EMBEDDING
    assert stored_name(manifest, SHARDED, NORM) == NORM
    assert stored_name(manifest, PROGRAMS[0], HEAD) == HEAD


# --- collectives ----------------------------------------------------------------------------------


def program(inputs: dict[str, tuple[Any, ...]], output: TensorSpec, shards: int = 4) -> Program:
    specs = tuple(TensorSpec(name, "i32", shape) for name, shape in inputs.items())
    names = {size for shape in inputs.values() for size in shape if isinstance(size, str)}
    dims = tuple(Dim(name, 1, 8) for name in sorted(names))
    signature = Signature(specs, (), (output,), dims)
    return Program(
        "forward", "pt2", "decode.pt2", "bf16", Target("cpu"), signature, (), {}, shards=shards
    )


def logits(*shape: int | str) -> TensorSpec:
    return TensorSpec("logits", "bf16", (*shape, VOCAB))


# Of each: the stream, and what the last layer goes on with.
STREAM_OF = {
    "forward": (program({"tokens": ("B", "S")}, logits("B", "S")), ("B", "S"), ("B", "S")),
    "prefill": (program({"tokens": (3, "S")}, logits(3)), (3, "S"), (3, 1)),
    "prefill_packed": (program({"tokens": ("P",)}, logits(3)), ("P",), (3,)),
    "step_packed": (program({"tokens": ("P",), "step_tokens": (3, 1)}, logits(6)), ("P+3",), (6,)),
    "step_paged": (
        program({"tokens": ("P",), "step_tokens": ("Rows", 1)}, logits("2*Rows")),
        ("P+Rows",),
        ("2*Rows",),
    ),
}


@pytest.mark.parametrize("name", STREAM_OF)
def test_two_sums_a_layer_and_the_logits_gathered(name: str, tmp_path: Path) -> None:
    manifest = open_bundle(bundle(tmp_path / "b")).manifest
    found, stream, asked = STREAM_OF[name]
    *sums, gathered = collectives(manifest, found)
    layers = [(stream, MODEL.num_layers - 1), (asked, 1)]
    if asked == stream:
        layers = [(stream, MODEL.num_layers)]
    assert sums == [Collective("all_reduce", 2 * n, "f32", (*of, H)) for of, n in layers]
    assert gathered == Collective("all_gather", 1, "bf16", found.signature.outputs[0].shape)


def test_a_loop_does_so_in_every_step(tmp_path: Path) -> None:
    manifest = open_bundle(bundle(tmp_path / "b")).manifest
    loop = program({"token": (3, 1), "pos": ()}, TensorSpec("tokens", "i32", (3, 12)))
    assert collectives(manifest, loop) == (
        Collective("all_reduce", 12 * 2 * MODEL.num_layers, "f32", (3, 1, H)),
        Collective("all_gather", 12, "bf16", (3, VOCAB)),
    )


def test_a_loss_gathers_no_logits(tmp_path: Path) -> None:
    manifest = open_bundle(bundle(tmp_path / "b")).manifest
    packed = {"tokens": ("P",), "targets": ("P",)}
    hidden, loss = (
        collectives(manifest, program(packed, output))
        for output in (TensorSpec("hidden", "bf16", ("P", H)), TensorSpec("loss", "f32", ()))
    )
    assert [one.kind for one in hidden] == ["all_reduce"]
    assert loss == (
        *hidden,
        Collective("all_reduce", 1, "f32", ("P",)),
        Collective("reduce_scatter", 1, "i64", (4,)),
        Collective("all_reduce", 1, "f32", (2, "P")),
    )


def test_one_shard_sends_nothing(tmp_path: Path) -> None:
    manifest = open_bundle(bundle(tmp_path / "b")).manifest
    assert collectives(manifest, PROGRAMS[1]) == ()


def test_bytes_count_every_exchange_with_open_sizes_as_one() -> None:
    assert Collective("all_reduce", 4, "bf16", ("P+Rows", 64)).num_bytes == 4 * 64 * 2
    assert Collective("all_gather", 1, "f32", (3, 128)).num_bytes == 3 * 128 * 4


# --- as it is shown -------------------------------------------------------------------------------


def test_inspect_shows_programs_states_weights_and_collectives_of_a_rank(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "b")
    assert [row["entry"] for row in rows(folder, "Programs")][-1] == "decode of 2 shards"
    assert [(row["entry"], row["shape"], row["size"]) for row in rows(folder, "States")][-2:] == [
        ("decode", "[1, 2, 64, 16]", "16.4 kB"),
        ("decode of 2 shards", "[1, 1, 64, 16]", "8.2 kB"),
    ]
    assert rows(folder, "Weights of one rank") == [
        {
            "shards": "2",
            "bound": "1.5 kB",
            "of them copied": "200 B",
            "of them embedding": "1.0 kB",
        }
    ]
    assert rows(folder, "Collectives of one call") == [
        {
            "entry": "decode of 2 shards",
            "kind": "all_reduce",
            "count": "4",
            "dtype": "f32",
            "shape": "[1, 1, 64]",
            "bytes of all": "1.0 kB",
        },
        {
            "entry": "decode of 2 shards",
            "kind": "all_gather",
            "count": "1",
            "dtype": "bf16",
            "shape": "[1, 128]",
            "bytes of all": "256 B",
        },
    ]


def test_calls_that_are_the_same_for_all_shards_are_shown_once(tmp_path: Path) -> None:
    found = [row["entry"] for row in rows(bundle(tmp_path / "b"), "Signatures") if row["entry"]]
    assert found == ["prefill", "decode"]


def test_open_sizes_are_factors_of_the_bytes(tmp_path: Path) -> None:
    pool = StateSpec("pool.0.key", "bf16", ("PoolPages", 1, 16, 16))
    paged = replace(SHARDED, entry="decode_paged", signature=replace(DECODE_PAGED, states=(pool,)))
    mixed = replace(STREAM_OF["step_paged"][0], entry="step_paged", shards=2)
    found = rows(bundle(tmp_path / "b", programs=(paged, mixed)), "Collectives of one call")
    assert [row["bytes of all"] for row in found] == [
        "1.0 kB * Rows",
        "256 B * Rows",
        "512 B * (P+Rows)",
        "512 B * 2*Rows",  # of the last layer
        "256 B * 2*Rows",
    ]


def test_weights_that_are_elsewhere_have_no_bytes(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "b", weights="none", weights_headers={})
    assert [row["bound"] for row in rows(folder, "Weights of one rank")] == ["not here"]
    assert summary.to_dict(open_bundle(folder))["ranks"] == [{"shards": 2, "weights": None}]


def test_a_bundle_without_shards_shows_none(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    assert not rows(folder, "Weights of one rank")
    assert not rows(folder, "Collectives of one call")
    assert summary.to_dict(open_bundle(folder))["ranks"] == []


def test_weights_whose_header_is_damaged_are_named(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b", programs=(SHARDED,), cuts=CUTS)
    with pytest.raises(IntegrityError, match=r"weights\.safetensors"):
        summary.tables(open_bundle(folder))


def test_the_dict_holds_the_same(tmp_path: Path) -> None:
    found = json.loads(json.dumps(summary.to_dict(open_bundle(bundle(tmp_path / "b")))))
    weights = {"bound": 1510, "copied": 200, "embedding": 1000}
    assert found["ranks"] == [{"shards": 2, "weights": weights}]
    assert [program["shards"] for program in found["programs"]] == [1, 1, 1, 2]
    assert found["signatures"][2]["collectives"][0] == {
        "kind": "all_reduce",
        "count": 4,
        "dtype": "f32",
        "shape": [1, 1, 64],
        "bytes": 1024,
    }
