from __future__ import annotations

import os
import pty
import sys

import pytest

from llama_export.cli import output
from tests.cli.running import environment, start

SCRIPT = """
import sys
from llama_export.cli import output
with output.reporter() as reporter:
    reporter.note("a [bold]remark[/bold]")
    with reporter.step("decode aoti", 4) as advance:
        advance(4)
    with output.waiting("loading"):
        pass
    print("a result", flush=True)
"""


def on_a_terminal(**changes: str) -> tuple[str, str]:
    """Stdout, and stderr on a terminal."""
    ours, theirs = pty.openpty()
    with start(script=SCRIPT, stderr=theirs, env=environment(**changes)) as process:
        os.close(theirs)
        stdout, _ = process.communicate()
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert process.returncode == 0
    return stdout, shown


def test_a_bar_on_a_terminal_and_results_only_on_stdout() -> None:
    stdout, shown = on_a_terminal()
    assert stdout == "a result\n"
    assert "note: a [bold]remark[/bold]" in shown
    assert "decode aoti: 0.0 s" in shown
    assert "━" in shown


def test_no_colours_in_the_bar_if_they_are_unwanted() -> None:
    _, shown = on_a_terminal(NO_COLOR="1")
    assert "decode aoti: 0.0 s" in shown
    assert "m" not in {part[-1:] for part in shown.split("\x1b[")[1:] if part[:1].isdigit()} - {"h"}


def test_plain_lines_on_a_dumb_terminal() -> None:
    _, shown = on_a_terminal(TERM="dumb")
    assert "\x1b" not in shown
    assert shown.splitlines() == ["note: a [bold]remark[/bold]", "decode aoti: 0.0 s"]


def test_a_failed_step_is_not_reported_as_done(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        output.reporter() as reporter,
        reporter.step("weights"),
    ):
        raise ZeroDivisionError
    assert capsys.readouterr().err == ""


def test_a_column_of_numbers_is_aligned_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_table([("a", "1.5 MB"), ("bcd", "10.0 kB")], columns=("name", "size"))
    assert capsys.readouterr().out == "NAME     SIZE\na      1.5 MB\nbcd   10.0 kB\n"


def test_numbers_that_json_lacks_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_json({"a": [float("nan"), float("inf"), 1.5], "é": ()})
    text = capsys.readouterr().out
    assert text.isascii()
    assert "".join(text.split()) == '{"a":[null,null,1.5],"\\u00e9":[]}'


def test_cells_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_table([("\x1b]0;evil\x07", "[red]b")])
    assert capsys.readouterr().out == "\\x1b]0;evil\\x07  [red]b\n"


@pytest.mark.parametrize(
    ("is_terminal", "shown"), [(True, "\\x1b[2Ja\tb\n"), (False, "\x1b[2Ja\tb\n")]
)
def test_generated_text_is_left_as_it_is_except_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    shown: str,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    output.write_piece("\x1b[2Ja\tb\n")
    assert capsys.readouterr().out == shown
