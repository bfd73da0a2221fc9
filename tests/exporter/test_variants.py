"""Variants: what their texts mean, and which are built where nobody asks."""

from __future__ import annotations

import pytest

from llama_artifacts.errors import BuildError
from llama_export.entries import registry, variants
from llama_export.entries.variants import Variant


def chosen(texts: list[str] | None, *names: str, device: str = "cpu") -> dict[str, list[str]]:
    specs = registry.expand(names)
    found = variants.choose(texts, specs, device)
    return {spec.name: [v.label(spec) for v in found[spec.name]] for spec in specs}


@pytest.mark.parametrize(
    ("text", "entry", "sizes", "stem"),
    [
        ("decode_paged:Rows=1", "decode_paged", {"Rows": 1}, "decode_paged.Rows=1"),
        ("step_paged:Rows=4,P=8", "step_paged", {"Rows": 4, "P": 8}, "step_paged.P=8,Rows=4"),
    ],
)
def test_a_text_names_an_entry_and_its_fixed_dimensions(
    text: str, entry: str, sizes: dict[str, int], stem: str
) -> None:
    variant = variants.parse(text)
    assert (variant.entry, variant.sizes) == (entry, sizes)
    assert variant.stem(registry.find(entry)) == stem


@pytest.mark.parametrize(
    "text",
    ["decode_paged", "decode_paged:", "decode_paged:Rows", "decode_paged:Rows=0", "decode:Rows=1,",
     "decode_paged:Rows=-1", "decode_paged:Rows=1 ", ":Rows=1", "none"],
)  # fmt: skip
def test_a_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(BuildError):
        variants.parse(text)


def test_a_paged_step_of_one_row_is_built_by_default_where_it_gains() -> None:
    assert chosen(None, "serving", "decode") == {
        "decode_paged": ["decode_paged:Rows=1"],
        "prefill_paged": [],
        "step_paged": [],
        "decode": [],
    }
    assert chosen(None, "serving", device="cuda")["decode_paged"] == []
    assert [v.formats for v in variants.DEFAULTS] == [("aoti",)]


def test_what_is_asked_for_replaces_the_defaults() -> None:
    found = chosen(["decode_paged:Rows=2", "decode_paged:Rows=2", "prefill:S=1"], "all")
    assert found["decode_paged"] == ["decode_paged:Rows=2"]
    assert found["prefill"] == ["prefill:S=1"]
    assert chosen(["none"], "serving")["decode_paged"] == []


def test_a_variant_of_what_is_not_built_is_refused() -> None:
    with pytest.raises(BuildError, match="variant of `prefill`, which is not built"):
        chosen(["prefill:S=1"], "serving")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"S": 1}, "no dynamic dimension `S`"), ({"Rows": 65}, "expected Rows from 1 to 64, got 65")],
)
def test_what_the_entry_cannot_fix_is_refused(sizes: dict[str, int], message: str) -> None:
    from tests.exporter.test_entries import SIZES

    with pytest.raises(BuildError, match=message):
        registry.find("decode_paged").signature(SIZES, Variant("decode_paged", sizes).sizes)
