from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.errors import InputError, TokenizerError
from tests.cli.fakes import FakeRuntime, FakeStream
from tests.cli.running import invoke

SAMPLING = {
    "max_new": 128,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": None,
}


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return FakeRuntime(monkeypatch, FakeStream(["The ", "sky", " is blüe."]))


@pytest.fixture
def token_runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return FakeRuntime(monkeypatch, FakeStream([5, 6, 7]))


def test_defaults(runtime: FakeRuntime) -> None:
    result = invoke("run", "b", "-p", "Why?")
    assert result.exit_code == 0
    assert result.stdout == "The sky is blüe.\n"
    assert result.stderr == ""
    assert runtime.calls == {
        "load": {
            "path": Path("b"),
            "device": "cpu",
            "format": None,
            "threads": None,
            "allow_native": True,
            "weights_dir": None,
            "require_signature": None,
            "cuda_graphs": None,
        },
        "generate": {"prompt": "Why?", "stop": (), "chat": None, "system": None, **SAMPLING},
    }


def test_every_option_reaches_the_runtime(runtime: FakeRuntime) -> None:
    words = (
        "--format onnx --device cuda:1 --threads 2 --no-native --max-new 9 --temperature 0.5"
        " --top-k 4 --top-p 0.9 --min-p 0.1 --seed 7 --stop END --stop FIN --chat --system terse"
        " --weights-dir m --require-signature key.pub --no-cuda-graphs"
    )
    assert invoke("run", "b", "-p", "Why?", *words.split()).exit_code == 0
    assert runtime.calls == {
        "load": {
            "path": Path("b"),
            "device": "cuda:1",
            "format": "onnx",
            "threads": 2,
            "allow_native": False,
            "weights_dir": Path("m"),
            "require_signature": Path("key.pub"),
            "cuda_graphs": False,
        },
        "generate": {
            "prompt": "Why?",
            "stop": ("END", "FIN"),
            "chat": True,
            "system": "terse",
            "max_new": 9,
            "temperature": 0.5,
            "top_k": 4,
            "top_p": 0.9,
            "min_p": 0.1,
            "seed": 7,
        },
    }


def test_pieces_are_shown_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    stream = FakeStream(["a", "b"])
    FakeRuntime(monkeypatch, stream)

    def write(text: str) -> None:
        shown.append(f"{text!r} after {len(stream.tokens)}")

    monkeypatch.setattr("llama_runtime.cli.output.write", write)
    assert invoke("run", "b", "-p", "x").exit_code == 0
    assert shown == ["'a' after 1", "'b' after 2", "'\\n' after 2"]


def test_token_ids_in_and_out(token_runtime: FakeRuntime) -> None:
    result = invoke("run", "b", "--tokens", "1 9690, 198")
    assert result.stdout == "5 6 7\n"
    assert token_runtime.calls["generate_tokens"] == {"prompt": [1, 9690, 198], **SAMPLING}


@pytest.mark.parametrize(("given", "prompt"), [("two\nlines\n", "two\nlines"), ("é", "é")])
def test_a_prompt_from_stdin(runtime: FakeRuntime, given: str, prompt: str) -> None:
    assert invoke("run", "b", "-p", "-", input=given).exit_code == 0
    assert runtime.calls["generate"]["prompt"] == prompt


@pytest.mark.parametrize("as_tokens", [False, True])
def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch, as_tokens: bool) -> None:
    FakeRuntime(monkeypatch, FakeStream([5, 6, 7] if as_tokens else ["a", "é", "c"]))
    prompt = ["--tokens", "1"] if as_tokens else ["-p", "x"]
    found = json.loads(invoke("run", "b", *prompt, "--json").stdout)
    assert list(found) == [
        "tokens" if as_tokens else "text",
        *(
            "finish_reason",
            "prompt_tokens",
            "resumed_tokens",
            "new_tokens",
            "load_s",
            "ttft_ms",
            "decode_tok_s",
        ),
    ]
    assert found["tokens" if as_tokens else "text"] == ([5, 6, 7] if as_tokens else "aéc")
    assert (found["finish_reason"], found["prompt_tokens"], found["new_tokens"]) == ("stop", 3, 3)
    assert found["ttft_ms"] >= 0


def test_an_answer_without_tokens_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRuntime(monkeypatch, FakeStream([]))
    result = invoke("run", "b", "-p", "x", "--json")
    found = json.loads(result.stdout)
    assert (found["text"], found["ttft_ms"], found["decode_tok_s"]) == ("", None, None)


def test_stats_come_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowStream(FakeStream):
        def __iter__(self) -> Any:
            for piece in super().__iter__():
                time.sleep(0.01)
                yield piece

    FakeRuntime(monkeypatch, SlowStream(["a", "b", "c"]))
    result = invoke("run", "b", "-p", "x", "--stats")
    assert result.stdout == "abc\n"
    names = [line.split("  ")[0] for line in result.stderr.splitlines()]
    assert names == ["load", "first token", "decode", "tokens", "finish"]
    assert "3 prompt, 3 new" in result.stderr
    rate = float(result.stderr.split("decode")[1].split()[0])
    assert 20 < rate < 100


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["-p", "x", "--tokens", "1"],
        ["--tokens", ""],
        ["--tokens", "1 x"],
        ["--tokens", "-1"],
        ["--tokens", "9" * 5000],
        ["--tokens", "1", "--chat"],
        ["--tokens", "1", "--stop", "x"],
        ["--tokens", "1", "--system", "x"],
        ["-p", "x", "--no-chat", "--system", "x"],
        ["-p", "x", "--stop", ""],
        ["-p", "x", "--max-new", "0"],
        ["-p", "bad \udcff byte"],
        ["-p", "x", "--stop", "\udcff"],
    ],
)
def test_wrong_usage(runtime: FakeRuntime, words: list[str]) -> None:
    result = invoke("run", "b", *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr) < 400
    assert not runtime.calls


def test_stdin_that_is_no_text(runtime: FakeRuntime) -> None:
    result = invoke("run", "b", "-p", "-", input=b"ab\xff")
    assert result.exit_code == 2
    assert "expected UTF-8 text on stdin, got byte 2" in result.stderr


def test_a_failure_in_the_middle_ends_the_line_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRuntime(monkeypatch, FakeStream(["half"], error=InputError("no room", where="pos")))
    result = invoke("run", "b", "-p", "x")
    assert result.exit_code == 1
    assert result.stdout == "half\n"
    assert result.stderr == f"error: pos: no room\nhint: {InputError.default_hint}\n"


def test_a_failure_with_json_prints_the_error_and_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRuntime(monkeypatch, FakeStream(["half"], error=TokenizerError("none", hint="use ids")))
    result = invoke("run", "b", "-p", "x", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "error": {"kind": "TokenizerError", "message": "none", "where": None, "hint": "use ids"}
    }


def test_states_are_loaded_before_the_first_token_and_saved_after_the_last(
    runtime: FakeRuntime,
) -> None:
    words = ("--load-state", "old.state", "--save-state", "new.state", "--stats")
    result = invoke("run", "b", "-p", "Why?", *words)
    assert result.exit_code == 0
    assert runtime.stream.files == [
        ("resume", Path("old.state"), 0),
        ("save", Path("new.state"), 3),
    ]
    assert "tokens       3 prompt (2 from a file), 3 new\n" in result.stderr


def test_a_state_without_a_folder_to_go_to_is_refused_before_anything_is_loaded(
    runtime: FakeRuntime, tmp_path: Path
) -> None:
    path = tmp_path / "none" / "new.state"
    result = invoke("run", "b", "-p", "Why?", "--save-state", path)
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: {path}: cannot be written: no such folder\nhint: choose another file\n"
    )
    assert not runtime.calls
