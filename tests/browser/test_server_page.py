"""The server's page in a browser, over an engine that says what it is told.

Needs Chromium, as the tests of `report`'s page do.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from llama_runtime.tokenizer import Tokenizer
from tests.runtime.server.fakes import FakeEngine
from tests.runtime.server.serving import KEY, MODEL, Running, serve_fake, wait_for
from tests.tiny import write_tokenizer

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDE, NARROW = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
ANSWER = "A <b>sky</b> is blue, 😀."
WATCH = """
window.refused = [];
addEventListener("securitypolicyviolation", (event) => refused.push(event.violatedDirective));
"""
Show = Callable[..., tuple[Page, list[str], list[str]]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        reason = "no Chromium: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 300)
    return Tokenizer.load(folder)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    said = [*tokenizer.encode(ANSWER, add_special_tokens=False), None]
    return FakeEngine(lambda request: said)


@pytest.fixture
def show(browser: Browser) -> Iterator[Show]:
    """Opens the page; returns the tab, what it asked for, and its complaints."""
    contexts = []

    def open_page(api: Running, **settings: Any) -> tuple[Page, list[str], list[str]]:
        contexts.append(browser.new_context(**{"viewport": WIDE, **settings}))
        tab = contexts[-1].new_page()
        requests: list[str] = []
        complaints: list[str] = []
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.add_init_script(WATCH)
        tab.goto(api.url)
        return tab, requests, complaints

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_it_shows_the_model_and_asks_nobody_else(
    show: Show, engine: FakeEngine, tokenizer: Tokenizer, scheme: str, viewport: Any
) -> None:
    with serve_fake(engine, tokenizer) as api:
        tab, requests, complaints = show(api, color_scheme=scheme, viewport=viewport)
        expect(tab.locator("#model")).to_have_text(MODEL)
        expect(tab.locator("#state")).to_have_text("serving")
        expect(tab.locator("#rows")).to_have_text("of 4 rows")
        expect(tab.locator("#pages")).to_contain_text("of 64 pages")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.evaluate("refused") == []
        assert complaints == []
        assert {url.removeprefix(api.url) for url in requests if url != "data:,"} == {
            "/",
            "/metrics",
            "/v1/models",
        }
        background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(247, 247, 245)" if scheme == "light" else "rgb(19, 21, 25)")
        tab.close()


def test_a_person_chats_and_sees_the_figures_move(
    show: Show, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    with serve_fake(engine, tokenizer) as api:
        tab, _, complaints = show(api)
        expect(tab.locator("#state")).to_have_text("serving")
        tab.fill("#text", "Why?")
        tab.press("#text", "Enter")
        expect(tab.locator(".message.assistant")).to_have_text(ANSWER)
        expect(tab.locator(".message b")).to_have_count(0)
        expect(tab.locator("#generated")).to_have_text(str(len(ANSWER.encode())))
        tab.fill("#text", "And?")
        tab.click("#send")
        expect(tab.locator(".message.assistant")).to_have_count(2)
        expect(tab.locator("#send")).to_have_text("Send")
        rendered = tokenizer.decode(engine.requests[-1].prompt)
        assert rendered == f"Why?{ANSWER}And?"
        assert complaints == []
        tab.close()


def test_an_answer_can_be_stopped_while_the_batch_shows_it(
    show: Show, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    with serve_fake(engine, tokenizer) as api:
        tab, _, _ = show(api)
        expect(tab.locator("#state")).to_have_text("serving")
        engine.hold()
        tab.fill("#text", "Why?")
        tab.click("#send")
        expect(tab.locator("#send")).to_have_text("Stop")
        engine.release(3)
        expect(tab.locator("#running")).to_have_text("1")
        expect(tab.locator(".message.assistant")).to_have_text(ANSWER[:3])
        tab.click("#send")
        expect(tab.locator("#send")).to_have_text("Send")
        wait_for(lambda: not api.worker._open)  # the server sees later that the page is gone
        engine.release()
        expect(tab.locator("#running")).to_have_text("0")
        assert len(engine.cancelled) == 1
        tab.close()


def test_with_a_key_it_waits_for_one_and_shows_refusals(
    show: Show, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    with serve_fake(engine, tokenizer, api_key=KEY) as api:
        tab, _, _ = show(api)
        expect(tab.locator("#state")).to_have_text("needs an API key")
        tab.fill("#text", "Why?")
        tab.click("#send")
        expect(tab.locator(".message.error")).to_contain_text("API key")
        tab.fill("#key", KEY)
        expect(tab.locator("#state")).to_have_text("serving")
        tab.fill("#text", "Why?")
        tab.click("#send")
        expect(tab.locator(".message.assistant")).to_have_text(ANSWER)
        tab.close()
