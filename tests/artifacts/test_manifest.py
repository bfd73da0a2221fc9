"""Manifests as they are written and read, whole."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from llama_artifacts.errors import CompatibilityError, ManifestError
from llama_artifacts.manifest import FILE_NAME
from llama_artifacts.manifest_file import MAX_MANIFEST_BYTES, from_json, to_json
from llama_artifacts.signature import StateSpec
from tests.artifacts.manifest_samples import WHERE, changed, message, nodes, sample_value, samples
from tests.bundles import sample_manifest


@given(samples)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_back(manifest: manifests.Manifest) -> None:
    data = to_json(manifest)
    assert from_json(data, where=WHERE) == manifest
    assert to_json(from_json(data, where=WHERE)) == data


def test_json_is_canonical() -> None:
    data = to_json(sample_manifest(name="läma"))
    value = json.loads(data)
    expected = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert data == expected.encode()
    assert "läma".encode() in data
    assert all(list(node) == sorted(node) for node in nodes(value) if isinstance(node, dict))


def test_equal_manifests_have_the_same_bytes() -> None:
    first = sample_manifest()
    check = dataclasses.replace(first.checks[0], figure=2.0, limit=-0.0)
    second = dataclasses.replace(
        first,
        files=dict(reversed(first.files.items())),
        toolchain=dict(reversed(first.toolchain.items())),
        checks=(dataclasses.replace(check, figure=2, limit=0.0),),
    )
    first = dataclasses.replace(first, checks=(check,))
    assert first == second
    assert to_json(first) == to_json(second)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"checks": ("figure", float("nan"))},
            "checks[0].figure: expected a finite number, got `nan`",
        ),
        (
            {"checks": ("limit", float("inf"))},
            "checks[0].limit: expected a finite number, got `inf`",
        ),
        ({"name": "a\udcff"}, r"name: expected text without control characters, got `a\udcff`"),
        ({"name": "a\x1b"}, r"name: expected text without control characters, got `a\x1b`"),
        ({"max_seq": 2**63}, "max_seq: expected an integer of 64 bits"),
        ({"batch": True}, "batch: expected an integer, got a boolean"),
    ],
)
def test_nothing_is_written_that_cannot_be_read(changes: dict[str, Any], expected: str) -> None:
    manifest = sample_manifest()
    if "checks" in changes:
        name, figure = changes["checks"]
        changes = {"checks": (dataclasses.replace(manifest.checks[0], **{name: figure}),)}
    with pytest.raises(ManifestError) as caught:
        to_json(dataclasses.replace(manifest, **changes))
    assert str(caught.value) == f"{FILE_NAME}#{expected}"


def test_entries_are_named_once() -> None:
    assert sample_manifest().entries() == ("prefill", "decode")


@pytest.mark.parametrize(
    "schema",
    [
        "",
        "1",
        "1.",
        "1.0.0",
        "v1.0",
        "1.0 ",
        "01.0",
        "1.00",
        "\u0661.\u0660",
        "1e0.0",
        1.0,
        1,
        [[]],
        {},
    ],
)
def test_a_malformed_version_is_refused(schema: object) -> None:
    found = message(changed("schema", schema))
    assert found.startswith(f"{WHERE}#schema: expected a version such as `1.0`, got ")


@pytest.mark.parametrize("schema", ["0.9", "2.0", "999999.0"])
def test_another_major_version_is_refused_before_anything_else(schema: str) -> None:
    with pytest.raises(CompatibilityError) as caught:
        from_json(json.dumps({"schema": schema, "programs": 7}).encode(), where=WHERE)
    assert str(caught.value) == f"{WHERE}#schema: bundle format {schema} is not 1.x"
    assert caught.value.hint


def test_a_newer_minor_version_is_read_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    value = sample_value() | {"schema": "1.7", "novelty": {}}
    value["programs"][1]["weather"] = 2
    manifest = from_json(json.dumps(value).encode(), where=WHERE)
    assert manifest == sample_manifest(schema="1.7")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    expected = "bundle format 1.7 is newer than 1.0; ignored keys: novelty, programs[1].weather"
    assert record.getMessage() == f"{WHERE}: {expected}"


def test_a_newer_minor_version_is_held_to_what_is_known() -> None:
    data = json.dumps(sample_value() | {"schema": "1.7", "batch": "1"}).encode()
    assert message(data) == f"{WHERE}#batch: expected an integer, got a string"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "expected valid JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"{", "expected valid JSON: Expecting property name"),
        (b"{}{}", "expected valid JSON: Extra data"),
        (b"[]", "expected a JSON object, got a list"),
        (b"null", "expected a JSON object, got null"),
        (b'{"a": 1, "a": 2}', "duplicate JSON key `a`"),
        (b'{"a": {"b\\u001b": 1, "b\\u001b": 1}}', r"duplicate JSON key `b\x1b`"),
        (b'{"\xff": 1}', "expected UTF-8 text, got byte 2: invalid start byte"),
        (b"\xef\xbb\xbf{}", "expected valid JSON: Unexpected UTF-8 BOM"),
        (b'{"a":' * 200_000, "expected valid JSON: "),
        (b"[" * 200_000, "expected valid JSON: "),
        (
            b'{"schema": "1.0", "batch": 1' + b"0" * 9999 + b"}",
            "expected valid JSON: Exceeds the limit",
        ),
        (b"\x00" * 100, "expected valid JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(data: bytes, expected: str) -> None:
    assert message(data).startswith(f"{WHERE}: {expected}")


def test_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(to_json(sample_manifest()))
    assert manifest_file.read(tmp_path) == sample_manifest()


def write_nothing(path: Path) -> None:
    path.parent.mkdir()


def make_pipe(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path)


def write_huge(path: Path) -> None:
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(2**40)


def link_to(target: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.parent.mkdir()
        path.symlink_to(target)

    return make


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (write_nothing, ": expected a `manifest.json`, found a folder without it"),
        (lambda path: None, ": expected a `manifest.json`, found no such folder"),
        (lambda path: path.parent.write_bytes(b""), ": expected a `manifest.json`, found a file"),
        (link_to("gone"), ": expected a `manifest.json`, found a folder without it"),
        (link_to(FILE_NAME), "/manifest.json: cannot be read: Too many levels of symbolic links"),
        (link_to("/dev/zero"), "/manifest.json: expected a plain file"),
        (lambda path: path.mkdir(parents=True), "/manifest.json: expected a plain file"),
        (make_pipe, "/manifest.json: expected a plain file"),
        (write_huge, "/manifest.json: expected at most 16,777,216 bytes, got 1,099,511,627,776"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_bundle_is_named(
    tmp_path: Path, make: Callable[[Path], None], expected: str
) -> None:
    folder = tmp_path / "b"
    make(folder / FILE_NAME)
    with pytest.raises(ManifestError) as caught:
        manifest_file.read(folder)
    assert str(caught.value) == f"{folder}{expected}"
    assert caught.value.hint == "point at the folder that `llama-export build` wrote"


def test_a_large_manifest_is_decoded_quickly() -> None:
    manifest = sample_manifest()
    states = tuple(
        StateSpec(f"cache.{layer}.{part}", "bf16", (1, 8, 8192, 128))
        for layer in range(32)
        for part in ("key", "value")
    )
    program = manifest.programs[0]
    program = dataclasses.replace(
        program, signature=dataclasses.replace(program.signature, states=states)
    )
    manifest = dataclasses.replace(manifest, programs=(program,) * 50)
    data = to_json(manifest)
    assert len(data) < MAX_MANIFEST_BYTES // 20
    start = time.process_time()
    assert from_json(data, where=WHERE) == manifest
    assert time.process_time() - start < 1
