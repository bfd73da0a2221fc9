from __future__ import annotations

import json

from llama_export.entries import registry
from tests.cli.running import invoke


def test_every_entry_with_all_its_tensors_and_dimensions() -> None:
    text = invoke("entries").stdout
    for spec in registry.entries():
        block = text[text.index(f"{spec.name}\n  {spec.summary}\n") :].split("\n\n")[0]
        words = block.split()
        for named in (*spec.inputs, *spec.outputs, *spec.dims):
            assert named.name in words
        assert (spec.states or "none") in words


def test_names_of_sizes_are_explained() -> None:
    text = invoke("entries").stdout
    for name in ("Batch, MaxSeq, PageSize", "V, H, T", "rows", "pool"):
        assert f"\n  {name}  " in text


def test_json() -> None:
    found = {
        entry["name"]: entry for entry in json.loads(invoke("entries", "--json").stdout)["entries"]
    }
    assert list(found) == [spec.name for spec in registry.entries()]
    prefill = found["prefill"]
    assert prefill["states"] == "rows"
    assert prefill["inputs"][1] == {
        "name": "pos",
        "dtype": "i32",
        "shape": [],
        "values": {"min": 0, "max": "MaxSeq-2", "span": "S"},
    }
    assert prefill["dims"] == [{"name": "S", "min": 1, "max": 512, "limit": "MaxSeq-1"}]
    assert found["forward"]["states"] is None
