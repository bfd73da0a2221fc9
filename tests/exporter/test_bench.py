from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import (
    BuildError,
    CompatibilityError,
    InputError,
    LlamaExportError,
    VerificationError,
)
from llama_artifacts.manifest import Manifest, Program
from llama_export.bench import figures, plot, remote, rounds, setting, worker
from llama_export.bench.methods import Setup
from llama_export.bench.peers import bundle as bundle_peer
from llama_export.bench.peers import transformers as transformers_peer
from llama_export.bench.record import record
from llama_export.bench.setting import make_setting
from llama_export.bench.tokens import agreement
from llama_export.page.timings import (
    FILE_NAME,
    Latency,
    Machine,
    Timing,
    Timings,
    Workload,
    read_timings,
)
from llama_export.report import Reporter
from tests.cli.synthetic import MODEL, PAGED, PROGRAMS, write_bundle

MACHINE = Machine("cpu", 2, 80e9, 900e9, 500e9)


def synthetic(folder: Path, **changes: Any) -> tuple[Manifest, Program]:
    manifest = open_bundle(write_bundle(folder, **changes)).manifest
    return manifest, next(p for p in manifest.programs if p.entry == "decode")


# Arithmetic


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([0.0, 10.0], 95, 9.5),
        ([5.0, 1.0, 2.0, 3.0, 4.0], 25, 2.0),
        (list(range(101)), 99, 99.0),
    ],
)
def test_percentiles(values: list[float], percent: float, expected: float) -> None:
    assert figures.percentile(values, percent) == pytest.approx(expected)


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        figures.percentile([], 50)


def test_spread_is_median_and_quartiles() -> None:
    assert figures.spread([5.0, 1.0, 2.0, 3.0, 4.0]) == figures.Spread(3.0, 2.0, 4.0)


def test_operations_of_a_prompt(tmp_path: Path) -> None:
    # A layer: q and o 2 x 64 x 64, k and v 2 x 64 x 32, three of 64 x 128: 36,864 weights.
    # Attention of 3 tokens: 1 + 2 + 3 pairs, 4 x 64 operations each.
    manifest, _ = synthetic(tmp_path / "b")
    assert figures.prompt_flops(manifest, 3) == 2 * (2 * 36_864 * 3 + 256 * 6) + 2 * 128 * 64


def test_bytes_of_states_in_use(tmp_path: Path) -> None:
    # Two layers, keys and values, 2 heads of 16 in bf16: 256 bytes a position.
    manifest, decode = synthetic(tmp_path / "b")
    assert figures.state_bytes(decode, manifest, 10.5) == 2688


@pytest.mark.parametrize(("is_tied", "num_bytes"), [(True, 128 * 64 * 4 + 8), (False, 64 * 4 + 8)])
def test_bytes_of_the_weights_of_a_step(tmp_path: Path, is_tied: bool, num_bytes: int) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "weights.safetensors"
    save_file({figures.EMBEDDING: torch.zeros(128, 64), "other": torch.zeros(2)}, path)
    model = dataclasses.replace(MODEL, tie_word_embeddings=is_tied)
    manifest, decode = synthetic(tmp_path / "b", model=model)
    decode = dataclasses.replace(decode, constants=(figures.EMBEDDING, "other"))
    assert figures.step_weight_bytes(manifest, decode, {path.name: path}) == num_bytes


def test_a_weight_that_is_in_no_file(tmp_path: Path) -> None:
    manifest, decode = synthetic(tmp_path / "b")
    decode = dataclasses.replace(decode, constants=("lost",))
    with pytest.raises(LlamaExportError, match="the weights lack `lost`"):
        figures.step_weight_bytes(manifest, decode, {})


def test_lengths_shrink_to_a_small_bundle(tmp_path: Path) -> None:
    made = make_setting(write_bundle(tmp_path / "b"), "decode", runs=1, threads=1)
    assert (made.prompt_len, made.new_tokens) == (32, 32)  # 63 positions, the last token needs none
    assert len(made.prompt()) == 32
    assert not set(made.prompt()) & {2, 7}
    assert made.prompt() == made.prompt()


def test_more_tokens_than_positions_are_refused(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    with pytest.raises(InputError, match=r"expected at most 63 positions, got 60 \+ 4"):
        make_setting(bundle, "decode", runs=1, threads=1, prompt_len=60, new_tokens=5)


def test_serving_needs_paged_entries(tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError, match="expected the entry `decode_paged`"):
        make_setting(write_bundle(tmp_path / "b"), "serve", runs=1, threads=1)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (32, 4, 16)),
        ({"requests": 5}, (5, 4, 5)),
        ({"requests": 9, "concurrency": 8, "alone": 0}, (9, 8, 0)),
    ],
)
def test_how_many_requests(
    tmp_path: Path, asked: dict[str, int], expected: tuple[int, int, int]
) -> None:
    bundle = write_bundle(tmp_path / "b", programs=(*PROGRAMS, PAGED))
    made = make_setting(bundle, "serve", runs=1, threads=1, **asked)  # type: ignore[arg-type]
    assert (made.requests, made.concurrency, made.alone) == expected
    other = make_setting(bundle, "decode", runs=1, threads=1)
    assert (other.requests, other.concurrency, other.alone) == (0, 1, 0)


def test_more_requests_in_flight_than_rows_are_refused(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b", programs=(*PROGRAMS, PAGED))
    with pytest.raises(InputError, match="expected at most 8 requests in flight, got 9"):
        make_setting(bundle, "serve", runs=1, threads=1, concurrency=9)


# Agreement


@pytest.mark.parametrize(
    ("actual", "margin", "is_good", "text"),
    [
        ([1, 2, 3], 9.0, True, "3 of 3"),
        ([1, 5, 6], 0.1, True, "1 of 3, then a tie (0.1)"),
        ([1, 5, 3], 0.3, False, "1 of 3, then another (0.3)"),
        ([1, 2], 0.0, False, "2 of 3, then another (inf)"),
        ([1, 2, 4], float("nan"), False, "2 of 3, then another (nan)"),
    ],
)
def test_agreement(actual: list[int], margin: float, is_good: bool, text: str) -> None:
    found = agreement([1, 2, 3], actual, 0.25, lambda count, token: margin)
    assert (found.is_good, str(found)) == (is_good, text)


# Rounds, with processes that are none


class Fake:
    """Says `tokens`, each run a second slower than the one before; the others are its `log`."""

    def __init__(self, name: str, tokens: Sequence[int], log: list[str]) -> None:
        self.name, self.tokens, self.log = name, tokens, log
        self.load_s = 2.0
        self.num_runs = 0

    def call(self, do: str, **values: Any) -> dict[str, Any]:
        if do == "generate":
            self.log.append(self.name)
            self.num_runs += 1
            tokens = list(self.tokens[: values["num_new"]])
            return {"tokens": tokens, "ttft_s": self.num_runs, "decode_s": 2.0}
        if do == "logits":
            logits = np.zeros(128, np.float32)
            logits[10], logits[11] = 1.0, 0.9 if self.name == "bundle" else 0.8
            return {"logits": base64.b64encode(logits.tobytes()).decode()}
        if do == "measure":
            return {"read_bytes_s": 80e9, "bf16_flop_s": 900e9, "f32_flop_s": 500e9}
        if do == "peak":
            return {"peak_memory_bytes": 1000}
        return {"label": self.name, "versions": {self.name: "1"}, "disk_bytes": 5}

    def mark_loaded(self) -> None:
        self.log.append(f"{self.name} loaded")

    def close(self) -> None:
        self.log.append(f"{self.name} closed")


def measured(
    tmp_path: Path,
    says: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
    name: Any = "decode",
    **options: Any,
) -> tuple[Timings, list[str]]:
    log: list[str] = []

    def start(kind: str, setup: Setup) -> Fake:
        return Fake(setup.method, [10] * 5 if setup.method == "bundle" else says, log)

    monkeypatch.setattr(figures, "step_weight_bytes", lambda *args: 1_000_000_000)
    made = make_setting(
        write_bundle(tmp_path / "b"),
        name,
        runs=2,
        threads=2,
        new_tokens=5 if name == "decode" else 1,
        peers=("transformers",),
        **options,
    )
    timings = rounds.measure(
        made,
        tmp_path,
        reporter=Reporter(),
        start=start,
        start_machine=lambda threads: Fake("machine", (), log),
    )
    return timings, log


def test_methods_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings, log = measured(tmp_path, [10] * 5, monkeypatch)
    warm = log.index("bundle", log.index("transformers loaded"))
    assert log[warm:] == [
        *["bundle", "transformers"] * 3,
        "machine closed",
        "transformers closed",
        "bundle closed",
    ]
    own, peer = timings.rows
    # The load and the warm-up were the first two runs; those that count took 3 and 4 seconds.
    assert (own.ttft_ms, own.ttft_ms_range) == (3500, (3250, 3750))
    assert (own.decode_tok_s, own.load_s) == (2, 2.0)
    assert own.roofline_share == pytest.approx((1e9 + 256 * 34.5) * 2 / 80e9)
    assert peer.notes == "tokens equal: 5 of 5"
    assert peer.max_logit_difference == pytest.approx(0.1)
    assert timings.machine is not None
    assert timings.machine.read_bytes_s == 80e9
    assert timings.versions == {"bundle": "1", "transformers": "1"}


def test_a_tie_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings, _ = measured(tmp_path, [10, 10, 11, 10, 10], monkeypatch)
    assert timings.rows[1].notes == "tokens equal: 2 of 5, then a tie (0.1)"


def test_a_peer_that_says_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(VerificationError, match=r"transformers: .* got 2 of 5, then another \(1\)"):
        measured(tmp_path, [10, 10, 12, 10, 10], monkeypatch)


def test_loads_are_starts_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings, log = measured(tmp_path, [10] * 5, monkeypatch, "load")
    assert log.count("bundle loaded") == log.count("bundle closed") == 3
    assert timings.rows[0].load_s_range == (2.0, 2.0)
    assert timings.rows[0].ttft_ms is None


# The worker


class Echo:
    label, versions, files = "echo", {"echo": "1"}, ()

    def generate(self, prompt: Sequence[int], num_new: int) -> Iterator[int]:
        yield from [*prompt][:num_new]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.float32)


def test_a_worker_answers_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "open_calls", lambda kind, values: worker._MethodCalls(Echo()))
    calls = [
        {"kind": "method", "setup": {}},
        {"do": "describe"},
        {"do": "generate", "prompt": [4, 5, 6], "num_new": 2},
        {"do": "logits", "tokens": [1, 2]},
        {"do": "peak"},
    ]
    replies: list[Any] = []
    worker.serve(iter(map(json.dumps, calls)), replies.append)
    assert replies[0] == {}
    assert replies[1]["disk_bytes"] == 0
    assert replies[2]["tokens"] == [4, 5]
    assert np.frombuffer(base64.b64decode(replies[3]["logits"]), np.float32).tolist() == [1, 2]
    assert replies[4]["peak_memory_bytes"] > 10_000_000


@pytest.mark.slow
def test_a_process_passes_known_failures_on(tmp_path: Path) -> None:
    setup = Setup("bundle", tmp_path / "none", tmp_path, 1, 8)
    with pytest.raises(LlamaExportError, match="none"):
        remote.start("method", setup)


def test_a_process_that_dies_is_told_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WORKER", "no_such_module_here")
    with pytest.raises(CompatibilityError, match=r"ended with status 1: .*no_such_module_here"):
        remote.start_machine(1)


@pytest.mark.slow
def test_the_bundle_in_a_process(tiny_bundle: Path, tmp_path: Path) -> None:
    setup = Setup("bundle", tiny_bundle, tmp_path, 1, 8, format="pt2")
    process = remote.start("method", setup)
    try:
        run = remote.generate(process, (5, 6, 7), 2)
        assert len(run.tokens) == 2
        assert int(remote.logits(process, (5, 6, 7)).argmax()) == run.tokens[0]
        assert process.call("describe")["label"] == "pt2"
    finally:
        process.close()


@pytest.mark.slow
def test_transformers_says_what_the_bundle_says(tiny_bundle: Path, tmp_path: Path) -> None:
    setup = Setup("transformers", tiny_bundle, tmp_path, 1, 16)
    own = bundle_peer.open(dataclasses.replace(setup, method="bundle", format="pt2"))
    peer = transformers_peer.open(setup)
    assert [*peer.generate((5, 6, 7), 8)] == [*own.generate((5, 6, 7), 8)]
    torch.testing.assert_close(peer.logits((5, 6)), own.logits((5, 6)), rtol=0, atol=1e-4)


def test_a_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transformers_peer, "version", lambda name: None)
    with pytest.raises(CompatibilityError, match="`transformers`, which is not installed") as got:
        transformers_peer.prepare(Setup("transformers", tmp_path, tmp_path, 1, 8))
    assert got.value.hint == "pip install transformers"


# What is kept and drawn

TIMINGS = Timings(
    rows=(
        Timing(
            "aoti, 2 threads",
            57.25,
            101.5,
            1.5,
            412_000_000,
            "",
            (56.0, 58.5),
            (99.0, 103.5),
            roofline_share=0.25,
        ),
        Timing("fake", latency=Latency((1.0, 2.0, 3.0), (0.5, 0.6, 0.7), 4, 9)),
    ),
    date="2026-03-01",
    versions={"torch": "2.13.0"},
    machine=MACHINE,
    workload=Workload("decode", 512, 128, 5, step_bytes=270_000_000, prompt_flops=270_000_000_000),
)


def test_recorded_timings_are_read_back(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    record(bundle, Timings(()))
    record(bundle, TIMINGS)
    assert read_timings(open_bundle(bundle)) == TIMINGS.rows
    assert json.loads((bundle / FILE_NAME).read_text())["machine"]["read_bytes_s"] == 80e9


def test_points_of_the_roofline() -> None:
    (point,) = plot.points(TIMINGS, step_flops=540_000_000, dtype="bf16")
    assert (point.intensity, point.flop_s) == (2.0, 0.25 * 2.0 * 80e9)
    assert point.label == "aoti, 2 threads: 25% of the limit"
    assert TIMINGS.workload is not None
    prefill = dataclasses.replace(TIMINGS.workload, name="prefill")
    timings = dataclasses.replace(TIMINGS, workload=prefill)
    for dtype, peak in (("bf16", 900e9), ("f32", 500e9)):
        (point,) = plot.points(timings, step_flops=1, dtype=dtype)
        assert (point.intensity, point.flop_s) == (1000.0, 0.25 * peak)


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_plot_is_a_picture(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"roof.{suffix}"
    plot.write_plot(TIMINGS, path, step_flops=540_000_000, dtype="bf16")
    assert path.read_bytes().startswith(magic)
    with pytest.raises(BuildError, match="cannot be written"):
        plot.write_plot(TIMINGS, tmp_path / "no" / path.name, step_flops=1, dtype="bf16")


def test_what_has_no_roofline_is_not_drawn(tmp_path: Path) -> None:
    timings = dataclasses.replace(TIMINGS, workload=Workload("load", 16, 1, 5))
    with pytest.raises(InputError, match="expected the workload decode or prefill"):
        plot.write_plot(timings, tmp_path / "a.png", step_flops=1, dtype="bf16")


def test_the_setting_has_prompts_of_random_lengths(tmp_path: Path) -> None:
    made = setting.make_setting(write_bundle(tmp_path / "b"), "decode", runs=1, threads=1)
    prompts = dataclasses.replace(made, prompt_len=16, requests=40).prompts()
    lengths = {len(prompt) for prompt in prompts}
    assert (min(lengths), max(lengths)) == (4, 16)
