from __future__ import annotations

import json
from pathlib import Path

from tests.bundles import write_sample
from tests.cli.running import invoke


def test_nothing_differs(tmp_path: Path) -> None:
    first, second = write_sample(tmp_path / "a"), write_sample(tmp_path / "b")
    result = invoke("diff", first, second)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "no difference\n", "")
    found = json.loads(invoke("diff", first, second, "--json").stdout)
    assert found == {"first": str(first), "second": str(second), "same": True, "changes": []}


def test_what_differs_is_a_table_and_status_1(tmp_path: Path) -> None:
    first = write_sample(tmp_path / "a")
    second = write_sample(tmp_path / "b", batch=2, name="n" * 100)
    result = invoke("diff", first, second)
    assert result.exit_code == 1
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["AREA", "WHAT", "IN", "A", "IN", "B"]
    assert lines[1].split() == ["config", "batch", "1", "2"]
    assert lines[2].split() == ["config", "name", "tiny", "n" * 57 + "..."]
    result = invoke("diff", first, second, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["same"] is False
    assert found["changes"][0] == {"area": "config", "name": "batch", "before": "1", "after": "2"}


def test_what_is_no_bundle_is_an_error(tmp_path: Path) -> None:
    result = invoke("diff", write_sample(tmp_path / "a"), tmp_path / "b")
    assert result.exit_code == 1
    assert "error: " in result.stderr
    assert not result.stdout
