from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.soak import soak


@pytest.mark.slow
def test_rude_clients_leave_nothing_behind(tiny_packed_bundle: Path) -> None:
    report = soak(tiny_packed_bundle, num_requests=240, num_at_once=24)
    assert report.faults() == []
    assert sum(report.ends.values()) == 240
    assert {"200", "400", "404", "left"} <= set(report.ends)
    assert report.figures["generated_tokens_total"] > 1000
