"""Graphs behind entries, on the CPU: `tests.recording` stands for the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import llama_runtime
from llama_artifacts.errors import CompatibilityError, InputError, IntegrityError
from llama_artifacts.manifest import Format
from llama_runtime import Entry, LoadedBundle, cuda_graphs
from llama_runtime.cuda_graphs import MAX_STATE_SETS, CudaGraphs
from llama_runtime.programs.base import Loading, Program, load_program
from tests.recording import StepRecorder
from tests.runtime.loading import LOGITS_ATOL, is_same, random_tokens, snapshot

PAGE, POOL = 16, 40
CPU = torch.device("cpu")
slow_pt2 = pytest.param("pt2", marks=pytest.mark.slow)
each_format = pytest.mark.parametrize("format", ["aoti", slow_pt2, "onnx"])
# A pt2 program takes seconds to load, and graphs treat it as they treat an aoti program.
quick_format = pytest.mark.parametrize("format", ["aoti", "onnx"])
Calls = list[tuple[str, dict[str, Any]]]


def graphed(
    folder: Path, format: Format = "aoti", *, is_required: bool = True
) -> tuple[LoadedBundle, StepRecorder]:
    """A bundle loaded as on a CUDA device with graphs."""
    bundle, recorder = llama_runtime.load(folder, format=format), StepRecorder()
    bundle._graphs = CudaGraphs(CPU, recorder, is_required=is_required)
    return bundle, recorder


def pages(num_rows: int, num_pages: int) -> torch.Tensor:
    """A table in which no two rows share a page, and page 0 is nobody's."""
    return torch.arange(1, num_rows * num_pages + 1, dtype=torch.int32).reshape(num_rows, num_pages)


def prompt_call(num_rows: int, num_tokens: int, num_pages: int) -> dict[str, Any]:
    """Prompts of equal length, one a row."""
    table = pages(num_rows, num_pages)
    places = torch.arange(num_tokens, dtype=torch.int32)
    slots = table[:, places // PAGE] * PAGE + places % PAGE
    rows = torch.arange(num_rows, dtype=torch.int32)
    return {
        "tokens": random_tokens(num_rows * num_tokens),
        "positions": places.repeat(num_rows),
        "rows": rows.repeat_interleave(num_tokens),
        "slots": slots.flatten().int(),
        "last": (rows + 1) * num_tokens - 1,
        "table": table,
    }


def step_call(num_rows: int, position: int, num_pages: int) -> dict[str, Any]:
    return {
        "tokens": random_tokens(num_rows, 1, seed=position),
        "positions": torch.full((num_rows,), position, dtype=torch.int32),
        "table": pages(num_rows, num_pages),
    }


def mixed_call(num_rows: int, position: int, num_pages: int) -> dict[str, Any]:
    """A step of every row but the first, which is idle, and a prompt of two tokens in the first."""
    step = step_call(num_rows, position, num_pages)
    step["positions"][0] = -1
    prompt = prompt_call(1, 2, num_pages)
    last = torch.ones(num_rows, dtype=torch.int32)
    prompt = {**prompt, "table": step["table"], "last": last}
    return {**prompt, "step_tokens": step["tokens"], "step_positions": step["positions"]}


def run_all(bundle: LoadedBundle, calls: Calls, states: Mapping[str, torch.Tensor]) -> list[Any]:
    return [bundle.entry(name).run(states, inputs)[0] for name, inputs in calls]


def seen(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """States without their scratch: page 0 of a pool."""
    return {name: tensor[1:] for name, tensor in tensors.items()}


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=LOGITS_ATOL, rtol=0)


PAGED: Calls = [
    ("prefill_paged", prompt_call(3, 5, 2)),
    *[("decode_paged", step_call(3, position, 2)) for position in range(5, 25)],
    ("step_paged", mixed_call(3, 25, 2)),
    ("decode_paged", step_call(3, 26, 2)),
]


@quick_format
def test_paged_steps_are_those_of_the_eager_path(tiny_packed_bundle: Path, format: Format) -> None:
    eager = llama_runtime.load(tiny_packed_bundle, format=format)
    captured, _ = graphed(tiny_packed_bundle, format)
    states = eager.entry("decode_paged").new_states(PoolPages=POOL)
    own = captured.entry("decode_paged").new_states(PoolPages=POOL)
    expected, actual = run_all(eager, PAGED, states), run_all(captured, PAGED, own)
    for (name, inputs), a, b in zip(PAGED, actual, expected, strict=True):
        assert a.shape == b.shape
        # Of the mixed call, the prompt has one row and the step has two.
        rows = [0, 4, 5] if name == "step_paged" else range(len(inputs["table"]))
        assert_same(a[list(rows)], b[list(rows)])
    for name, state in seen(own).items():
        assert_same(state, seen(states)[name])


def test_each_bucket_is_captured_once(tiny_packed_bundle: Path) -> None:
    captured, recorder = graphed(tiny_packed_bundle)
    states = captured.entry("decode_paged").new_states(PoolPages=POOL)
    run_all(captured, PAGED, states)
    pool = {"PoolPages": POOL}
    assert recorder.sizes() == [
        {"P": 16, "Rows": 4, "Pages": 2, **pool},
        {"Rows": 4, "Pages": 2, **pool},
        {"P": 2, "Rows": 4, "Pages": 2, **pool},
    ]
    assert [step.num_replays for step in recorder.steps] == [1, 21, 1]


def test_padding_goes_to_scratch_alone(tiny_packed_bundle: Path) -> None:
    captured, recorder = graphed(tiny_packed_bundle)
    entry = captured.entry("decode_paged")
    states = entry.new_states(PoolPages=POOL)
    for tensor in states.values():
        tensor.fill_(7.0)
    before = snapshot(states)
    entry.run(states, {**step_call(3, 4, 3), "table": pages(3, 3)})
    changed = {int(i) for k in before for i in (before[k] != states[k]).flatten(1).any(1).nonzero()}
    assert changed == {0, *pages(3, 3)[:, 0].tolist()}
    assert recorder.steps[0].sizes["Rows"] == 4


def test_a_result_outlives_the_next_replay(tiny_packed_bundle: Path) -> None:
    captured, _ = graphed(tiny_packed_bundle)
    entry = captured.entry("decode_paged")
    states = entry.new_states(PoolPages=POOL)
    first = entry.run(states, step_call(4, 0, 2))[0]
    kept = first.clone()
    entry.run(states, step_call(4, 1, 2))
    assert torch.equal(first, kept)


@quick_format
def test_rows_of_a_cache(tiny_packed_bundle: Path, format: Format) -> None:
    tokens, last = random_tokens(5), torch.tensor([2, 4, 0, 0], dtype=torch.int32)
    packed = {
        "tokens": tokens,
        "rows": [0, 0, 0, 2, 2],
        "positions": [0, 1, 2, 0, 1],
        "segments": [0, 0, 0, 1, 1],
        "last": last,
    }
    step = {"tokens": random_tokens(4, 1), "positions": [3, 255, 2, 255]}
    mixed = {**packed, "rows": [1, 1, 1, 3, 3], "step_tokens": step["tokens"]}
    calls: Calls = [
        ("prefill_packed", packed),
        ("decode_rows", step),
        ("step_packed", {**mixed, "step_positions": [4, 255, 3, 255]}),
        (
            "prefill_slots",
            {"tokens": random_tokens(3, 5), "slots": [1, 0, 3], "lengths": [5, 2, 3]},
        ),
        ("decode_rows", {"tokens": random_tokens(4, 1), "positions": [2, 5, 4, 3]}),
    ]
    eager = llama_runtime.load(tiny_packed_bundle, format=format)
    captured, _ = graphed(tiny_packed_bundle, format)
    states, own = (b.entry("decode_rows").new_states() for b in (eager, captured))
    read = ([0, 1], [0, 2], [0, 1, 4, 6], [0, 1, 2], [0, 1, 2, 3])
    results = zip(run_all(captured, calls, own), run_all(eager, calls, states), read, strict=True)
    for actual, expected, rows in results:
        assert actual.shape == expected.shape
        assert_same(actual[rows], expected[rows])


@each_format
def test_a_session_is_that_of_the_eager_path(
    tiny_bundle: Path, tiny_loaded: dict[str, LoadedBundle], format: Format
) -> None:
    prompt = [1, 5, 9, 33, 2, 17]
    eager = tiny_loaded[format].generate_tokens(prompt, max_new=20)
    captured, recorder = graphed(tiny_bundle, format)
    assert list(captured.generate_tokens(prompt, max_new=20)) == list(eager)
    if format != "onnx":  # there ONNX Runtime captures
        assert [step.num_replays for step in recorder.steps] == [19]


def test_states_elsewhere_are_captured_anew(tiny_bundle: Path) -> None:
    captured, recorder = graphed(tiny_bundle)
    sessions = [captured.session() for _ in range(MAX_STATE_SETS)]
    eager = llama_runtime.load(tiny_bundle, format="aoti").session()
    first = eager.decode(5)
    second = eager.decode(7)
    assert all(torch.equal(session.decode(5), first) for session in sessions)
    assert all(torch.equal(session.decode(7), second) for session in sessions)
    assert len(recorder.steps) == MAX_STATE_SETS
    another = captured.session()
    another.decode(5)  # takes the place of the first session's graph
    sessions[-1].decode(9)
    assert len(recorder.steps) == MAX_STATE_SETS + 1
    sessions[0].decode(9)
    assert len(recorder.steps) == MAX_STATE_SETS + 2


def test_states_of_a_pool_that_grew_are_captured_anew(tiny_packed_bundle: Path) -> None:
    captured, recorder = graphed(tiny_packed_bundle)
    entry = captured.entry("decode_paged")
    for num_pages in (POOL, 2 * POOL):
        entry.run(entry.new_states(PoolPages=num_pages), step_call(2, 0, 2))
    assert [sizes["PoolPages"] for sizes in recorder.sizes()] == [POOL, 2 * POOL]


def test_programs_share_states_but_not_graphs(tiny_packed_bundle: Path) -> None:
    captured, recorder = graphed(tiny_packed_bundle)
    entry = captured.entry("decode_paged")
    states = entry.new_states(PoolPages=POOL)
    for num_rows in (1, 2, 1):  # a variant has one row
        entry.run(states, step_call(num_rows, 0, 2))
    assert [step.num_replays for step in recorder.steps] == [2, 1]
    assert recorder.steps[0].program is not recorder.steps[1].program


def test_a_call_too_large_for_a_bucket_is_not_captured(tiny_packed_bundle: Path) -> None:
    eager = llama_runtime.load(tiny_packed_bundle, format="aoti")
    captured, recorder = graphed(tiny_packed_bundle)
    call = prompt_call(4, 129, 9)  # 516 tokens
    first, second = (
        bundle.entry("prefill_paged").run(
            bundle.entry("prefill_paged").new_states(PoolPages=POOL), call
        )
        for bundle in (eager, captured)
    )
    assert torch.equal(first[0], second[0])
    assert recorder.steps == []


@pytest.mark.parametrize("name", ["generate", "sample", "generate_until"])
def test_loops_are_not_captured(tiny_packed_bundle: Path, name: str) -> None:
    captured, recorder = graphed(tiny_packed_bundle)
    entry = captured.entry(name)
    inputs = {"token": [[1]] * 4, "pos": 0, "key": [0, 1], "temperature": 0.0, "eos": 2}
    taken = {spec.name: inputs[spec.name] for spec in entry.signature.inputs}
    entry.run(entry.new_states(), taken)
    assert recorder.steps == []


@pytest.mark.parametrize("name", ["forward", "next_token", "prefill"])
def test_what_padding_would_change_is_not_captured(tiny_bundle: Path, name: str) -> None:
    captured, recorder = graphed(tiny_bundle)
    entry = captured.entry(name)
    states = entry.new_states() if entry.signature.states else None
    extra = {"pos": 0} if name == "prefill" else {}
    entry.run(states, {"tokens": [[1, 2], [3, 4]], **extra})
    assert recorder.steps == []


def test_capture_goes_from_the_largest_bucket_to_the_smallest(tiny_packed_bundle: Path) -> None:
    captured, recorder = graphed(tiny_packed_bundle)
    entry = captured.entry("decode_paged")
    states = entry.new_states(PoolPages=POOL)
    for tensor in states.values():
        tensor.fill_(3.0)
    before = snapshot(states)
    assert entry.capture(states, Rows=3, Pages=4) == 9
    sizes = [step["Rows"] * step["Pages"] for step in recorder.sizes()]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (16, 1)
    assert is_same(seen(before), seen(states))
    entry.run(states, step_call(3, 0, 3))
    assert len(recorder.steps) == 9


def test_the_largest_bucket_is_what_the_program_allows(tiny_packed_bundle: Path) -> None:
    captured, recorder = graphed(tiny_packed_bundle)
    entry = captured.entry("prefill_slots")  # 255 tokens at most
    call = {"tokens": random_tokens(1, 200), "slots": [0], "lengths": [200]}
    entry.run(entry.new_states(), call)
    assert recorder.sizes() == [{"M": 1, "S": 255}]


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("decode_paged", {"Rows": 2}, "expected sizes of Rows, Pages"),
        ("decode_paged", {"Rows": 0, "Pages": 1}, "expected Rows from 1 to"),
        ("decode_paged", {"Rows": 2, "Pages": 1 << 20}, "expected Pages from 1 to"),
        ("generate", {}, "`generate<12>` has no padding"),
    ],
)
def test_sizes_that_cannot_be_captured(
    tiny_packed_bundle: Path, name: str, sizes: dict[str, int], message: str
) -> None:
    entry = graphed(tiny_packed_bundle)[0].entry(name)
    with pytest.raises(InputError, match=message):
        entry.capture(None, **sizes)


def test_capture_does_nothing_where_calls_run_eagerly(tiny_packed_bundle: Path) -> None:
    entry = llama_runtime.load(tiny_packed_bundle, format="aoti").entry("decode_paged")
    assert entry.capture(entry.new_states(PoolPages=POOL), Rows=2, Pages=2) == 0


class Refusing(StepRecorder):
    def record(self, *call: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


def refusing(folder: Path, *, is_required: bool) -> Entry:
    bundle = llama_runtime.load(folder, format="aoti")
    bundle._graphs = CudaGraphs(CPU, Refusing(), is_required=is_required)
    return bundle.entry("decode")


def test_a_program_that_cannot_be_captured_runs_eagerly(
    tiny_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = refusing(tiny_bundle, is_required=False)
    expected = llama_runtime.load(tiny_bundle, format="aoti").session()
    states = entry.new_states()
    with caplog.at_level(logging.WARNING, logger=cuda_graphs.__name__):
        for position, token in enumerate((3, 4)):
            logits = entry.run(states, {"tokens": [[token]] * 2, "pos": position})[0]
            assert torch.equal(logits, expected.decode(token))
    own = [r.getMessage() for r in caplog.records if r.name == cuda_graphs.__name__]
    reason = "operation not permitted when stream is capturing"
    assert own == [f"`decode` in aoti cannot be captured: {reason}; it runs without a CUDA graph"]


def test_required_graphs_that_cannot_be_had_are_refused(tiny_bundle: Path) -> None:
    entry = refusing(tiny_bundle, is_required=True)
    with pytest.raises(CompatibilityError, match="cannot be captured: operation not") as caught:
        entry.run(entry.new_states(), {"tokens": [[1], [1]], "pos": 0})
    assert caught.value.hint == "load with cuda_graphs=False (run --no-cuda-graphs)"


def only_eager(loading: Loading) -> Program:
    if loading.uses_graphs:
        raise IntegrityError("ONNX Runtime refuses it: nodes on the CPU", where=loading.path)
    return load_program(loading)


@pytest.mark.parametrize("is_required", [False, True])
def test_an_engine_that_refuses_graphs(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, is_required: bool
) -> None:
    monkeypatch.setattr(cuda_graphs, "load_program", only_eager)
    captured, _ = graphed(tiny_bundle, "onnx", is_required=is_required)
    if is_required:
        with pytest.raises(CompatibilityError, match="nodes on the CPU"):
            captured.entry("decode")
    else:
        assert captured.session().decode(3).shape == (2, 128)


def test_graphs_need_a_cuda_device(tiny_bundle: Path) -> None:
    with pytest.raises(InputError, match="expected a CUDA device, got cpu"):
        llama_runtime.load(tiny_bundle, cuda_graphs=True)
    with pytest.raises(InputError, match="expected True, False or None, got 'on'"):
        llama_runtime.load(tiny_bundle, cuda_graphs="on")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_wanted", [None, True, False])
def test_graphs_are_the_default_of_a_cuda_device(is_wanted: bool | None) -> None:
    graphs = cuda_graphs.graphs_for(torch.device("cuda", 0), is_wanted)
    assert (graphs is None) == (is_wanted is False)
    assert graphs is None or graphs.is_required == bool(is_wanted)
