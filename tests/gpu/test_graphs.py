"""The script of the device checks: on a GPU in full, and its logic on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import graphs
from tests.gpu.calls import ENTRIES

SCRIPT = Path(graphs.__file__)


def run_script(output: Path, *words: str) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])}
    command = [sys.executable, str(SCRIPT), "--output", str(output), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.gpu
@pytest.mark.slow
def test_graphs_give_what_the_eager_path_gives(tmp_path: Path) -> None:
    assert run_script(tmp_path / "figures.json")["not_equal"] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bf16 decode_paged", "fp8 exact decode_rows"])
def test_the_script_runs_anywhere_with_a_tiny_network(tmp_path: Path, case: str) -> None:
    words = ("--device", "cpu", "--tiny", "--layers", "1", "--case", case)
    found = run_script(tmp_path / "figures.json", *words)
    (figures,) = found["figures"]
    assert figures["case"] == f"{case} pt2"
    assert (figures["num_equal"], figures["num_steps"], figures["num_graphs"]) == (20, 20, 1)
    assert figures["are_states_equal"]


def test_every_entry_is_tried_in_both_kinds_of_weights() -> None:
    names = {str(case) for case in graphs.cases("cuda")}
    for entry in ENTRIES:
        assert {f"bf16 {entry} pt2", f"fp8 exact {entry} pt2"} <= names
    assert {"fp8 fast decode_paged pt2", "bf16 decode_paged aoti"} <= names


GOOD = graphs.Figures("c", 20, 20, True, 1, 0.0, 1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 0),
        ({"num_equal": 19}, 1),
        ({"are_states_equal": False}, 1),
        ({"largest_difference": float("nan")}, 1),
    ],
)
def test_a_difference_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: Mapping[str, Any],
    status: int,
) -> None:
    found = graphs.replace(GOOD, **changes)
    monkeypatch.setattr(graphs.Bench, "run", lambda *_: found)
    assert graphs.main(["--device", "cpu", "--tiny", "--case", "bf16 decode_paged"]) == status
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["not_equal"] == ["c"] * status


def test_what_time_did_not_allow_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--tiny", "--case", "fp8 exact decode_", "--seconds", "-1"]
    assert graphs.main(words) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["not_run"] == ["fp8 exact decode_rows pt2", "fp8 exact decode_paged pt2"]


def test_random_weights_are_those_of_the_network() -> None:
    found = graphs.network("llama-3.1-8b-instruct-fp8", None, is_tiny=True)
    weights = graphs.random_weights(found, torch.device("cpu"))
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        name: info.shape for name, info in found.tensors.items()
    }
    codes = weights["model.layers.0.mlp.up_proj.weight"]
    scale = weights["model.layers.0.mlp.up_proj.weight_scale"]
    assert codes.dtype == torch.float8_e4m3fn
    spread = float((codes.float() * scale.float()).std())
    assert 0.018 < spread < 0.022
