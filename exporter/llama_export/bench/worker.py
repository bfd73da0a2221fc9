"""One method in a process of its own: JSON lines in on stdin, out on what was stdout.

The first line says what to open; every further line is a call of a method of what was opened. Whatever an
engine prints goes to stderr.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from llama_artifacts.errors import LlamaExportError
from llama_export.bench.methods import Method, Setup, adapter

_PATHS = ("folder", "scratch", "weights_dir")


class _MethodCalls:
    """The calls of a method."""

    def __init__(self, method: Method) -> None:
        self._method = method

    def describe(self) -> dict[str, Any]:
        files = {path.resolve() for path in self._method.files}
        return {
            "label": self._method.label,
            "versions": self._method.versions,
            "disk_bytes": sum(path.stat().st_size for path in files),
        }

    def generate(self, prompt: Sequence[int], num_new: int) -> dict[str, Any]:
        started = time.perf_counter()
        tokens, times = [], []
        for token in self._method.generate(prompt, num_new):
            times.append(time.perf_counter())
            tokens.append(token)
        return {
            "tokens": tokens,
            "ttft_s": times[0] - started,
            "decode_s": times[-1] - times[0],
        }

    def logits(self, tokens: Sequence[int]) -> dict[str, Any]:
        found = self._method.logits(tokens)
        if found is None:
            return {"logits": None}
        data = found.contiguous().numpy().tobytes()
        return {"logits": base64.b64encode(data).decode()}

    def peak(self) -> dict[str, Any]:
        return {"peak_memory_bytes": peak_bytes()}


class _MachineCalls:
    """The machine's own rates."""

    def __init__(self, threads: int) -> None:
        from llama_export.bench.machine import Machine

        self._machine = Machine(threads)

    def measure(self) -> dict[str, Any]:
        return vars(self._machine.measure())


def peak_bytes() -> int:
    """Most resident memory of this process so far; 0 where the kernel does not tell.

    Not `ru_maxrss`, which goes on from the process that started this one.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    peaks = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(peaks[0]) * 1024 if peaks else 0


def open_calls(kind: str, values: Mapping[str, Any]) -> Any:
    """What a process of this kind can be asked."""
    if kind == "machine":
        return _MachineCalls(values["threads"])
    fields: dict[str, Any] = {k: Path(v) if k in _PATHS and v else v for k, v in values.items()}
    setup = Setup(**fields)
    if kind == "serve":
        from llama_export.bench.serve import Server

        return Server.open(setup)
    found = adapter(setup.method)
    if kind == "prepare":
        return found.prepare(setup)
    return _MethodCalls(found.open(setup))


def serve(lines: Iterator[str], reply: Callable[[dict[str, Any]], None]) -> None:
    """Opens what the first line asks for, then answers line by line."""
    try:
        first = json.loads(next(lines))
        calls = open_calls(first["kind"], first["setup"])
        reply({})
        for line in lines:
            call = json.loads(line)
            reply(getattr(calls, call.pop("do"))(**call))
    except LlamaExportError as error:
        fields = {"message": error.message, "where": error.where, "hint": error.hint}
        reply({"error": {"kind": type(error).__name__, **fields}})


def _channel() -> TextIO:
    """The stdout that the parent reads, for this module alone."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def main() -> None:
    """Runs until stdin ends."""
    channel = _channel()

    def reply(value: dict[str, Any]) -> None:
        channel.write(json.dumps(value) + "\n")
        channel.flush()

    serve(iter(sys.stdin.readline, ""), reply)


if __name__ == "__main__":
    main()
