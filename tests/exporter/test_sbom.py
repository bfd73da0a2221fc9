"""The bill of materials: valid by the library's strict schema, complete, the same each time."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.bundle import open_bundle
from llama_artifacts.digests import sha256
from llama_artifacts.errors import BuildError, CompatibilityError
from llama_artifacts.manifest import Source
from llama_export.sbom import EPOCH_VARIABLE, to_json
from tests.bundles import CONTENTS, describe, sample_manifest, write_sample

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EPOCH_VARIABLE, raising=False)


@functools.cache
def validator() -> Any:
    """Of the format; it takes a second to import, which workers that run other files spare."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6)


def made(folder: Path, **changes: Any) -> dict[str, Any]:
    """The parsed document of a sample bundle with a changed manifest; it must be valid."""
    text = to_json(open_bundle(write_sample(folder, **changes)))
    assert validator().validate_str(text) is None
    value: dict[str, Any] = json.loads(text)
    return value


def test_every_file_with_its_digest(tmp_path: Path) -> None:
    found = {item["name"]: item for item in made(tmp_path / "b")["components"]}
    assert set(found) == {*CONTENTS, "manifest.json"}
    for name, item in found.items():
        assert item["type"] == "file"
        assert item["hashes"] == [{"alg": "SHA-256", "content": sha256(tmp_path / "b" / name)}]
    facts = {item["name"]: item["value"] for item in found["decode.onnx"]["properties"]}
    assert facts == {
        "llama-export:bytes": str(len(CONTENTS["decode.onnx"])),
        "llama-export:entry": "decode",
        "llama-export:format": "onnx",
        "llama-export:target": "cpu",
    }


def test_the_model_and_where_it_came_from(tmp_path: Path) -> None:
    source = Source("hub", "someone/Tiny-Llama", REVISION, "apache-2.0")
    model = made(tmp_path / "b", source=source)["metadata"]["component"]
    assert (model["type"], model["name"], model["version"]) == (
        "machine-learning-model",
        "tiny",
        REVISION,
    )
    assert model["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    url = f"https://huggingface.co/someone/Tiny-Llama/tree/{REVISION}"
    assert [link["url"] for link in model["externalReferences"]] == [url]


@pytest.mark.parametrize(
    ("license", "expected"),
    [
        ("MIT", [{"license": {"id": "MIT"}}]),
        ("MIT OR Apache-2.0", [{"expression": "MIT OR Apache-2.0"}]),
        ("llama3.1", [{"license": {"name": "llama3.1"}}]),
        (None, None),
    ],
)
def test_licences(tmp_path: Path, license: str | None, expected: Any) -> None:
    source = Source("folder", "tiny", license=license)
    model = made(tmp_path / "b", source=source)["metadata"]["component"]
    assert model.get("licenses") == expected
    assert "externalReferences" not in model


def test_the_toolchain(tmp_path: Path) -> None:
    tools = made(tmp_path / "b")["metadata"]["tools"]["components"]
    assert {tool["purl"] for tool in tools} == {
        "pkg:pypi/torch@2.13.0",
        "pkg:pypi/llama-export@0.1.0",
    }


def test_the_model_card(tmp_path: Path) -> None:
    card = made(tmp_path / "b")["metadata"]["component"]["modelCard"]
    inputs = [item["format"] for item in card["modelParameters"]["inputs"]]
    assert "prefill: tokens i32 [1, S]" in inputs
    assert card["quantitativeAnalysis"]["performanceMetrics"] == [
        {"type": "parity, at most 0.0002", "value": "1.5e-05", "slice": "decode pt2"}
    ]
    facts = {item["name"]: item["value"] for item in card["properties"]}
    assert facts["llama-export:model:num_layers"] == "1"


def test_no_checks_no_metrics(tmp_path: Path) -> None:
    card = made(tmp_path / "b", checks=())["metadata"]["component"]["modelCard"]
    assert "quantitativeAnalysis" not in card


def test_one_bundle_gives_one_text_and_another_gives_another_number(tmp_path: Path) -> None:
    first = to_json(open_bundle(write_sample(tmp_path / "a")))
    assert to_json(open_bundle(write_sample(tmp_path / "moved" / "b"))) == first
    assert "timestamp" not in first
    other = made(tmp_path / "c", name="other")
    assert other["serialNumber"] != json.loads(first)["serialNumber"]
    assert other["serialNumber"].startswith("urn:uuid:")


def test_a_time_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EPOCH_VARIABLE, "86400")
    assert made(tmp_path / "b")["metadata"]["timestamp"] == "1970-01-02T00:00:00+00:00"


@pytest.mark.parametrize("text", ["now", "-1", "1e9", "999999999999", "9" * 400])
def test_a_time_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(EPOCH_VARIABLE, text)
    with pytest.raises(BuildError, match="expected seconds since 1970"):
        to_json(open_bundle(write_sample(tmp_path / "b")))


def test_a_native_program_with_a_variant(tmp_path: Path) -> None:
    general = sample_manifest().programs[1]
    target = dataclasses.replace(general.target, machine="x86_64", isa="avx512")
    variant = dataclasses.replace(general, file="x.pt2", target=target, variant={"Rows": 1})
    contents = {**CONTENTS, "x.pt2": b"native"}
    value = made(
        tmp_path / "b",
        contents=contents,
        programs=(*sample_manifest().programs, variant),
        files={name: describe(data) for name, data in contents.items()},
    )
    item = next(item for item in value["components"] if item["name"] == "x.pt2")
    facts = {fact["name"]: fact["value"] for fact in item["properties"]}
    assert facts["llama-export:entry"] == "decode:Rows=1"
    assert facts["llama-export:target"] == "cpu x86_64 avx512"


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("cyclonedx")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cyclonedx", None)
    with pytest.raises(CompatibilityError) as caught:
        to_json(open_bundle(write_sample(tmp_path / "b")))
    assert caught.value.hint == "pip install 'llama-export[sbom]'"
