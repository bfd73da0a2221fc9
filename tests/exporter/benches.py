"""Processes of `bench` that are none."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_export.bench import figures, rounds
from llama_export.bench.methods import Setup
from llama_export.bench.setting import make_setting
from llama_export.page.timings import Timings
from llama_export.report import Reporter
from tests.cli.synthetic import write_bundle


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
