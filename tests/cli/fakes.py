"""Stands in for the libraries that the commands call."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import llama_runtime


def install(monkeypatch: pytest.MonkeyPatch, module: str, **attributes: Any) -> None:
    fake = ModuleType(module)
    for name, value in attributes.items():
        setattr(fake, name, value)
    monkeypatch.setitem(sys.modules, module, fake)


@dataclass
class FakeStream:
    """Yields given pieces (text or ids), one token each, then says why it ended."""

    pieces: Sequence[Any]
    error: Exception | None = None
    prompt_tokens: Sequence[int] = (1, 2, 3)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    files: list[tuple[str, Path, int]] = field(default_factory=list)

    def resume(self, path: Path) -> int:
        self.files.append(("resume", path, len(self.tokens)))
        return 2

    def save(self, path: Path) -> None:
        self.files.append(("save", path, len(self.tokens)))

    def __iter__(self) -> Iterator[Any]:
        for number, piece in enumerate(self.pieces):
            self.tokens.append(piece if isinstance(piece, int) else number)
            yield piece
        if self.error is not None:
            raise self.error
        self.finish_reason = "stop"


class FakeRuntime:
    """Takes the place of `llama_runtime.load` and records how it was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stream: FakeStream) -> None:
        self.calls: dict[str, dict[str, Any]] = {}
        self.group, self.folder = None, Path("b")
        self.stream = stream
        monkeypatch.setattr(llama_runtime, "load", self.load)

    def load(self, path: Any, **settings: Any) -> FakeRuntime:
        self.calls["load"] = {"path": path, **settings}
        return self

    def generate(self, prompt: str, **settings: Any) -> FakeStream:
        self.calls["generate"] = {"prompt": prompt, **settings}
        return self.stream

    def generate_tokens(self, prompt: Sequence[int], **settings: Any) -> FakeStream:
        self.calls["generate_tokens"] = {"prompt": list(prompt), **settings}
        return self.stream
