"""Every law fails on a program that breaks just that law.

The sabotaged programs are a bundle's own behind a wrapper, or a stand-in that computes with the eager
model after something in it was turned wrong.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_artifacts import manifest_file
from llama_artifacts.errors import InputError
from llama_export.laws import registry
from llama_export.laws.bench import Bench
from tests.exporter.sabotage import (
    BATCH,
    MAX_SEQ,
    STEPS,
    Inner,
    Outputs,
    SabotagedBench,
    forgetful,
    found,
    noisy,
    program_of,
    wrapping,
)

pytestmark = pytest.mark.slow  # they share a bundle of every entry


@pytest.fixture(scope="module")
def bench(laws_bundle: Path) -> Bench:
    return Bench(laws_bundle, manifest_file.read(laws_bundle))


@pytest.mark.parametrize("entry", ["forward", "decode", "step_paged", "loss_packed"])
def test_parity_finds_another_result(bench: Bench, entry: str) -> None:
    finding = found(bench, "parity", entry, noisy)
    assert not finding.passed
    assert re.match(r"max diff [0-9.]+ at \(", finding.detail)
    assert ", atol 0." in finding.detail


def test_parity_finds_what_is_no_number(bench: Bench) -> None:
    def broken(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        return [output * math.nan for output in run(states, inputs)]

    finding = found(bench, "parity", "decode", broken)
    assert math.isnan(finding.figure)
    assert not finding.passed


def test_parity_finds_another_token(bench: Bench) -> None:
    def other(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        outputs = run(states, inputs)
        outputs[0][-1, 2] = (outputs[0][-1, 2] + 1) % 128
        return outputs

    for entry in ("generate", "sample", "generate_until"):
        assert not found(bench, "parity", entry, other).passed


@pytest.mark.parametrize("change", ["count", "zeros"])
def test_parity_finds_a_text_that_ends_wrongly(bench: Bench, change: str) -> None:
    def late(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        tokens, count = run(states, inputs)
        if change == "zeros":
            tokens = torch.where(tokens == 0, 5, tokens)
        return [tokens, count + (1 if change == "count" else 0)]

    finding = found(bench, "parity", "generate_until", late)
    assert not finding.passed
    assert "counts" in finding.detail


def later_tokens_leak(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
    """As a mask that is one key too wide: the first positions know of the last token."""
    outputs = run(states, inputs)
    outputs[0][:, 0] += 1e-6 * inputs["tokens"][:, -1:]
    return outputs


def test_causal_finds_a_result_that_knows_what_comes(bench: Bench) -> None:
    finding = found(bench, "causal", "forward", later_tokens_leak)
    assert finding.figure > 0
    assert "after row 0, position 0" in finding.detail


def leak_into_states(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
    outputs = run(states, inputs)
    tokens = inputs["tokens"].flatten()
    last = tokens[-min(4, len(tokens))]  # padding aside
    states["cache.1.key" if "cache.1.key" in states else "pool.1.key"][:, 0, 2, 1] += 1e-5 * last
    return outputs


@pytest.mark.parametrize("entry", ["prefill_packed", "prefill_slots", "prefill"])
def test_causal_finds_a_state_that_knows_what_comes(bench: Bench, entry: str) -> None:
    finding = found(bench, "causal", entry, leak_into_states)
    assert finding.figure > 0
    assert "state 2 at row 0, head 0, position 2" in finding.detail


def test_gqa_finds_swapped_heads(laws_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that read heads in turn (head i of j * g + i) differ from the ungrouped network."""
    manifest, program = program_of(laws_bundle, "decode")
    bench = Bench(laws_bundle, manifest)
    for layer in bench.ungrouped.model.model.layers:
        attention: Any = layer.self_attn
        for linear in (attention.k_proj, attention.v_proj):
            heads = linear.weight.unflatten(0, (4, -1))
            linear.weight = torch.nn.Parameter(heads[[0, 2, 1, 3]].flatten(0, 1))
    assert not registry.find(["gqa"])[0].load()(bench, program).passed


def test_gqa_says_nothing_of_a_network_without_groups(laws_bundle: Path) -> None:
    manifest, program = program_of(laws_bundle, "decode")
    alone = dataclasses.replace(manifest.model, num_kv_heads=manifest.model.num_heads)
    bench = Bench(laws_bundle, dataclasses.replace(manifest, model=alone))
    assert registry.find(["gqa"])[0].load()(bench, program) is None


@pytest.mark.parametrize(
    ("entry", "name", "size"),
    [
        ("decode", "pos", MAX_SEQ - 1),
        ("generate", "pos", MAX_SEQ - STEPS),
        ("decode_rows", "positions", MAX_SEQ),
        ("prefill_packed", "positions", MAX_SEQ),
        ("decode_paged", "positions", 32),
        ("prefill_paged", "slots", 9 * 16),
        ("prefill_slots", "slots", BATCH),
        ("forward", "tokens", 128),
    ],
)
def test_room_finds_a_position_that_wraps(bench: Bench, entry: str, name: str, size: int) -> None:
    finding = found(bench, "room", entry, wrapping(name, size))
    assert finding.figure > 0
    assert f"{name} = " in finding.detail
    assert "is accepted" in finding.detail


def test_room_finds_a_refused_call_that_writes(bench: Bench) -> None:
    def write_first(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        states["cache.0.key"][0, 0, 7, 0] = 1
        return run(states, inputs)

    finding = found(bench, "room", "decode", write_first)
    assert "is refused, and states are written" in finding.detail


def test_room_finds_the_last_position_refused(bench: Bench) -> None:
    def timid(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        if int(inputs["positions"].max()) == MAX_SEQ - 2:
            raise InputError("too far")
        return run(states, inputs)

    assert "position 62 is refused" in found(bench, "room", "decode_rows", timid).detail


def test_room_finds_the_last_position_elsewhere(bench: Bench) -> None:
    def early(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        if int(inputs["pos"]) == MAX_SEQ - 2:
            inputs["pos"] = torch.tensor(3, dtype=torch.int32)
        return run(states, inputs)

    finding = found(bench, "room", "decode", early)
    assert "writes before position 62" in finding.detail


@pytest.mark.parametrize("fault", ["lacking", "misshapen", "unbound", "unknown", "count"])
def test_layout_finds_what_does_not_fit(laws_bundle: Path, fault: str) -> None:
    manifest, _ = program_of(laws_bundle, "decode")
    model, programs = manifest.model, manifest.programs
    if fault == "lacking":
        model = dataclasses.replace(model, num_layers=3)
    elif fault == "misshapen":
        model = dataclasses.replace(model, intermediate_size=model.intermediate_size + 1)
    elif fault == "count":
        model = dataclasses.replace(model, num_parameters=model.num_parameters + 1)
    else:
        names = ("model.norm.weight",)
        programs = tuple(
            dataclasses.replace(
                p,
                constants=(*p.constants, "model.other")
                if fault == "unknown"
                else tuple(name for name in p.constants if name not in names),
            )
            for p in programs
        )
    bench = Bench(laws_bundle, dataclasses.replace(manifest, model=model, programs=programs))
    finding = registry.find(["layout"])[0].load()(bench)
    assert finding.figure > 0
    words = {
        "lacking": "is missing",
        "misshapen": "has shape",
        "unbound": "no program binds",
        "unknown": "which the weights lack",
        "count": "parameters, expected",
    }
    assert words[fault] in finding.detail


@pytest.mark.parametrize("entry", ["prefill", "prefill_slots", "prefill_packed", "prefill_paged"])
def test_chain_finds_states_that_nobody_can_go_on_from(bench: Bench, entry: str) -> None:
    finding = found(bench, "chain", entry, forgetful)
    assert not finding.passed
    assert finding.detail.startswith("then decode")


@pytest.mark.parametrize("entry", ["prefill", "prefill_paged", "step_paged"])
def test_chunks_finds_a_chunk_that_forgets_what_was_before(bench: Bench, entry: str) -> None:
    assert not found(bench, "chunks", entry, forgetful).passed


def by_page(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
    """As a program to which the numbers of the pages mean something."""
    return [output + inputs["table"][0, 0] for output in run(states, inputs)]


@pytest.mark.parametrize("entry", ["decode_paged", "prefill_paged", "step_paged"])
def test_pages_finds_a_table_whose_order_matters(bench: Bench, entry: str) -> None:
    assert not found(bench, "pages", entry, by_page).passed


def test_pages_finds_a_table_whose_width_matters(bench: Bench) -> None:
    def wide(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        outputs = run(states, inputs)
        return [outputs[0] + (inputs["table"].shape[1] - 2)]

    assert not found(bench, "pages", "decode_paged", wide).passed


def test_pages_and_parity_find_a_table_that_is_not_read(bench: Bench) -> None:
    def sorted_table(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        return run(states, {**inputs, "table": inputs["table"].sort(1).values})

    assert not found(bench, "parity", "prefill_paged", sorted_table).passed


@pytest.mark.parametrize("entry", ["decode", "decode_rows", "forward", "prefill"])
@pytest.mark.parametrize(("source", "target"), [(0, 1), (BATCH - 1, 0)])
def test_rows_finds_one_row_in_another(bench: Bench, entry: str, source: int, target: int) -> None:
    def leak(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        outputs = run(states, inputs)
        outputs[0][target] += 1e-5 * inputs["tokens"][source].float().mean()
        return outputs

    finding = found(bench, "rows", entry, leak)
    assert finding.figure > 0
    assert f"after row {target}" in finding.detail


def test_rows_finds_one_text_in_another(bench: Bench) -> None:
    def leak(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        outputs = run(states, inputs)
        outputs[0][1, 3] = inputs["token"][0, 0]
        return outputs

    for entry in ("generate", "sample", "generate_until"):
        assert found(bench, "rows", entry, leak).figure > 0


def test_scratch_finds_padding_that_is_kept_over_a_live_token(bench: Bench) -> None:
    def two_calls(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        outputs = run(states, inputs)
        states["cache.0.key"][0, 1, 23, 0] = 7.0  # of row 0, when row 1 is the call's last
        return outputs

    # Position 4 of row 0 is a live slot, but one that the same call names: parity's to find.
    assert not found(bench, "parity", "prefill_packed", forgetful_padding).passed
    finding = found(bench, "scratch", "decode_rows", two_calls)
    assert "state 0 at row 0, head 1, position 23" in finding.detail


def forgetful_padding(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
    segments = inputs["segments"].clone()
    segments[-3:] = 0
    inputs["positions"][-3:] = 0
    return run(states, {**inputs, "segments": segments})


def test_scratch_finds_an_idle_row_that_writes(bench: Bench) -> None:
    def idle_at_zero(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        positions = inputs["positions"].clone()
        positions[positions == MAX_SEQ - 1] = 0
        return run(states, {**inputs, "positions": positions})

    finding = found(bench, "scratch", "decode_rows", idle_at_zero)
    assert finding.figure > 0
    assert "position 0" in finding.detail


def test_scratch_finds_a_page_that_no_table_names(bench: Bench) -> None:
    def stray(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        outputs = run(states, inputs)
        named = set(inputs["table"].flatten().tolist())
        page = next(page for page in range(1, 9) if page not in named)
        states["pool.0.key"][page, 0, 0, 0] = 1.0
        return outputs

    for entry in ("decode_paged", "prefill_paged", "step_paged"):
        assert found(bench, "scratch", entry, stray).figure > 0


def test_scratch_finds_a_text_that_writes_before_its_beginning(bench: Bench) -> None:
    def stray(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        outputs = run(states, inputs)
        states["cache.0.value"][:, :, 1] += 1
        return outputs

    for entry in ("generate", "sample", "generate_until"):
        finding = found(bench, "scratch", entry, stray)
        assert "position 1" in finding.detail


PACKED = (
    *("prefill_packed", "step_packed", "prefill_paged", "step_paged", "prefill_slots"),
    *("loss_packed", "log_probs_packed", "hidden_packed"),
)


@pytest.mark.parametrize("entry", PACKED)
def test_packed_finds_prompts_that_see_each_other(bench: Bench, entry: str) -> None:
    def crowded(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        outputs = run(states, inputs)
        outputs[0] += 1e-3 * inputs["tokens"].numel() * outputs[0].abs().max()
        return outputs

    assert not found(bench, "packed", entry, crowded).passed


def test_packed_finds_a_segment_mask_that_is_too_wide(bench: Bench) -> None:
    def one_segment(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        return run(states, {**inputs, "segments": torch.zeros_like(inputs["segments"])})

    for entry in ("prefill_packed", "log_probs_packed"):
        assert not found(bench, "packed", entry, one_segment).passed


@pytest.mark.parametrize("entry", ["generate", "generate_until"])
def test_steps_finds_another_token_and_other_states(bench: Bench, entry: str) -> None:
    def other_token(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        outputs = run(states, inputs)
        outputs[0][1, 1] = (outputs[0][1, 1] + 1) % 128
        return outputs

    assert not found(bench, "steps", entry, other_token).passed
    assert not found(bench, "steps", entry, forgetful).passed


def test_keys_finds_a_draw_from_elsewhere(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        key = torch.randint(2**32, (2,), generator=generator)
        return run(states, {**inputs, "key": key})

    def fixed(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        return run(states, {**inputs, "key": torch.tensor([7, 2**31 + 5])})

    def swapped(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        return run(states, {**inputs, "key": inputs["key"].flip(0)})

    assert "the same key twice" in found(bench, "keys", "sample", random).detail
    assert "keys without effect" in found(bench, "keys", "sample", fixed).detail
    assert "below the best" in found(bench, "keys", "sample", swapped).detail


def test_formats_finds_one_that_differs(tiny_bundle: Path) -> None:
    manifest = manifest_file.read(tiny_bundle)
    programs = [program for program in manifest.programs if program.entry == "decode"]
    bench, law = Bench(tiny_bundle, manifest), registry.find(["formats"])[0].load()
    assert law(bench, programs).passed
    assert law(bench, programs[:1]) is None
    finding = law(SabotagedBench(bench, "decode", noisy, ("onnx",)), programs)
    assert not finding.passed
    assert finding.detail.startswith("pt2 and onnx: max diff 0.")
