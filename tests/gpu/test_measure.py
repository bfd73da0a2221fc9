"""The script that measures a device, on the CPU with small sizes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="triton is not installed: it comes with PyPI's torch, or by `pip install triton`",
    ),
]
ROOT = Path(__file__).parents[2]


def test_every_part_is_measured_and_nothing_differs(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    words = ["--device", "cpu", "--tiny", "--layers", "1", "--output", str(output)]
    command = [sys.executable, str(ROOT / "tests/gpu/measure.py"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert found["not_run"] == []
    assert all(row["is_good"] for row in found["rows"])
    names = " ".join(row["what"] for row in found["rows"])
    for part in ("copy", "Product", "16 x kernel int4", "splits", "step: bf16", "transformers"):
        assert part in names
    assert "WRONG" not in done.stdout
