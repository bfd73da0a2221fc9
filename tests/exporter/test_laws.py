"""Every law passes on a bundle of three formats, and fails on a program that breaks just that law.

The sabotaged programs are the bundle's own behind a wrapper, or a stand-in that computes with the
eager model after something in it was turned wrong.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_artifacts import manifest_file
from llama_artifacts.errors import InputError, VerificationError
from llama_artifacts.manifest import FORMATS, Manifest, Program
from llama_export.build import build
from llama_export.cache import ProgramCache
from llama_export.laws import registry
from llama_export.laws.bench import Bench
from llama_export.laws.draws import noise, threefry
from llama_export.laws.finding import Finding
from llama_export.recipe import Recipe
from llama_export.verify import CheckResult, record, verify
from llama_runtime.entry import Entry

pytestmark = pytest.mark.slow  # it builds bundles of its own

MAX_SEQ, BATCH, STEPS = 64, 3, 6

Outputs = list[torch.Tensor]
Inner = Callable[[Any, Mapping[str, Any]], Outputs]
Change = Callable[[Inner, Any, dict[str, Any]], Outputs]


class Sabotaged:
    """An entry whose every call goes through a change."""

    def __init__(self, entry: Entry, change: Change) -> None:
        self._entry = entry
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def run(self, states: Any, inputs: Mapping[str, Any]) -> Outputs:
        return self._change(self._entry.run, states, dict(inputs))


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every entry as pt2, made once."""
    output = tmp_path_factory.mktemp("laws") / "bundle"
    sizes = {"max_seq": MAX_SEQ, "batch": BATCH, "steps": STEPS, "max_new": STEPS}
    recipe = Recipe(str(tiny_checkpoint), output, ("all",), ("pt2",), **sizes)  # type: ignore[arg-type]
    return build(recipe, cache=ProgramCache()).folder


@pytest.fixture(scope="module")
def whole(bundle: Path) -> dict[tuple[str, str], CheckResult]:
    """What the laws find in it, by law and entry."""
    return {(result.law, result.entry): result for result in verify(bundle)}


def program_of(bundle: Path, entry: str) -> tuple[Manifest, Program]:
    manifest = manifest_file.read(bundle)
    return manifest, next(p for p in manifest.programs if registry.kind(p.entry) == entry)


class SabotagedBench(Bench):
    """A bench in which one entry goes through a change; programs and oracles are another's."""

    def __init__(
        self, bench: Bench, entry: str, change: Change, formats: tuple[str, ...] = FORMATS
    ) -> None:
        super().__init__(bench.folder, bench.manifest)
        self._bench, self._entry, self._change = bench, entry, change
        self._formats = formats
        self.oracle = bench.oracle  # type: ignore[misc]
        self.ungrouped = bench.ungrouped  # type: ignore[misc]

    def entry(self, program: Program) -> Any:
        entry = self._bench.entry(program)
        is_bad = program.entry == self._entry and program.format in self._formats
        return Sabotaged(entry, self._change) if is_bad else entry


@pytest.fixture(scope="module")
def bench(bundle: Path) -> Bench:
    return Bench(bundle, manifest_file.read(bundle))


def found(bench: Bench, law: str, entry: str, change: Change) -> Finding:
    """What the law finds in the entry when all calls of it go through the change."""
    _, program = program_of(bench.folder, entry)
    sabotaged = SabotagedBench(bench, program.entry, change)
    finding: Finding = registry.find([law])[0].load()(sabotaged, program)
    return finding


def test_every_law_is_kept_by_every_entry_it_applies_to(
    whole: dict[tuple[str, str], CheckResult],
) -> None:
    assert [result.place for result in whole.values() if not result.passed] == []
    entries = {entry for _, entry in whole} - {""}
    expected = {("integrity", ""), ("layout", "")}
    for law in registry.LAWS:
        if law.scope == "program":
            expected |= {(law.name, entry) for entry in entries if law.applies(entry)}
    assert set(whole) == expected  # one format: no `formats`
    assert {law for law, _ in whole} == {"integrity", *registry.NAMES} - {"formats"}


def test_every_law_is_kept_in_every_format(tiny_bundle: Path) -> None:
    results = verify(tiny_bundle)
    assert [result.place for result in results if not result.passed] == []
    formats = [result for result in results if result.law == "formats"]
    assert {result.entry for result in formats} == {
        *("forward", "next_token", "prefill", "decode", "decode_rows")
    }
    assert all(0 < result.figure < 1e-5 for result in formats)
    assert all("pt2 and " in result.detail for result in formats)


def test_every_law_is_kept_by_packs_pages_and_loops_in_every_format(
    tiny_packed_bundle: Path,
) -> None:
    results = verify(tiny_packed_bundle)
    assert [result.place for result in results if not result.passed] == []
    assert any(result.entry == "decode_paged:Rows=1" for result in results)


# --- one sabotage per law -------------------------------------------------------------------------


def noisy(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
    outputs = run(states, inputs)
    outputs[0].view(-1)[-1] += 0.01 * outputs[0].abs().max()
    return outputs


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


def test_gqa_finds_swapped_heads(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that read heads in turn (head i of j * g + i) differ from the ungrouped network."""
    manifest, program = program_of(bundle, "decode")
    bench = Bench(bundle, manifest)
    for layer in bench.ungrouped.model.model.layers:
        attention: Any = layer.self_attn
        for linear in (attention.k_proj, attention.v_proj):
            heads = linear.weight.unflatten(0, (4, -1))
            linear.weight = torch.nn.Parameter(heads[[0, 2, 1, 3]].flatten(0, 1))
    assert not registry.find(["gqa"])[0].load()(bench, program).passed


def test_gqa_says_nothing_of_a_network_without_groups(bundle: Path) -> None:
    manifest, program = program_of(bundle, "decode")
    alone = dataclasses.replace(manifest.model, num_kv_heads=manifest.model.num_heads)
    bench = Bench(bundle, dataclasses.replace(manifest, model=alone))
    assert registry.find(["gqa"])[0].load()(bench, program) is None


def wrapping(name: str, size: int) -> Change:
    """Positions are taken modulo a size, so that none is refused."""

    def change(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        return run(states, {**inputs, name: (inputs[name] % size).int()})

    return change


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
def test_layout_finds_what_does_not_fit(bundle: Path, fault: str) -> None:
    manifest, _ = program_of(bundle, "decode")
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
    bench = Bench(bundle, dataclasses.replace(manifest, model=model, programs=programs))
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


def forgetful(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
    """What it keeps is not what it computed with."""
    outputs = run(states, inputs)
    for name in states:
        if name.endswith("1.value"):
            tensor = states[name]
            tensor[tensor != 1e4] *= 1.5
    return outputs


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


# --- what the laws stand on -----------------------------------------------------------------------


def test_threefry_gives_the_words_of_its_paper() -> None:
    """Test vectors of the Random123 library, with the second counter word free."""
    first, second = threefry((0, 0), np.array([0], dtype=np.uint32))
    assert (int(first[0]), int(second[0])) == (0x6B200159, 0x99BA4EFE)


def test_noise_is_gumbel_and_depends_on_key_and_step() -> None:
    drawn = noise((1, 2), 0, 4, 20_000)
    assert abs(float(drawn.mean()) - 0.5772) < 0.02
    assert abs(float(drawn.var()) - math.pi**2 / 6) < 0.05
    assert not torch.equal(drawn, noise((1, 2), 1, 4, 20_000))
    assert not torch.equal(drawn, noise((1, 3), 0, 4, 20_000))


def test_laws_have_modules_and_one_line_each() -> None:
    for law in registry.LAWS:
        assert callable(law.load())
        assert "\n" not in law.summary
        assert law.entries or law.scope == "bundle"


# --- asking for laws ------------------------------------------------------------------------------


def test_a_law_that_applies_to_nothing_is_an_error(short_bundle: Path) -> None:
    with pytest.raises(VerificationError, match="`pages` applies to nothing"):
        verify(short_bundle, laws=("pages",))
    with pytest.raises(VerificationError, match="`formats` applies to nothing"):
        verify(short_bundle, laws=("formats", "parity"))
    with pytest.raises(VerificationError, match="`rows` applies to nothing"):
        verify(short_bundle, laws=("rows",))  # it has one row
    with pytest.raises(VerificationError, match=r"unknown law `casual`") as caught:
        verify(short_bundle, laws=("casual",))
    assert caught.value.hint == "did you mean `causal`?"


def test_a_short_bundle_of_one_row_keeps_the_laws_that_apply(short_bundle: Path) -> None:
    results = verify(short_bundle)
    assert all(result.passed for result in results)
    assert {result.law for result in results} == {
        *("integrity", "layout", "parity", "causal", "gqa", "room", "chain", "chunks", "scratch")
    }


def test_entries_and_laws_can_be_chosen(bundle: Path) -> None:
    results = verify(bundle, laws=("steps", "scratch"), entries=("generate", "decode"))
    places = [result.place for result in results]
    assert places == [
        "integrity",
        "decode/pt2 scratch",
        f"generate<{STEPS}>/pt2 scratch",
        f"generate<{STEPS}>/pt2 steps",
    ]
    with pytest.raises(VerificationError, match="no entry `encode`"):
        verify(bundle, entries=("encode",))


# --- the record -----------------------------------------------------------------------------------


def test_results_are_recorded_in_place_of_earlier_ones(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    before = manifest_file.read(copy)
    results = verify(copy, laws=("causal", "parity", "layout"), entries=("decode",))
    record(copy, results)
    after = manifest_file.read(copy)
    assert dataclasses.replace(after, checks=()) == dataclasses.replace(before, checks=())
    keys = [(check.law, check.entry, check.format) for check in after.checks]
    assert len(set(keys)) == len(keys)
    assert ("causal", "decode", "pt2") in keys
    assert ("layout", "", "") in keys
    assert ("scratch", "decode_rows", "pt2") in keys  # from the build
    assert verify(copy, laws=("layout",))[0].passed  # digests are as they were
    assert sorted(path.name for path in copy.iterdir()) == sorted(
        path.name for path in bundle.iterdir()
    )


def test_a_failure_records_nothing(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    before = (copy / "manifest.json").read_bytes()
    results = verify(copy, laws=("layout",))
    bad = dataclasses.replace(results[1], passed=False, figure=3.0, detail="3 faults")
    with pytest.raises(VerificationError, match="3 faults"):
        record(copy, [results[0], bad])
    assert (copy / "manifest.json").read_bytes() == before
