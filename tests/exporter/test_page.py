from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import IntegrityError, LlamaExportError
from llama_artifacts.manifest import Check
from llama_export.page.render import render
from llama_export.page.states import state_memory
from llama_export.page.timings import FILE_NAME, read_timings
from llama_export.page.weights import read_weights, shares
from llama_export.report import Reporter
from tests.bundles import CONTENTS, sample_manifest, write_sample
from tests.exporter.pages import write_shown
from tests.exporter.test_triton import PAGED, program

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'`{{7*7}}"
FETCHING = {"src", "href", "srcset", "action", "data", "poster", "formaction", "background"}


class Page(HTMLParser):
    """The elements of a page, and the text within each kind."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def page(folder: Path) -> Page:
    return Page(render(open_bundle(folder), reporter=Reporter()))


def data(shown: Page) -> Any:
    return json.loads(shown.texts["script"][0])


def test_everything_of_the_manifest_is_there(tmp_path: Path) -> None:
    bundle = write_shown(tmp_path / "b")
    shown = page(bundle)
    text = " ".join(" ".join(texts) for texts in shown.texts.values())
    manifest = open_bundle(bundle).manifest
    for item in manifest.programs:
        assert item.file in text
        for spec in (*item.signature.inputs, *item.signature.outputs, *item.signature.dims):
            assert spec.name in text
    for check in manifest.checks:
        assert f"{check.figure:.3g}" in text
        assert check.law in text
    assert "✓ holds" in text
    assert "Timings" not in text


def test_a_broken_law_is_shown_as_one(tmp_path: Path) -> None:
    checks = (Check("parity", "decode", "pt2", 0.5, 0.1), Check("rows", "", "", 0.0, 0.0))
    shown = page(write_shown(tmp_path / "b", checks=checks))
    assert [text for text in shown.texts["td"] if "✗" in text or "✓" in text] == [
        "✗ broken",
        "✓ holds",
    ]
    assert "1 of 2" in " ".join(shown.texts["dd"])


def test_the_same_bundle_gives_the_same_page(tmp_path: Path) -> None:
    bundle = open_bundle(write_shown(tmp_path / "b"))
    assert render(bundle, reporter=Reporter()) == render(bundle, reporter=Reporter())


def test_nothing_is_fetched_and_only_the_page_s_own_script_may_run(tmp_path: Path) -> None:
    shown = page(write_shown(tmp_path / "b"))
    for tag, attributes in shown.tags:
        for name in FETCHING & attributes.keys():
            assert str(attributes[name]).startswith(("#", "data:,")), (tag, name)
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    policies = [found for tag, found in shown.tags if tag == "meta" and "http-equiv" in found]
    policy = str(policies[0]["content"])
    assert policy.startswith("default-src 'none';")
    for kind, text in (("script", shown.texts["script"][1]), ("style", shown.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert "unsafe" not in policy


def hostile_changes() -> dict[str, Any]:
    manifest = sample_manifest()
    first = manifest.programs[0]
    tensor = dataclasses.replace(first.signature.outputs[0], name=HOSTILE)
    signature = dataclasses.replace(first.signature, outputs=(tensor,))
    return {
        "name": HOSTILE,
        "source": dataclasses.replace(manifest.source, name=HOSTILE),
        "model": dataclasses.replace(manifest.model, rope=HOSTILE),
        "toolchain": {HOSTILE: HOSTILE},
        "checks": (Check(HOSTILE, HOSTILE, "pt2", 0.0, 1.0),),
        "programs": (dataclasses.replace(first, signature=signature, requires={HOSTILE: HOSTILE}),),
    }


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    plain = page(write_shown(tmp_path / "a"))
    shown = page(write_shown(tmp_path / "b", **hostile_changes()))
    assert HOSTILE in "".join(shown.texts["h1"])
    for tag in ("script", "img", "style", "link", "iframe"):
        assert [t for t, _ in shown.tags].count(tag) == [t for t, _ in plain.tags].count(tag)
    assert {name for _, found in shown.tags for name in found} <= {
        name for _, found in plain.tags for name in found
    }


def test_a_bundle_without_programs_or_weights(tmp_path: Path) -> None:
    contents = {name: text for name, text in CONTENTS.items() if name == "tokenizer.json"}
    changes = {"weights": "none", "weights_headers": {}, "has_chat_template": False}
    bundle = write_sample(
        tmp_path / "b", contents=contents, programs=(), checks=(), stop_tokens=(), **changes
    )
    shown = page(bundle)
    assert data(shown) == {"weights": [], "states": [], "graphs": []}
    assert not [found for _, found in shown.tags if found.get("id") in ("weights", "graph", "laws")]


def test_native_code_has_no_graph_to_show(tmp_path: Path) -> None:
    native = program("decode", sample_manifest().programs[1].signature, format="aoti")
    assert data(page(write_sample(tmp_path / "b", programs=(native,))))["graphs"] == []


def test_a_damaged_program_is_named(tmp_path: Path) -> None:
    bundle = write_sample(tmp_path / "b")
    with pytest.raises(IntegrityError, match=r"prefill\.pt2: not an ExportedProgram archive"):
        page(bundle)


def test_weights_by_part_and_dtype(tmp_path: Path) -> None:
    weights = read_weights(open_bundle(write_sample(tmp_path / "b")))
    assert [(weight.part, weight.dtype, weight.num_bytes) for weight in weights] == [
        ("model.embed_tokens", "f32", 128),
        ("model.norm", "f32", 16),
    ]
    assert sum(share.num_bytes for share in shares(weights)) == 144


def test_memory_of_rows_follows_batch_and_positions() -> None:
    (memory,) = state_memory(sample_manifest())
    assert memory.entries == ("prefill", "decode")
    states = sample_manifest().programs[0].signature
    assert memory.num_bytes(memory.batch, memory.length) == states.state_bytes
    assert memory.num_bytes(3, 5) == 3 * 5 * 2 * 2 * 4


def test_memory_of_a_pool_comes_in_pages() -> None:
    paged = program("decode_paged", PAGED, format="pt2")
    (memory,) = state_memory(sample_manifest(programs=(paged,)))
    assert (memory.layout, memory.page_size) == ("pool", 16)
    assert memory.num_bytes(2, 17) == 2 * 32 * 2 * 2


ROWS = {
    "rows": [
        {
            "method": "aoti, 2 threads",
            "ttft_ms": 57.25,
            "decode_tok_s": 101,
            "load_s": 1.3,
            "peak_memory_bytes": 412_000_000,
            "notes": "<b>bf16</b>",
        },
        {"method": "pt2", "ttft_ms": None},
    ]
}


def timed(tmp_path: Path, value: Any) -> Path:
    return write_shown(tmp_path / "b", contents={FILE_NAME: json.dumps(value).encode()})


def test_timings_are_shown_where_the_bundle_has_them(tmp_path: Path) -> None:
    cells = page(timed(tmp_path, ROWS)).texts["td"]
    for text in ("aoti, 2 threads", "57.2 ms", "101 tok/s", "1.3 s", "412.0 MB", "<b>bf16</b>"):
        assert text in cells
    assert not read_timings(open_bundle(write_shown(tmp_path / "without")))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "expected a JSON object, got a list"),
        ({}, "bench.json#rows: missing key"),
        ({"rows": [{"ttft_ms": 1}]}, "bench.json#rows[0].method: missing key"),
        ({"rows": [{"method": "a", "speed": 1}]}, "bench.json#rows[0].speed: unknown key"),
        ({"rows": [{"method": "a", "load_s": -1}]}, "expected `load_s` of at least 0, got -1.0"),
        ({"rows": [{"method": "a", "load_s": "1"}]}, "expected a number, got a string"),
        ({"rows": [{"method": "a", "load_s": float("nan")}]}, "expected a finite number"),
    ],
)
def test_timings_that_break_their_format(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(LlamaExportError, match=re.escape(message)):
        read_timings(open_bundle(timed(tmp_path, value)))


def test_timings_that_were_changed(tmp_path: Path) -> None:
    bundle = timed(tmp_path, ROWS)
    data = (bundle / FILE_NAME).read_bytes()
    (bundle / FILE_NAME).write_bytes(data.replace(b"101", b"999"))
    with pytest.raises(IntegrityError, match=r"bench\.json: damaged"):
        read_timings(open_bundle(bundle))
