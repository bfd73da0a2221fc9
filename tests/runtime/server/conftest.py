"""A tokenizer, and a server over an engine that says what it was told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llama_runtime.tokenizer import Tokenizer
from tests.runtime.server.fakes import FakeEngine
from tests.runtime.server.serving import Running, Script, serve_fake, wait_for
from tests.tiny import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte, and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 300)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[tuple[Running, FakeEngine, Script]]:
    """One server for all tests that leave it as it was."""
    script = Script(tokenizer)
    engine = FakeEngine(script)
    with serve_fake(engine, tokenizer) as server:
        yield server, engine, script


@pytest.fixture
def api(shared: tuple[Running, FakeEngine, Script]) -> Running:
    server, engine, script = shared
    wait_for(lambda: not engine.has_work)
    engine.requests.clear()
    script.said = Script(script.tokenizer).said
    return server


@pytest.fixture
def engine(shared: tuple[Running, FakeEngine, Script]) -> FakeEngine:
    return shared[1]


@pytest.fixture
def script(shared: tuple[Running, FakeEngine, Script]) -> Script:
    return shared[2]


@pytest.fixture
def own_engine(tokenizer: Tokenizer) -> FakeEngine:
    """An engine for a server of the test's own."""
    return FakeEngine(Script(tokenizer))
