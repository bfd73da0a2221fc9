from __future__ import annotations

import json
import os
import pty
from pathlib import Path

import pytest

from llama_artifacts import summary
from llama_artifacts.bundle import open_bundle
from tests.cli.running import environment, invoke, start
from tests.cli.synthetic import PROGRAMS, write_bundle


def on_a_terminal(*args: object, **changes: str) -> str:
    """What the command shows on a terminal."""
    ours, theirs = pty.openpty()
    with start(*args, stdout=theirs, env=environment(**changes)) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the terminal's other end was closed
                break
            if not data:
                break
            shown += data
        process.communicate()
    os.close(ours)
    assert process.returncode == 0
    return shown.decode().replace("\r\n", "\n")


def test_everything_is_there_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # some test runners set it for their workers
    bundle = write_bundle(tmp_path / "mit Löchern und ß")
    result = invoke("inspect", bundle)
    assert result.exit_code == 0
    assert not result.stderr
    opened = open_bundle(bundle)
    for _, fact in summary.facts(opened):
        assert fact in result.stdout
    for table in summary.tables(opened):
        assert f"\n{table.title}\n" in result.stdout
        for row in table.rows:
            for cell in row:
                assert cell in result.stdout


def test_json(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    found = json.loads(invoke("inspect", bundle, "--json").stdout)
    assert found == summary.to_dict(open_bundle(bundle))


def test_a_bundle_without_programs_or_checks(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b", programs=(), checks=(), tokenizer=None, stop_tokens=())
    result = invoke("inspect", bundle)
    assert result.exit_code == 0
    assert "Programs" not in result.stdout


def test_a_damaged_bundle_is_named(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    (bundle / "decode.pt2").write_bytes(b"x")
    result = invoke("inspect", bundle)
    assert result.exit_code == 1
    assert "decode.pt2: damaged" in result.stderr
    assert not result.stdout


def test_text_of_the_manifest_is_no_markup(tmp_path: Path) -> None:
    shown = invoke("inspect", write_bundle(tmp_path / "b", name="[bold]x[/bold] :smile:")).stdout
    assert "[bold]x[/bold] :smile:" in shown


def test_output_to_a_file_is_never_folded_or_coloured(tmp_path: Path) -> None:
    name = "n" * 300
    with start("inspect", write_bundle(tmp_path / "b", name=name)) as process:
        stdout, _ = process.communicate()
    assert name in stdout
    assert "\x1b" not in stdout


@pytest.mark.parametrize(("changes", "has_color"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_on_a_terminal_unless_they_are_unwanted(
    tmp_path: Path, changes: dict[str, str], has_color: bool
) -> None:
    shown = on_a_terminal("inspect", write_bundle(tmp_path / "b"), **changes)
    assert ("\x1b[" in shown) == has_color
    assert PROGRAMS[0].file in shown


@pytest.mark.parametrize("width", ["80", "120"])
def test_lines_fit_the_terminal(tmp_path: Path, width: str) -> None:
    bundle = write_bundle(tmp_path / "b", name="n" * 300)
    shown = on_a_terminal("inspect", bundle, COLUMNS=width, NO_COLOR="1")
    assert max(map(len, shown.split("\n"))) <= int(width)
    assert shown.count("n" * 20) >= 3
