from __future__ import annotations

import json
from pathlib import Path

from tests.bundles import write_sample
from tests.cli.running import invoke
from tests.exporter.test_triton import LOSS_ONNX, SESSION, read_config


def test_the_models_are_listed(tmp_path: Path) -> None:
    bundle = write_sample(tmp_path / "b", programs=(LOSS_ONNX, *SESSION))
    result = invoke("triton", bundle, "-o", tmp_path / "models", "--max-sequences", 4)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()[1:3]]
    assert rows == [
        ["loss_packed", "onnxruntime", "cpu", "loss_packed"],
        ["rows", "python", "cpu", "prefill,", "decode", "4", "x", "256", "B"],
    ]
    batching = read_config(tmp_path / "models" / "rows").sequence_batching
    assert batching.oldest.max_candidate_sequences == 4


def test_json(tmp_path: Path) -> None:
    bundle = write_sample(tmp_path / "b", programs=SESSION)
    found = json.loads(invoke("triton", bundle, "-o", tmp_path / "m", "--json").stdout)
    assert found["models"] == [
        {
            "name": "rows",
            "backend": "python",
            "device": "cpu",
            "entries": ["prefill", "decode"],
            "state_bytes": 256,
        }
    ]
    assert found["linked_bytes"] + found["copied_bytes"] > 0


def test_a_device_that_the_bundle_is_not_for_is_wrong_usage(tmp_path: Path) -> None:
    bundle = write_sample(tmp_path / "b")
    result = invoke("triton", bundle, "-o", tmp_path / "models", "--device", "cuda")
    assert result.exit_code == 2
    assert "error: expected programs for cuda, got cpu\nhint: choose --device cpu" in result.stderr
    assert not (tmp_path / "models").exists()


def test_a_chosen_format_goes_into_the_configuration(tmp_path: Path) -> None:
    bundle = write_sample(tmp_path / "b", programs=SESSION)
    invoke("triton", bundle, "-o", tmp_path / "models", "--format", "pt2")
    parameters = read_config(tmp_path / "models" / "rows").parameters
    assert parameters["format"].string_value == "pt2"
