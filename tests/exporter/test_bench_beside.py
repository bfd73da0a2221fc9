"""Other bundles in turn with the first one, and engines that tell less than it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import CompatibilityError
from llama_export.bench.setting import _check_beside
from tests.cli.synthetic import MODEL, write_bundle
from tests.exporter.benches import Fake, measured


def test_another_bundle_takes_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write_bundle(tmp_path / "long")
    timings, log = measured(tmp_path, [10] * 5, monkeypatch, beside=(other,))
    assert [row.method for row in timings.rows] == [
        "bundle, 2 threads",
        "bundle of long, 2 threads",
        "transformers, 2 threads",
    ]
    assert log[-4:] == ["machine closed", "transformers closed", "bundle closed", "bundle closed"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": dataclasses.replace(MODEL, num_layers=1)}, "expected the same model"),
        ({"batch": 2}, "expected the batch 1"),
        ({"max_seq": 32}, "expected room for 64 positions, got 32"),
    ],
)
def test_another_bundle_that_says_nothing_about_this_one(
    tmp_path: Path, changes: Any, message: str
) -> None:
    first = open_bundle(write_bundle(tmp_path / "b"))
    other = dataclasses.replace(first, manifest=dataclasses.replace(first.manifest, **changes))
    with pytest.raises(CompatibilityError, match=message):
        _check_beside(first.manifest, other, 64)


def test_an_engine_that_keeps_its_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Fake.call

    def call(self: Fake, do: str, **values: Any) -> dict[str, Any]:
        has_none = do == "logits" and self.name != "bundle"
        return {"logits": None} if has_none else real(self, do, **values)

    monkeypatch.setattr(Fake, "call", call)
    timings, _ = measured(tmp_path, [10] * 5, monkeypatch)
    assert timings.rows[1].max_logit_difference is None
