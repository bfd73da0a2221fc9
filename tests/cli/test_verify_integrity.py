from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bundles import write_sample
from tests.cli.running import invoke, start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "b")


def test_an_intact_bundle(folder: Path) -> None:
    result = invoke("verify", folder, "--integrity")
    assert result.exit_code == 0
    assert result.stdout == "6 files, 483 B: all as listed, none extra\n"


def test_every_fault_is_in_the_table_and_the_first_is_the_error(folder: Path) -> None:
    (folder / "decode.pt2").unlink()
    (folder / "extra").write_bytes(b"")
    result = invoke("verify", folder, "--integrity")
    assert result.exit_code == 1
    lines = [line.split("  ") for line in result.stdout.splitlines()]
    assert [line[0] for line in lines] == ["FILE", "decode.pt2", "extra"]
    assert f"error: {folder}/decode.pt2: missing: no such file\n" in result.stderr
    assert "hint: 2 files are not as listed" in result.stderr


def test_json_is_one_object_in_either_case(folder: Path) -> None:
    found = json.loads(invoke("verify", folder, "--integrity", "--json").stdout)
    expected = {"bundle": str(folder), "passed": True, "files": 6, "bytes": 483, "faults": []}
    assert found == expected
    (folder / "decode.pt2").write_bytes(b"x")
    result = invoke("verify", folder, "--integrity", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["faults"] == [
        {"file": "decode.pt2", "kind": "changed", "detail": "1 bytes, expected 19"}
    ]
    assert found["error"]["kind"] == "IntegrityError"


@pytest.mark.parametrize("words", [["--law", "rows"], ["--vectors"], ["--format", "pt2"]])
def test_what_runs_programs_does_not_go_with_it(folder: Path, words: list[str]) -> None:
    result = invoke("verify", folder, "--integrity", *words)
    assert result.exit_code == 2
    assert "--integrity takes only --json" in result.stderr


def test_no_framework_is_loaded(folder: Path) -> None:
    script = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        "from llama_export.cli import main; main()"
    )
    with start("verify", folder, "--integrity", script=script) as process:
        _, stderr = process.communicate()
    assert process.returncode == 0
    assert stderr.splitlines()[-1] == "False"
