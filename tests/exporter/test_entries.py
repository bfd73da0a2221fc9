"""Declarations of entries: names, signatures for given sizes, and no torch to read them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from llama_artifacts.errors import BuildError
from llama_artifacts.signature import Bounds, Dim, StateSpec
from llama_export.checkpoint.config import config_from_hf
from llama_export.entries import registry
from llama_export.entries.registry import Sizes
from llama_export.model.llama import Llama
from tests.tiny import tiny_config

SIZES = Sizes(config_from_hf(tiny_config(), where="config.json"), batch=3, max_seq=64, dtype="bf16")
NAMES = [spec.name for spec in registry.entries()]


def test_the_entries_in_order() -> None:
    assert NAMES == [
        "forward",
        "next_token",
        "decode",
        "prefill",
        "decode_rows",
        "prefill_slots",
        "prefill_packed",
        "step_packed",
        "decode_paged",
        "prefill_paged",
        "step_paged",
        "generate<Steps>",
        "sample<Steps>",
        "generate_until<MaxNew>",
        "loss_packed",
        "log_probs_packed",
        "hidden_packed",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_each_entry_is_a_method_of_the_model_with_the_declared_inputs(name: str) -> None:
    spec = registry.find(name)
    code = getattr(Llama, spec.method).__code__
    arguments = code.co_varnames[1 : code.co_argcount]
    declared = [tensor.name for tensor in spec.inputs]
    assert list(arguments) == declared + (["states"] if spec.states else [])
    assert spec.summary
    assert "\n" not in spec.summary


@pytest.mark.parametrize(
    ("name", "near"), [("decod", "decode"), ("forwrd", "forward"), ("prefil", "prefill")]
)
def test_an_unknown_name_suggests_a_near_one(name: str, near: str) -> None:
    with pytest.raises(BuildError, match="unknown entry") as caught:
        registry.find(name)
    assert caught.value.hint == f"did you mean `{near}`?"


def test_a_name_like_none_lists_all() -> None:
    with pytest.raises(BuildError) as caught:
        registry.find("xyz")
    assert all(name in str(caught.value.hint) for name in NAMES)


@pytest.mark.parametrize("name", ["prefill", "decode", "decode_rows"])
def test_states_are_a_key_and_a_value_cache_per_layer_in_numeric_order(name: str) -> None:
    config = config_from_hf(tiny_config(num_hidden_layers=12), where="config.json")
    signature = registry.find(name).signature(Sizes(config, 3, 64, "bf16"))
    assert signature.states == tuple(
        StateSpec(f"cache.{layer}.{part}", "bf16", (3, 2, 64, 16))
        for layer in range(12)
        for part in ("key", "value")
    )


@pytest.mark.parametrize("name", ["forward", "next_token"])
def test_stateless_entries_have_no_state(name: str) -> None:
    assert registry.find(name).signature(SIZES).states == ()


def test_fixed_sizes_become_numbers_and_the_compute_dtype_is_that_of_the_build() -> None:
    signature = registry.find("prefill").signature(SIZES)
    tokens, pos = signature.inputs
    assert (tokens.dtype, tokens.shape, tokens.values) == ("i32", (3, "S"), Bounds(0, 127))
    assert (pos.dtype, pos.shape, pos.values) == ("i32", (), Bounds(0, 62, "S"))
    (logits,) = signature.outputs
    assert (logits.name, logits.dtype, logits.shape) == ("logits", "bf16", (3, 128))
    assert signature.dims == (Dim("S", 1, 63),)


def test_a_row_may_stand_at_scratch_but_a_step_of_all_rows_may_not() -> None:
    assert registry.find("decode").signature(SIZES).inputs[1].values == Bounds(0, 62)
    assert registry.find("decode_rows").signature(SIZES).inputs[1].values == Bounds(0, 63)


def test_a_chunk_is_bounded_by_the_state_and_by_the_entry() -> None:
    config = config_from_hf(tiny_config(max_position_embeddings=8192), where="config.json")
    spec = registry.find("prefill")
    assert spec.signature(Sizes(config, 1, 8192, "f32")).dims == (Dim("S", 1, 512),)
    assert spec.signature(Sizes(config, 1, 8, "f32")).dims == (Dim("S", 1, 7),)


def test_a_pool_has_a_dynamic_number_of_pages() -> None:
    signature = registry.find("decode_paged").signature(
        dataclasses.replace(SIZES, page_size=4, max_seq=62)
    )
    assert signature.states[0] == StateSpec("pool.0.key", "bf16", ("PoolPages", 2, 4, 16))
    assert signature.dim("Pages") == Dim("Pages", 1, 16)
    bounds = {spec.name: spec.values for spec in signature.inputs}
    assert bounds["positions"] is not None
    assert bounds["positions"].min == -1
    assert bounds["positions"].largest({"Pages": 3}) == 11
    assert bounds["table"] is not None
    assert bounds["table"].largest({"PoolPages": 9}) == 8


@pytest.mark.parametrize(
    ("names", "expanded"),
    [
        (["all"], NAMES),
        (["serving"], ["decode_paged", "prefill_paged", "step_paged"]),
        (["generation"], ["generate<Steps>", "sample<Steps>", "generate_until<MaxNew>"]),
        (["generate", "generate<Steps>", "generate<8>"], ["generate<Steps>", "generate<8>"]),
        (["training"], ["loss_packed", "log_probs_packed", "hidden_packed"]),
        (["decode", "serving", "decode_paged", "decode"],
         ["decode", "decode_paged", "prefill_paged", "step_paged"]),
    ],
)  # fmt: skip
def test_groups_stand_for_their_members(names: list[str], expanded: list[str]) -> None:
    assert [spec.name for spec in registry.expand(names)] == expanded


def test_a_name_may_fix_the_number_of_tokens() -> None:
    spec = registry.find("generate<8>").sized(SIZES)
    assert (spec.name, spec.method, spec.stem) == ("generate<8>", "generate", "generate-8")
    signature = spec.signature(SIZES)
    assert signature.outputs[0].shape == (3, 8)
    pos = signature.inputs[1].values
    assert pos == Bounds(0, 64 - 1 - 8)


@pytest.mark.parametrize(
    ("name", "changes", "sized"),
    [
        ("generate<Steps>", {}, "generate<32>"),
        ("sample", {"steps": 5}, "sample<5>"),
        ("sample<7>", {"steps": 5}, "sample<7>"),
        ("generate_until", {}, "generate_until<63>"),  # what fits into 64 positions
        ("generate_until", {"max_new": 9, "steps": 5}, "generate_until<9>"),
        ("decode", {"steps": 5}, "decode"),
    ],
)
def test_a_name_that_leaves_the_number_open_takes_the_builds(
    name: str, changes: dict[str, int], sized: str
) -> None:
    assert registry.find(name).sized(dataclasses.replace(SIZES, **changes)).name == sized


def test_more_tokens_than_positions_are_refused() -> None:
    assert registry.find("generate<63>").sized(SIZES).signature(SIZES)
    with pytest.raises(BuildError, match=r"Steps = 64 tokens do not fit into 63 positions"):
        registry.find("generate<64>").sized(SIZES)


@pytest.mark.parametrize("name", ["generate<0>", "generate<MaxNew>", "generate<>", "decode<4>"])
def test_a_name_that_fixes_nothing_sensible_is_unknown(name: str) -> None:
    with pytest.raises(BuildError, match="unknown entry"):
        registry.find(name)


def test_rows_and_pages_of_a_build_bound_the_paged_entries() -> None:
    sizes = dataclasses.replace(SIZES, max_rows=5, max_pages=7)
    signature = registry.find("step_paged").signature(sizes)
    assert signature.dim("Rows") == Dim("Rows", 1, 5)
    assert signature.dim("Pages") == Dim("Pages", 1, 7)
    assert signature.outputs[0].shape == ("2*Rows", 128)


def test_a_variant_has_numbers_where_dimensions_were() -> None:
    spec = registry.find("step_paged")
    signature = spec.signature(SIZES, {"Rows": 2, "PoolPages": 9})
    assert [dim.name for dim in signature.dims] == ["P", "Pages"]
    assert signature.outputs[0].shape == (4, 128)
    assert signature.states[0].shape == (9, 2, 16, 16)
    bounds = {tensor.name: tensor.values for tensor in signature.inputs}
    assert bounds["rows"] == Bounds(0, 1)
    assert bounds["table"] == Bounds(0, 8)
    assert bounds["slots"] == Bounds(0, 9 * 16 - 1)
    prefill = registry.find("prefill").signature(SIZES, {"S": 4})
    assert prefill.inputs[1].values == Bounds(0, 62 - 3)


def test_declarations_need_no_torch() -> None:
    code = (
        "import sys; from llama_export.entries import registry; registry.entries();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
