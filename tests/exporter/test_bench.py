from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import BuildError, CompatibilityError, InputError, LlamaExportError
from llama_artifacts.manifest import Manifest, Program
from llama_export.bench import figures, plot, setting
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
