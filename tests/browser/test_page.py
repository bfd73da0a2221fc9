"""The page of `report` in a browser: what is drawn, what runs, and what leaves it.

Needs Chromium (Debian: `apt-get install chromium`). Where there is none the tests say so and are
skipped; in CI, where the variable `CI` is set, they fail.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright
from playwright.sync_api import Page as Tab

from llama_artifacts.bundle import open_bundle
from llama_export.page.render import render
from llama_export.report import Reporter
from tests.exporter.pages import archive, graph_module, layer, layers, node, write_shown
from tests.exporter.test_page import HOSTILE, hostile_changes

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
# Known before any script of the page runs.
WATCH = """
window.alert = () => { window.wasRun = true; };
window.refused = [];
addEventListener("securitypolicyviolation", (event) => refused.push(event.violatedDirective));
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        reason = "no Chromium: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        # Root, as in containers, cannot use the sandbox.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


class Shown:
    """A page that is open, and what it did that it must not do."""

    def __init__(self, tab: Tab, path: Path) -> None:
        self.tab = tab
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.failures: dict[str, str | None] = {}
        tab.on("console", lambda message: self.complaints.append(message.text))
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on("request", lambda request: self.requests.append(request.url))
        tab.on(
            "requestfailed", lambda request: self.failures.update({request.url: request.failure})
        )
        tab.add_init_script(WATCH)
        tab.goto(path.as_uri())

    def count(self, selector: str) -> int:
        return self.tab.locator(selector).count()

    def click(self, selector: str) -> None:
        self.tab.locator(selector).first.click()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Any]:
    contexts = []

    def open_page(bundle: Path, **settings: Any) -> Shown:
        path = tmp_path / "report.html"
        path.write_text(render(open_bundle(bundle), reporter=Reporter()), encoding="utf-8")
        contexts.append(browser.new_context(**{"viewport": WIDE, **settings}))
        return Shown(contexts[-1].new_page(), path)

    yield open_page
    for context in contexts:
        context.close()


def many_layers(folder: Path) -> Path:
    return write_shown(folder, contents={"prefill.pt2": layers(30, "s27")})


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_it_renders_without_a_complaint_or_a_request(
    show: Any, tmp_path: Path, scheme: str, viewport: Any
) -> None:
    page = show(many_layers(tmp_path / "b"), color_scheme=scheme, viewport=viewport)
    assert page.tab.locator("html").get_attribute("data-theme") == scheme
    assert page.count("#tree .cell:not(.group)") == 2
    assert page.count("#graph-view .node") == 5
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.requests == [page.tab.url]
    assert page.complaints == []


def test_equal_layers_are_one_box_that_opens(show: Any, tmp_path: Path) -> None:
    page = show(many_layers(tmp_path / "b"))
    stack = page.tab.locator(".node.stack")
    assert stack.count() == 1
    assert stack.get_attribute("aria-label") == "model.layers.0-29, 30 equal layers"
    page.click(".node.stack")
    assert page.count(".node[aria-expanded=true]") == 1
    assert page.count('.node[aria-label="aten.linear"]') == 1
    page.click('.node[aria-label="aten.linear"]')
    assert "model.norm.weight" in page.tab.locator("#graph-detail").text_content()
    assert page.count(".edge.lit") == 2
    page.click("#graph-close")
    assert page.count(".node[aria-expanded=true]") == 0


def test_boxes_of_one_module_do_not_overlap(show: Any, tmp_path: Path) -> None:
    page = show(many_layers(tmp_path / "b"))
    page.click("#graph-open")
    overlaps = page.tab.evaluate(
        """() => {
          const groups = Map.groupBy(document.querySelectorAll(".node"), (n) => n.parentElement);
          const boxes = (nodes) => nodes.map((n) => n.querySelector("rect").getBoundingClientRect());
          const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
          return [...groups.values()].flatMap((nodes) => {
            const found = boxes(nodes);
            return found.flatMap((a, i) => found.slice(i + 1).filter((b) => meet(a, b)));
          }).length;
        }"""
    )
    assert page.count(".node") > 8
    assert overlaps == 0


def test_links_lead_down_whatever_runs_first(show: Any, tmp_path: Path) -> None:
    """The module begins before an operator outside of it that it reads later."""
    nodes = [
        node("embedding.default", ["tokens"], "start", "model"),
        node("to.dtype", ["p_weight"], "wide"),
        node("linear.default", ["start", "wide"], "out", "model"),
    ]
    contents = {"prefill.pt2": archive(graph_module(nodes, "out", "s27"))}
    page = show(write_shown(tmp_path / "b", contents=contents))
    assert page.count(".edge") == 3
    assert page.count(".edge.up") == 0


def test_boxes_that_read_each_other_keep_both_links(show: Any, tmp_path: Path) -> None:
    nodes = [
        node("embedding.default", ["tokens"], "a", "first"),
        node("to.dtype", ["a"], "b", "second"),
        node("neg.default", ["b"], "c", "first"),
    ]
    contents = {"prefill.pt2": archive(graph_module(nodes, "c", "s27"))}
    page = show(write_shown(tmp_path / "b", contents=contents))
    assert page.count(".edge") == 4
    assert page.count(".edge.up") == 1


def test_the_graph_is_used_with_the_keyboard(show: Any, tmp_path: Path) -> None:
    page = show(many_layers(tmp_path / "b"))
    before = page.tab.locator("#graph-view > g").get_attribute("transform")
    page.tab.locator("#graph-view").focus()
    page.tab.keyboard.press("+")
    page.tab.keyboard.press("ArrowLeft")
    assert page.tab.locator("#graph-view > g").get_attribute("transform") != before
    page.tab.keyboard.press("0")
    assert page.tab.locator("#graph-view > g").get_attribute("transform") == before
    page.tab.locator(".node.stack").focus()
    page.tab.keyboard.press("Enter")
    assert page.count(".node[aria-expanded=true]") == 1
    assert page.tab.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"


def test_another_entry_is_drawn_when_it_is_chosen(show: Any, tmp_path: Path) -> None:
    page = show(many_layers(tmp_path / "b"))
    page.tab.locator("#graph-entry").select_option("decode")
    assert page.tab.locator(".node.stack").text_content().startswith("▸ model.layers.0-2 ")


def test_sliders_show_the_memory_of_the_states(show: Any, tmp_path: Path) -> None:
    page = show(write_shown(tmp_path / "b"))
    assert page.tab.locator(".states .bytes").text_content() == "256 B"
    page.tab.locator(".states .batch").fill("3")
    page.tab.locator(".states .length").fill("11")
    assert page.tab.locator(".states .bytes").text_content() == "262.1 kB"
    assert page.tab.locator(".states td.here").text_content() == "262.1 kB"


def test_the_theme_is_a_button(show: Any, tmp_path: Path) -> None:
    page = show(write_shown(tmp_path / "b"), color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.tab.evaluate(background)
    page.click("#theme")
    assert page.tab.locator("html").get_attribute("data-theme") == "dark"
    assert page.tab.evaluate(background) != light


def test_a_hostile_bundle_runs_nothing(show: Any, tmp_path: Path) -> None:
    nodes = [node("embedding.default", ["tokens"], "start", HOSTILE), *layer(0, "start", HOSTILE)]
    contents = {"prefill.pt2": archive(graph_module(nodes, "sum_0", "s27"))}
    page = show(write_shown(tmp_path / "b", contents=contents, **hostile_changes()))
    page.click("#graph-open")
    assert page.tab.locator("h1").text_content() == HOSTILE
    assert page.tab.evaluate("[window.wasRun, window.refused]") == [None, []]
    assert page.requests == [page.tab.url]
    assert page.complaints == []


def test_the_policy_holds_back_scripts_and_requests(show: Any, tmp_path: Path) -> None:
    page = show(write_shown(tmp_path / "b"))
    page.tab.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.wasRun = true";
          document.body.append(script);
          document.body.insertAdjacentHTML("beforeend", "<img src='x' onerror='alert(1)'>");
          return fetch("data:text/plain,x").catch(() => null);
        }"""
    )
    page.tab.wait_for_function("refused.length >= 3")
    assert page.tab.evaluate("window.wasRun") is None
    assert set(page.tab.evaluate("refused")) >= {"script-src-elem", "connect-src", "img-src"}
    first, *others = page.requests
    assert first == page.tab.url
    assert {page.failures[url] for url in others} <= {"csp"}


def test_it_prints_what_the_screen_hides(show: Any, tmp_path: Path) -> None:
    page = show(write_shown(tmp_path / "b"), color_scheme="dark")
    page.tab.emulate_media(media="print")
    assert not page.tab.locator("nav").is_visible()
    assert page.tab.locator(".print-only").is_visible()
    assert page.tab.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"


def test_without_scripts_the_tables_are_there(show: Any, tmp_path: Path) -> None:
    page = show(write_shown(tmp_path / "b"), java_script_enabled=False)
    assert page.tab.locator("#laws table").is_visible()
    assert page.tab.locator("#states table").is_visible()
    assert not page.tab.locator("#tree").is_visible()
