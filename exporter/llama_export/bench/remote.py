"""A method in another process, as the process that measures sees it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llama_artifacts import errors
from llama_artifacts.errors import CompatibilityError, LlamaExportError
from llama_export.bench.methods import Setup

WORKER = "llama_export.bench.worker"
Logits = np.ndarray[Any, np.dtype[np.float32]]
_END_S = 10


@dataclass(frozen=True)
class Run:
    """One text: its tokens, seconds to the first one, and from there to the last."""

    tokens: tuple[int, ...]
    ttft_s: float
    decode_s: float

    @property
    def tok_s(self) -> float | None:
        """Tokens per second after the first; None where there is one only."""
        return (len(self.tokens) - 1) / self.decode_s if self.decode_s > 0 else None


class Remote(Protocol):
    """What the rounds need of a process; tests have one without a process.

    Attributes:
        load_s: seconds from the start of the process to the first token.
    """

    load_s: float

    def call(self, do: str, **values: Any) -> dict[str, Any]:
        """The answer to one call.

        Raises:
            LlamaExportError: the process told of one, or ended without an answer.
        """
        ...

    def mark_loaded(self) -> None:
        """The first token is there: sets `load_s`."""
        ...

    def close(self) -> None:
        """Ends the process."""
        ...


class Process:
    """A worker, until it is closed.

    Args:
        kind: `method`, `serve`, `machine` or `prepare`.
        name: for errors.
        setup: what the worker opens.
        threads: CPU threads, also of libraries that read the environment.

    Raises:
        LlamaExportError: it cannot be opened.
    """

    def __init__(self, kind: str, name: str, setup: Mapping[str, Any], threads: int) -> None:
        self._name = name
        self.load_s = 0.0
        self._started = time.perf_counter()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment(threads),
        )
        try:
            self._send({"kind": kind, "setup": setup})
            self._receive()
        except BaseException:
            self.close()
            raise

    def call(self, do: str, **values: Any) -> dict[str, Any]:
        """The answer to one call."""
        self._send({"do": do, **values})
        return self._receive()

    def mark_loaded(self) -> None:
        """The first token is there."""
        self.load_s = time.perf_counter() - self._started

    def close(self) -> None:
        """Ends the process; one that does not end when it is told is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _send(self, value: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as cause:
            raise self._ended() from cause

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _as_error(answer["error"], self._name)
        return answer

    def _ended(self) -> CompatibilityError:
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
        return CompatibilityError(
            f"its process ended with status {status}: {last:.300}",
            where=self._name,
            hint="run it once more; if it ends again, leave this method out",
        )


def start(kind: str, setup: Setup) -> Process:
    """A worker for a method."""
    values = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(setup).items()}
    return Process(kind, setup.method, values, setup.threads)


def start_machine(threads: int) -> Process:
    """The worker that measures the machine."""
    return Process("machine", "machine", {"threads": threads}, threads)


def generate(remote: Remote, prompt: tuple[int, ...], num_new: int) -> Run:
    """One text."""
    answer = remote.call("generate", prompt=prompt, num_new=num_new)
    return Run(tuple(answer["tokens"]), answer["ttft_s"], answer["decode_s"])


def logits(remote: Remote, tokens: tuple[int, ...]) -> Logits | None:
    """Logits [V], float32, after the last of the tokens; None where the engine keeps them."""
    answer = remote.call("logits", tokens=tokens)["logits"]
    return None if answer is None else np.frombuffer(base64.b64decode(answer), np.float32)


def _environment(threads: int) -> dict[str, str]:
    # Libraries take their number of threads from here where nobody tells them.
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return {**os.environ, **counts, "TOKENIZERS_PARALLELISM": "false"}


def _as_error(fields: Mapping[str, Any], name: str) -> LlamaExportError:
    kind = getattr(errors, fields["kind"], LlamaExportError)
    where = fields["where"] or name
    error: LlamaExportError = kind(fields["message"], where=where, hint=fields["hint"])
    return error
