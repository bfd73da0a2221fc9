from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llama_export.report import Reporter
from tests.cli import fakes
from tests.cli.running import invoke


@dataclass(frozen=True)
class Result:
    name: str = "tiny"
    format: str = "pt2"
    dtype: str = "f32"
    window: int = 1024
    stride: int = 512
    num_tokens: int = 12345
    nll: float = 2.5
    perplexity: float = 12.18249
    bits_per_byte: float = 1.25
    change: float | None = None


RESULTS = (Result(), Result(dtype="bf16", nll=2.6, perplexity=13.46374, change=0.10517))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def perplexities(folders: Any, text: str, *, reporter: Reporter, **settings: Any) -> Any:
        calls.append((folders, text, settings))
        return RESULTS[: len(folders)]

    fakes.install(monkeypatch, "llama_export.perplexity", perplexities=perplexities)
    return calls


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Grün ist die Heide.\n", encoding="utf-8")
    return path


def test_bundles_side_by_side(calls: list[Any], text: Path) -> None:
    result = invoke("perplexity", "a", "b", "--text", text)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "BUNDLE  FORMAT  DTYPE  TOKENS  NLL/TOKEN  PERPLEXITY  BITS/BYTE  CHANGE",
        "a       pt2     f32    12,345     2.5000     12.1825     1.2500  -",
        "b       pt2     bf16   12,345     2.6000     13.4637     1.2500  +10.517%",
        "",
        "windows of 1,024 tokens, every 512",
    ]
    assert calls == [
        (
            (Path("a"), Path("b")),
            "Grün ist die Heide.\n",
            {
                "window": None,
                "stride": None,
                "format": None,
                "device": "cpu",
                "weights_dir": None,
            },
        )
    ]


def test_every_option_reaches_the_library(calls: list[Any], text: Path) -> None:
    words = "--window 64 --stride 16 --format onnx --device cuda:1 --weights-dir m"
    assert invoke("perplexity", "a", "--text", text, *words.split()).exit_code == 0
    assert calls[0][2] == {
        "window": 64,
        "stride": 16,
        "format": "onnx",
        "device": "cuda:1",
        "weights_dir": Path("m"),
    }


def test_json(calls: list[Any], text: Path) -> None:
    result = invoke("perplexity", "a", "b", "--text", text, "--json")
    found = json.loads(result.stdout)
    assert found["text_bytes"] == 21
    assert found["bundles"] == [
        {"bundle": "a", **vars(RESULTS[0])},
        {"bundle": "b", **vars(RESULTS[1])},
    ]


def test_text_from_stdin(calls: list[Any]) -> None:
    result = invoke("perplexity", "a", "--text", "-", input="two\nlines\n")
    assert result.exit_code == 0
    assert calls[0][1] == "two\nlines\n"


def test_a_text_that_cannot_be_read(calls: list[Any], tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"Gr\xfcn")
    for path, message in (
        (tmp_path / "nothing.txt", "nothing.txt: cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "latin.txt", "latin.txt: expected UTF-8 text, got a bad byte at 2"),
    ):
        result = invoke("perplexity", "a", "--text", path)
        assert result.exit_code == 1
        assert message in result.stderr
        assert "hint: give a text file in UTF-8, or `-` for stdin" in result.stderr
    result = invoke("perplexity", "a", "--text", "-", "--json", input=b"\xff")
    assert json.loads(result.stdout)["error"]["where"] == "stdin"
    assert calls == []


@pytest.mark.parametrize("words", [["--text", "x"], ["a"], ["a", "--text", "x", "--window", "1"]])
def test_wrong_usage(words: list[str]) -> None:
    result = invoke("perplexity", *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def test_a_real_bundle_without_the_entry(short_bundle: Path, text: Path) -> None:
    result = invoke("perplexity", short_bundle, "--text", text)
    assert result.exit_code == 1
    assert "the bundle has no entry `log_probs_packed`" in result.stderr
    assert "--entry log_probs_packed" in result.stderr
