"""Drives a server with thousands of requests, many of them rude, and looks at what is left.

    python -m tests.benchmarks.soak BUNDLE [--requests N] [--at-once N] [--seed N]

The server is `llama-export serve` in a process of its own. Some clients leave in the middle of a
stream or before the answer, some send what is refused. In the end no request may hang, no page be
held, the server be healthy, and its memory be what it was after the first quarter, but for
`MAX_GROWTH_BYTES`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import http.client
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

TIMEOUT_SECONDS = 120.0
MAX_GROWTH_BYTES = 48 << 20
SCRIPT = "from llama_export.cli import main; main()"
BAD = (
    b"{",
    b'{"model": "nobody", "prompt": "a"}',
    b'{"prompt": 5}',
    b'{"prompt": "a", "tools": []}',
    b'{"prompt": "a", "max_tokens": 0}',
)


@dataclass(frozen=True)
class Report:
    """What a soak left.

    Attributes:
        ends: how many requests ended how: a status, `left`, or the name of an exception.
        before_bytes, after_bytes: the server's memory after the first quarter and at the end.
        figures: the server's own, when nothing was left to do.
        seconds: of the whole run.
        complaints: what the server wrote to stderr besides its address.
    """

    ends: dict[str, int]
    before_bytes: int
    after_bytes: int
    figures: dict[str, float]
    seconds: float
    complaints: Sequence[str] = ()

    def faults(self) -> list[str]:
        """What is wrong; empty where all is well."""
        odd = [end for end in self.ends if end not in ("200", "400", "404", "429", "left")]
        held = {
            name: self.figures[name]
            for name in ("requests_running", "requests_waiting", "pages_used")
            if self.figures[name] != 0
        }
        growth = self.after_bytes - self.before_bytes
        return [
            *(f"{self.ends[end]} requests ended with {end}" for end in odd),
            *(f"{name} is {value:g} at the end" for name, value in held.items()),
            *([f"{len(self.complaints)} lines on stderr"] if self.complaints else []),
            *([f"memory grew by {growth >> 20} MiB"] if growth > MAX_GROWTH_BYTES else []),
        ]


class Client:
    """Sends requests of all kinds to one server, each on a connection of its own."""

    def __init__(self, place: str, seed: int) -> None:
        self.place = place
        self.model = json.loads(self.get("/v1/models"))["data"][0]["id"]
        self._seed = seed

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection(self.place, timeout=TIMEOUT_SECONDS)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"{path} answered {answer.status}: {text}")
        return text

    def figures(self) -> dict[str, float]:
        found = re.findall(r"^llama_export_(\w+) (\S+)$", self.get("/metrics"), re.MULTILINE)
        return {name: float(value) for name, value in found}

    def ask(self, number: int) -> str:
        """The request of that number; returns how it ended."""
        draw = random.Random(self._seed * 1_000_003 + number)
        connection = http.client.HTTPConnection(self.place, timeout=TIMEOUT_SECONDS)
        try:
            return self._ask(connection, draw)
        except Exception as error:
            return type(error).__name__
        finally:
            connection.close()

    def _ask(self, connection: http.client.HTTPConnection, draw: random.Random) -> str:
        kind = draw.choices(("whole", "stream", "leave", "leave early", "bad"), (4, 3, 2, 1, 1))[0]
        body = draw.choice(BAD) if kind == "bad" else self._body(draw, is_stream=kind != "whole")
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        if kind == "leave early":
            time.sleep(draw.random() * 0.05)
            return "left"
        answer = connection.getresponse()
        if kind == "leave" and answer.status == 200:
            answer.read(draw.randint(1, 600))
            return "left"
        text = answer.read()
        if kind == "stream" and answer.status == 200 and not text.endswith(b"data: [DONE]\n\n"):
            return "a stream without an end"
        return str(answer.status)

    def _body(self, draw: random.Random, *, is_stream: bool) -> bytes:
        prompt: Any = "".join(draw.choices("abcdefgh ", k=draw.randint(1, 150)))
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": draw.randint(1, 40),
            "temperature": draw.choice((0, 0.8)),
            "stream": is_stream,
            "n": draw.choice((1, 1, 1, 2)),
            "stop": draw.choice((None, "ab", ["x", "yz"])),
        }
        return json.dumps(body).encode()


def soak(bundle: Path, *, num_requests: int, num_at_once: int, seed: int = 0) -> Report:
    """Starts the server, sends so many requests and ends the server."""
    options = "--port 0 --rows 8 --pool-pages 96 --threads 1"
    words = ["serve", str(bundle), *options.split()]
    command = [sys.executable, "-c", SCRIPT, *words]
    # A file, not a pipe: a server that complains much must not wait for a reader.
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            client = Client(_place(process, log), seed)
            server = psutil.Process(process.pid)
            report = _drive(client, server, num_requests, num_at_once)
            log.seek(0)
            return dataclasses.replace(report, complaints=log.read().splitlines()[1:])
        finally:
            process.terminate()


def _place(process: subprocess.Popen[bytes], log: IO[str]) -> str:
    """The address that the server tells when it is ready."""
    while True:
        log.seek(0)
        text = log.read()
        if "http://" in text and text.endswith("\n"):
            return text.rstrip().rpartition("http://")[2]
        if process.poll() is not None:
            raise SystemExit(f"the server did not start: {text}")
        time.sleep(0.05)


def _drive(client: Client, server: psutil.Process, num_requests: int, num_at_once: int) -> Report:
    started = time.perf_counter()
    quarter = num_requests // 4
    with ThreadPoolExecutor(num_at_once) as pool:
        ends = collections.Counter(pool.map(client.ask, range(quarter)))
        before = server.memory_info().rss
        ends.update(pool.map(client.ask, range(quarter, num_requests)))
    figures = _idle_figures(client)
    client.get("/health")
    after = server.memory_info().rss
    return Report(dict(ends), before, after, figures, time.perf_counter() - started)


def _idle_figures(client: Client) -> dict[str, float]:
    """The figures once those who left are noticed, or what they are after a while."""
    end = time.monotonic() + 10
    figures = client.figures()
    while figures["requests_running"] + figures["requests_waiting"] and time.monotonic() < end:
        time.sleep(0.05)
        figures = client.figures()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    report = soak(
        chosen.bundle, num_requests=chosen.requests, num_at_once=chosen.at_once, seed=chosen.seed
    )
    ends = ", ".join(f"{count} {end}" for end, count in sorted(report.ends.items()))
    sys.stdout.write(f"{chosen.requests} requests in {report.seconds:.1f} s: {ends}\n")
    memory = f"{report.before_bytes >> 20} MiB, then {report.after_bytes >> 20} MiB"
    sys.stdout.write(f"memory {memory}; {report.figures['steps_total']:.0f} steps\n")
    sys.stdout.write("".join(f"fault: {fault}\n" for fault in report.faults()))
    sys.exit(bool(report.faults()))


if __name__ == "__main__":
    main()
