"""Clients that leave, queues that fill, servers that end; over an engine that can be held."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from llama_runtime.tokenizer import Tokenizer
from tests.runtime.server.fakes import FakeEngine
from tests.runtime.server.serving import MODEL, Running, serve_fake, wait_for

TEXT = "/v1/completions"
LETTER = 70


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(lambda request: [LETTER] * 10_000, num_rows=2)


@pytest.fixture
def api(engine: FakeEngine, tokenizer: Tokenizer) -> Iterator[Running]:
    with serve_fake(engine, tokenizer, max_queue=2, grace_s=0.5) as server:
        yield server
        engine.release()


def connect(api: Running, **fields: Any) -> socket.socket:
    """Sends a request and does not wait for the answer."""
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 200, **fields}).encode()
    place = urlsplit(api.url)
    sock = socket.create_connection((place.hostname, place.port), timeout=20)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return sock


def close(sock: socket.socket) -> None:
    """Ends the connection as a client that dies does."""
    sock.shutdown(socket.SHUT_RDWR)
    sock.close()


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_frees_its_pages_within_two_steps(
    api: Running, engine: FakeEngine, is_stream: bool
) -> None:
    engine.hold()
    sock = connect(api, stream=is_stream)
    wait_for(lambda: engine.stats.pages_used == 1)
    if is_stream:
        assert b"200 OK" in sock.recv(1000)
    close(sock)
    # The server's loop runs while the step is held; then it takes its course.
    wait_for(lambda: not api.worker._open)
    steps = engine.num_steps
    engine.release()
    wait_for(lambda: not engine.has_work)
    assert engine.num_steps - steps <= 2
    assert len(engine.cancelled) == 1
    wait_for(lambda: api.metric("requests_running") == api.metric("pages_used") == 0)
    assert api.client.completions.create(model=MODEL, prompt="a", max_tokens=3).choices[0].text


def test_a_client_that_leaves_in_the_middle_of_its_request(
    api: Running, caplog: pytest.LogCaptureFixture
) -> None:
    place = urlsplit(api.url)
    sock = socket.create_connection((place.hostname, place.port), timeout=20)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    close(sock)
    wait_for(lambda: 'status="499"' in api.get("/metrics"))
    assert caplog.messages == []


def test_a_client_that_leaves_after_the_first_event(api: Running, engine: FakeEngine) -> None:
    stream = api.client.completions.create(model=MODEL, prompt="a", max_tokens=200, stream=True)
    next(iter(stream))
    engine.hold()
    stream.close()
    wait_for(lambda: not api.worker._open or not engine.has_work)
    engine.release()
    wait_for(lambda: not engine.has_work)
    assert api.is_idle()


def test_a_client_that_leaves_the_queue(api: Running, engine: FakeEngine) -> None:
    engine.hold()
    running = [connect(api), connect(api)]
    waiting = connect(api)
    wait_for(lambda: len(api.worker._open) == 3)
    engine.release(1)
    wait_for(lambda: engine.stats.num_waiting == 1)
    close(waiting)
    wait_for(lambda: len(api.worker._open) == 2)
    for sock in running:
        close(sock)
    wait_for(lambda: not api.worker._open)
    engine.release()
    wait_for(lambda: not engine.has_work)
    assert engine.stats.pages_used == 0


def test_an_answer_that_ends_by_itself_cancels_nothing(api: Running, engine: FakeEngine) -> None:
    for is_stream in (False, True):
        body: Any = {"model": MODEL, "prompt": "a", "max_tokens": 3, "stream": is_stream}
        with connect(api, **body) as sock:
            sock.recv(100_000)
            wait_for(lambda: not engine.has_work)
    assert engine.cancelled == []


def test_a_full_queue_is_told_when_to_come_back(api: Running, engine: FakeEngine) -> None:
    engine.hold()
    socks = [connect(api) for _ in range(4)]
    wait_for(lambda: len(api.worker._open) == 4)
    status, headers, answer = api.post(TEXT, {"model": MODEL, "prompt": "a"})
    assert (status, headers["Retry-After"]) == (429, "1")
    assert answer["error"]["code"] == "queue_full"
    with pytest.raises(openai.RateLimitError):
        api.client.completions.create(model=MODEL, prompt="a")
    engine.release(1)
    wait_for(lambda: engine.stats.num_waiting == 2)
    for sock in socks:
        close(sock)
    wait_for(lambda: not api.worker._open)
    engine.release()
    assert api.client.completions.create(model=MODEL, prompt="a").choices[0].text


def test_a_failed_step_is_an_answer_and_shows_in_the_health(
    api: Running, engine: FakeEngine
) -> None:
    engine.hold()
    engine.fault = RuntimeError("the device is lost")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(api.post, TEXT, {"model": MODEL, "prompt": "a"})
        wait_for(lambda: engine.has_work)
        engine.release()
        status, _, answer = asked.result()
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "device" not in answer["error"]["message"]
    with pytest.raises(Exception, match="503"):
        api.get("/health")
    assert api.client.completions.create(model=MODEL, prompt="a").choices[0].text
    assert json.loads(api.get("/health")) == {"status": "ok"}


def test_at_the_end_requests_finish(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    with ThreadPoolExecutor() as pool:
        with serve_fake(engine, tokenizer, grace_s=10.0) as api:
            engine.hold()
            body = {"model": MODEL, "prompt": "a", "max_tokens": 5}
            asked = pool.submit(api.post, TEXT, body)
            wait_for(lambda: engine.has_work)
            threading.Timer(0.3, engine.release).start()
        status, _, answer = asked.result()
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")


def test_after_the_grace_requests_fail(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    with ThreadPoolExecutor() as pool:
        with serve_fake(engine, tokenizer, grace_s=0.2) as api:
            engine.hold()
            asked = pool.submit(api.post, TEXT, {"model": MODEL, "prompt": "a"})
            stream = connect(api, stream=True)
            wait_for(lambda: len(api.worker._open) == 2)
            threading.Timer(1.0, engine.release).start()
        status, _, answer = asked.result()
    assert status == 500
    assert answer["error"]["message"] == "the server is shutting down"
    with stream:
        found = http.client.HTTPResponse(stream)
        found.begin()
        events = found.read().split(b"\n\n")
    assert b"the server is shutting down" in events[-2]


def test_a_client_that_does_not_read_holds_nobody_up(api: Running, engine: FakeEngine) -> None:
    with connect(api, stream=True):
        started = time.monotonic()
        for _ in range(3):
            answer = api.client.completions.create(model=MODEL, prompt="a", max_tokens=20)
            assert len(answer.choices[0].text) == 20
        assert time.monotonic() - started < 10
