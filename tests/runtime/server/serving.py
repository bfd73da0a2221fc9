"""Real servers, in a thread of the tests."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai
from fastapi import FastAPI

from llama_runtime.engine import Request
from llama_runtime.server.app import Limits, create_app
from llama_runtime.server.jobs import Served
from llama_runtime.server.run import Address, Server, bind, url
from llama_runtime.server.worker import Worker
from llama_runtime.tokenizer import Tokenizer
from tests.runtime.server.fakes import Answer

MODEL, KEY = "tiny", "secret"
WAIT_SECONDS = 20.0
SAID = "Hello, world 😀!"
TALK: Any = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass
class Running:
    """A server that answers at `url`."""

    url: str
    server: Server
    worker: Worker
    client: openai.OpenAI

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=WAIT_SECONDS) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """Status, headers and body, which must be JSON; `body` as it is where it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
                return answer.status, answer.headers, json.loads(answer.read())
        except urllib.error.HTTPError as answer:
            with answer:
                return answer.code, answer.headers, json.loads(answer.read())

    def metric(self, name: str) -> float:
        found = re.search(rf"^llama_export_{name} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def is_idle(self) -> bool:
        stats = self.worker.stats
        return stats.num_running == stats.num_waiting == 0


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


@contextlib.contextmanager
def running(app: FastAPI, worker: Worker, *, grace_s: float = 5.0) -> Iterator[Running]:
    """Runs the application; at the end it must have shut down in order."""
    ready = threading.Event()
    with bind(Address("127.0.0.1", 0)) as sock:
        server = Server(app, worker, grace_s=grace_s, at_start=ready.set)
        # A test that fails while the engine is held must not keep the process alive.
        thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
        thread.start()
        assert ready.wait(WAIT_SECONDS)
        base = url(sock)
        settings: dict[str, Any] = {"max_retries": 0, "timeout": WAIT_SECONDS}
        with openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, **settings) as client:
            try:
                yield Running(base, server, worker, client)
            finally:
                server.should_exit = True
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


def serve_fake(
    engine: Any,
    tokenizer: Tokenizer | None,
    *,
    max_queue: int = 100,
    max_body_bytes: int = 100_000,
    api_key: str | None = None,
    hosts: frozenset[str] | None = None,
    grace_s: float = 5.0,
) -> contextlib.AbstractContextManager[Running]:
    """A server over a made-up engine."""
    served = Served(MODEL, tokenizer, 300, frozenset({2}), capacity=256, created=0)
    worker = Worker(engine, max_open=engine.num_rows + max_queue)
    limits = Limits(engine.num_rows, max_queue, max_body_bytes, api_key, hosts)
    return running(create_app(served, worker, limits), worker, grace_s=grace_s)


class Script:
    """What the engine answers, whoever asks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.said: Answer = [*tokenizer.encode(SAID, add_special_tokens=False), None]

    def __call__(self, request: Request) -> Answer:
        return self.said


def curl(*words: str) -> str:
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", "20", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
