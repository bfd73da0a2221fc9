from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from llama_artifacts.errors import LlamaExportError
from llama_artifacts.manifest import Manifest
from llama_artifacts.manifest_file import from_json, to_json
from tests.artifacts.manifest_samples import sample_value, samples
from tests.bundles import sample_manifest

FOLDER = Path(__file__).parents[2] / "artifacts" / "schema"
SCHEMA: dict[str, Any] = json.loads((FOLDER / "manifest-v1.schema.json").read_bytes())


@functools.cache
def validator() -> Any:
    """Of the schema; jsonschema takes seconds to import, which workers that run other files spare."""
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(SCHEMA)
    return Draft202012Validator(SCHEMA)


def test_the_file_is_what_the_dataclasses_say() -> None:
    command = [sys.executable, str(FOLDER / "generate.py"), "--check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_a_schema_that_differs_is_told(tmp_path: Path) -> None:
    script = tmp_path / "generate.py"
    script.write_text((FOLDER / "generate.py").read_text())
    (tmp_path / "manifest-v1.schema.json").write_text("{}")
    command = [sys.executable, str(script), "--check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "not what the dataclasses say" in found.stderr
    subprocess.run([sys.executable, str(script)], check=True)
    assert json.loads((tmp_path / "manifest-v1.schema.json").read_bytes()) == SCHEMA


def test_it_is_a_schema_that_lets_nothing_unknown_through() -> None:
    objects = [SCHEMA, *SCHEMA["$defs"].values()]
    assert all(node["additionalProperties"] is False for node in objects)
    assert all(node["description"].endswith(".") or ";" in node["description"] for node in objects)


@given(samples)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_every_manifest_that_can_be_written_is_valid(manifest: Manifest) -> None:
    validator().validate(json.loads(to_json(manifest)))


def test_the_manifest_of_the_golden_bundle_is_valid() -> None:
    folder = Path(__file__).parents[1] / "golden" / "v1" / "bundle"
    validator().validate(json.loads((folder / "manifest.json").read_bytes()))


@pytest.mark.slow
def test_the_manifest_of_a_new_bundle_is_valid(short_bundle: Path) -> None:
    validator().validate(json.loads((short_bundle / "manifest.json").read_bytes()))


def put(*keys: str | int) -> Callable[[dict[str, Any], object], None]:
    def change(value: Any, new: object) -> None:
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = new

    return change


@pytest.mark.parametrize(
    ("change", "new"),
    [
        (put("extra"), 1),
        (put("programs", 0, "extra"), 1),
        (put("schema"), "2.0"),
        (put("schema"), "1.01"),
        (put("name"), "a\x1b"),
        (put("name"), "x" * 1001),
        (put("batch"), 0),
        (put("batch"), 2**63),
        (put("batch"), "1"),
        (put("dtype"), "f33"),
        (put("weights_headers", "weights.safetensors"), "0" * 63),
        (put("referenced"), {"../x": {"bytes": 0, "sha256": "0" * 64}}),
        (put("files", "../x"), {"bytes": 0, "sha256": "0" * 64}),
        (put("files", "decode.pt2", "bytes"), -1),
        (put("programs", 0, "entry"), "../decode"),
        (put("programs", 0, "format"), "pte"),
        (put("programs", 0, "signature", "inputs", 0, "shape"), [1] * 9),
        (put("programs", 0, "signature", "inputs", 0, "shape"), [0]),
        (put("programs", 0, "signature", "inputs", 0, "shape"), ["a-b"]),
        (put("programs", 0, "signature", "inputs", 0, "values", "min"), -2),
        (put("programs", 0, "variant"), {"Rows": 0}),
    ],
)  # fmt: skip
def test_schema_and_reader_refuse_the_same(change: Any, new: object) -> None:
    value = sample_value()
    validator().validate(value)
    change(value, new)
    assert not validator().is_valid(value)
    with pytest.raises(LlamaExportError):
        from_json(json.dumps(value).encode(), where="f")


def test_a_missing_key_is_refused_by_both_unless_it_has_a_default() -> None:
    full = json.loads(to_json(sample_manifest()))
    for key in full:
        value = {name: item for name, item in full.items() if name != key}
        try:
            from_json(json.dumps(value).encode(), where="f")
        except LlamaExportError:
            is_read = False
        else:
            is_read = True
        assert validator().is_valid(value) == is_read, key
