from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_artifacts.errors import CheckpointError
from tests.cli import fakes
from tests.cli.running import environment, invoke, start
from tests.cli.synthetic import write_bundle


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["biuld"], "unknown command `biuld`", "did you mean `build`?"),
        (["xyzzy"], "unknown command `xyzzy`", "commands: build, entries, cache"),
        (["build"], "missing argument", "see `llama-export build --help`"),
        (["build", "m", "--max-sq", "9"], "--max-seq", "see `llama-export build --help`"),
        (["build", "m", "--format", "pt3"], "'pt2', 'aoti', 'onnx'", "--help"),
        (["build", "m", "--batch", "0"], "--batch", "--help"),
        (["--verson"], "--version", "see `llama-export --help`"),
        (["entries", "extra"], "extra", "see `llama-export entries --help`"),
    ],
)
def test_wrong_usage_exits_2_with_one_line_and_a_hint(
    words: list[str], message: str, hint: str
) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert not result.stdout
    first, second = result.stderr.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert second.startswith("hint: ")
    assert hint in second


def test_a_known_failure_exits_1_with_place_message_and_hint(tmp_path: Path) -> None:
    result = invoke("inspect", tmp_path / "no such bündle")
    assert result.exit_code == 1
    assert not result.stdout
    first, second = result.stderr.splitlines()
    assert first.startswith(f"error: {tmp_path}/no such bündle: expected a `manifest.json`")
    assert second.startswith("hint: ")


def test_with_json_the_failure_is_an_object_on_stdout_too(tmp_path: Path) -> None:
    result = invoke("inspect", tmp_path, "--json")
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "ManifestError"
    assert error["where"] == str(tmp_path)
    assert "manifest.json" in error["message"]
    assert "llama-export build" in error["hint"]
    assert result.stderr.startswith("error: ")


def test_a_message_of_several_lines_and_control_characters_stays_on_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(recipe: object, **settings: object) -> None:
        raise CheckpointError("one\ntwo \x1b[31mred\x9b", where="a\nb")

    fakes.install(monkeypatch, "llama_export.build", build=build)
    result = invoke("build", "model")
    assert result.exit_code == 1
    line, hint = result.stderr.splitlines()
    assert line == "error: a b: one two \\x1b[31mred\\x9b"
    assert hint == f"hint: {CheckpointError.default_hint}"


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(recipe: object, **settings: object) -> None:
        raise ZeroDivisionError

    fakes.install(monkeypatch, "llama_export.build", build=build)
    with pytest.raises(ZeroDivisionError):
        invoke("build", "model")


@pytest.mark.parametrize(("value", "has_traceback"), [("1", True), ("0", False), ("", False)])
def test_debug_shows_the_traceback_of_a_known_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, has_traceback: bool
) -> None:
    monkeypatch.setenv("LLAMA_EXPORT_DEBUG", value)
    result = invoke("inspect", tmp_path)
    assert result.exit_code == 1
    assert ("Traceback" in result.stderr) == has_traceback
    assert "\nerror: " in f"\n{result.stderr}"


def test_a_full_disk_under_stdout_is_a_known_failure(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    with Path("/dev/full").open("w") as full, start("inspect", bundle, stdout=full) as process:
        _, stderr = process.communicate()
    assert process.returncode == 1
    assert stderr == "error: standard output: cannot be written: No space left on device\n"


def test_a_reader_that_goes_away_is_no_reason_to_complain() -> None:
    with start("entries") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_what_stdout_cannot_encode_comes_escaped(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b", name="tïny")
    with start("inspect", bundle, env=environment(PYTHONIOENCODING="ascii")) as process:
        stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, "")
    assert "t\\xefny" in stdout
