from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from llama_runtime.server.hosts import allowed_hosts, is_loopback
from llama_runtime.server.run import Address, bind
from llama_runtime.tokenizer import Tokenizer
from tests.runtime.server.fakes import FakeEngine
from tests.runtime.server.serving import MODEL, Running, serve_fake

OWN = (
    "127.0.0.1",
    "localhost",
    "LocalHost:8000",
    "127.0.0.1:1",
    "[::1]",
    "[::1]:8000",
    "proxy.example",
    "PROXY.EXAMPLE:443",
)
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example@127.0.0.1",
    "[::2]:80",
    "192.168.0.1",
    "",
    ":8000",
    "a" * 2000,
)
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
PATH, BODY = "/v1/completions", {"model": MODEL, "prompt": "a"}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(lambda request: [5, None])


@pytest.fixture(scope="module")
def api(engine: FakeEngine, tokenizer: Tokenizer) -> Iterator[Running]:
    """A server that may be called as it would be on this machine alone, and as `proxy.example`."""
    with bind(Address("127.0.0.1", 0)) as sock:
        hosts = allowed_hosts(sock, "127.0.0.1", ["Proxy.example"])
    with serve_fake(engine, tokenizer, hosts=hosts) as server:
        yield server


@pytest.mark.parametrize("host", OWN)
def test_a_name_of_this_machine_gets_an_answer(api: Running, host: str) -> None:
    assert api.post(PATH, BODY, Host=host)[0] == 200


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/nothing"])
@pytest.mark.parametrize("host", FOREIGN)
def test_a_page_whose_own_name_leads_here_is_refused(
    api: Running, engine: FakeEngine, host: str, path: str
) -> None:
    engine.requests.clear()
    status, headers, answer = api.post(path, BODY, Host=host)
    assert status == 400
    assert headers["Content-Type"] == "application/json"
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == "invalid_host"
    assert answer["error"]["type"] == "invalid_request_error"
    assert len(answer["error"]["message"]) < 200
    assert engine.requests == []


def test_what_needs_no_key_is_for_this_machine_alone_too(api: Running) -> None:
    for path in ("/", "/health", "/metrics"):
        assert api.get(path)
        assert api.post(path, BODY, Host="evil.example")[2]["error"]["code"] == "invalid_host"


def test_refusals_are_counted(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    with serve_fake(engine, tokenizer, hosts=frozenset({"127.0.0.1"})) as api:
        api.post(PATH, BODY, Host="evil.example")
        counted = 'http_requests_total{path="/v1/completions",status="400"} 1.0'
        assert counted in api.get("/metrics")


def test_without_names_any_host_gets_an_answer(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    with serve_fake(engine, tokenizer) as api:
        assert api.post(PATH, BODY, Host="evil.example")[0] == 200


@pytest.mark.parametrize(
    ("host", "further", "is_own", "hosts"),
    [
        ("127.0.0.1", [], True, LOOPBACK),
        ("localhost", [], True, LOOPBACK),
        ("127.0.0.7", [], True, {*LOOPBACK, "127.0.0.7"}),
        ("127.0.0.1", ["A.example"], True, {*LOOPBACK, "a.example"}),
        ("0.0.0.0", [], False, None),
        ("0.0.0.0", ["a.example"], False, {*LOOPBACK, "0.0.0.0", "a.example"}),
    ],
)
def test_the_names_of_a_server_follow_from_where_it_listens(
    host: str, further: list[str], is_own: bool, hosts: set[str] | None
) -> None:
    with contextlib.closing(bind(Address(host, 0))) as sock:
        assert is_loopback(sock) == is_own
        assert allowed_hosts(sock, host, further) == hosts
