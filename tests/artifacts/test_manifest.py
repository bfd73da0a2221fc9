from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_artifacts import manifest as manifests
from llama_artifacts.dtypes import BY_NAME
from llama_artifacts.errors import CompatibilityError, LlamaExportError, ManifestError
from llama_artifacts.manifest import FILE_NAME, FORMATS, MAX_MANIFEST_BYTES, from_json, to_json
from llama_artifacts.signature import Bounds, Dim, Signature, StateSpec, TensorSpec
from tests.bundles import CONTENTS, describe, sample_manifest

WHERE = "b/manifest.json"
DELETED = object()
DIM = "programs[0].signature.dims[0]"
INPUT = "programs[0].signature.inputs[0]"


def sample_value() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(to_json(sample_manifest()))
    return value


def changed(path: str, new: object) -> bytes:
    """The sample as JSON, with the value at a key path set or deleted."""
    value = sample_value()
    keys = [int(key) if key.isdigit() else key for key in path.replace("]", "").split("/")]
    node: Any = value
    for key in keys[:-1]:
        node = node[key]
    if new is DELETED:
        del node[keys[-1]]
    else:
        node[keys[-1]] = new
    return json.dumps(value).encode()


def message(data: bytes) -> str:
    with pytest.raises(ManifestError) as caught:
        from_json(data, where=WHERE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


text = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=12)
size = st.integers(1, 2**40)
small = st.integers(1, 2**15)
entry_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}(<[1-9][0-9]{0,8}>)?", fullmatch=True)
dtype = st.sampled_from(sorted(BY_NAME))


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    dims = draw(st.lists(st.sampled_from("BSPM"), unique=True, max_size=3))
    shapes = st.lists(small | st.sampled_from(dims) if dims else small, max_size=3).map(tuple)
    names = draw(st.lists(text.filter(bool), unique=True, min_size=2, max_size=5))
    bounds = st.none() | st.builds(Bounds, st.just(0), size, st.sampled_from([None, *dims]))
    inputs = [TensorSpec(name, draw(dtype), draw(shapes), draw(bounds)) for name in names[1:]]
    inputs[0] = dataclasses.replace(inputs[0], shape=(*dims, 3))
    states = draw(
        st.lists(st.builds(StateSpec, st.just(names[0]), dtype, st.tuples(size)), max_size=1)
    )
    outputs = (TensorSpec("out", draw(dtype), draw(shapes)),)
    ranges = tuple(Dim(name, 1, draw(size)) for name in dims)
    return Signature(tuple(inputs), tuple(states), outputs, ranges)


programs = st.builds(
    manifests.Program,
    entry=entry_names,
    format=st.sampled_from(FORMATS),
    file=st.sampled_from(sorted(CONTENTS)),
    dtype=dtype,
    target=st.builds(
        manifests.Target,
        st.sampled_from(("cpu", "cuda")),
        st.none() | text,
        st.none() | text,
        st.lists(text, max_size=2).map(tuple),
        st.none() | text,
    ),
    signature=signatures(),
    constants=st.lists(text, max_size=2).map(tuple),
    requires=st.dictionaries(text, text, max_size=2),
)
finite = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)
checks = st.builds(manifests.Check, text, text, st.sampled_from(FORMATS), finite, finite)
samples = st.builds(
    sample_manifest,
    name=text,
    source=st.builds(manifests.Source, text, text, st.none() | text),
    batch=size,
    stop_tokens=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    toolchain=st.dictionaries(text, text, max_size=3),
    programs=st.lists(programs, max_size=2).map(tuple),
    checks=st.lists(checks, max_size=2).map(tuple),
)


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
    ("path", "new", "expected"),
    [
        ("name", DELETED, "#name: missing key"),
        ("schema", DELETED, "#schema: expected a version such as `1.0`, got null"),
        ("model/rope", DELETED, "#model.rope: missing key"),
        ("programs/0/signature/dims/0/max", DELETED, f"#{DIM}.max: missing key"),
        ("files/decode.pt2/sha256", DELETED, "#files.decode.pt2.sha256: missing key"),
        ("extra", 1, "#extra: unknown key"),
        ("programs/1/extra", 1, "#programs[1].extra: unknown key"),
        ("programs/0/signature/dims/0/step", 1, f"#{DIM}.step: unknown key"),
        ("name", 1, "#name: expected a string, got an integer"),
        ("source", "hub", "#source: expected an object, got a string"),
        ("source/revision", 1, "#source.revision: expected a string, got an integer"),
        ("model/vocab_size", 8.0, "#model.vocab_size: expected an integer, got a number"),
        ("model/tie_word_embeddings", 0, "#model.tie_word_embeddings: expected a boolean, got an integer"),
        (
            "weights",
            "linked",
            "#weights: expected one of `copy`, `link`, `reference`, `none`, got `linked`",
        ),
        (
            "weights",
            None,
            "#weights: expected one of `copy`, `link`, `reference`, `none`, got null",
        ),
        ("tokenizer", "bpe", "#tokenizer: expected one of `tokenizers`, got `bpe`"),
        ("has_chat_template", None, "#has_chat_template: expected a boolean, got null"),
        ("stop_tokens", 2, "#stop_tokens: expected a list, got an integer"),
        ("stop_tokens/0", "2", "#stop_tokens[0]: expected an integer, got a string"),
        ("stop_tokens/0", -1, "#stop_tokens[0]: expected at least 0, got -1"),
        ("toolchain", [], "#toolchain: expected an object, got a list"),
        ("toolchain/torch", 2.13, "#toolchain.torch: expected a string, got a number"),
        ("programs", {}, "#programs: expected a list, got an object"),
        ("programs/0", None, "#programs[0]: expected an object, got null"),
        ("programs/0/format", "pte", "#programs[0].format: expected one of `pt2`, `aoti`, `onnx`, got `pte`"),
        ("programs/0/dtype", "f33", "#programs[0].dtype: unknown dtype `f33`"),
        ("programs/0/target/device", "tpu", "#programs[0].target.device: expected one of `cpu`, `cuda`, got `tpu`"),
        ("programs/0/target/cpu_flags", "avx2", "#programs[0].target.cpu_flags: expected a list, got a string"),
        ("programs/0/constants/1", 7, "#programs[0].constants[1]: expected a string, got an integer"),
        ("programs/0/requires/torch", None, "#programs[0].requires.torch: expected a string, got null"),
        ("checks/0/figure", True, "#checks[0].figure: expected a number, got a boolean"),
        ("checks/0/figure", float("nan"), "#checks[0].figure: expected a finite number, got `nan`"),
        ("checks/0/limit", float("inf"), "#checks[0].limit: expected a finite number, got `inf`"),
        ("checks/0/limit", 10**400, "#checks[0].limit: expected an integer of 64 bits"),
        ("dtype", "f33", "#dtype: unknown dtype `f33`"),
        ("batch", True, "#batch: expected an integer, got a boolean"),
        ("batch", 0, "#batch: expected at least 1, got 0"),
        ("max_seq", -1, "#max_seq: expected at least 1, got -1"),
        ("max_seq", 2**64, "#max_seq: expected an integer of 64 bits"),
        ("max_seq", float("nan"), "#max_seq: expected a finite number, got `nan`"),
        ("model/num_heads", -2, "#model.num_heads: expected at least 1, got -2"),
        ("files/decode.pt2/bytes", -1, "#files.decode.pt2.bytes: expected at least 0, got -1"),
        ("files/decode.pt2/bytes", True, "#files.decode.pt2.bytes: expected an integer, got a boolean"),
        ("files/decode.pt2/sha256", "AB", "#files.decode.pt2.sha256: expected 64 hexadecimal digits, got `AB`"),
        ("files/decode.pt2/sha256", "0" * 64 + "\n", "#files.decode.pt2.sha256: expected text without control characters, got `" + "0" * 64 + r"\n`"),
        ("programs/0/signature/dims/0/min", 99, f"#{DIM}: expected min <= max for `S`, got 99, 15"),
        ("programs/0/signature/dims/0/name", "S-1", f"#{DIM}.name: expected an identifier, got `S-1`"),
        ("programs/0/signature/dims", [], "#programs[0].signature: `tokens` has the undeclared dimension `S`"),
        ("programs/0/signature/inputs/1/values/span", "Q", "#programs[0].signature: `pos` has the undeclared dimension `Q`"),
        ("programs/0/signature/inputs/0/name", "pos", "#programs[0].signature: expected distinct input or state names, got `pos` twice"),
        ("programs/0/signature/inputs/0/shape/0", 0, f"#{INPUT}.shape[0]: expected at least 1, got 0"),
        ("programs/0/signature/inputs/0/shape/0", None, f"#{INPUT}.shape[0]: expected an integer or a string, got null"),
        ("programs/0/signature/inputs/0/dtype", "x" * 2000, f"#{INPUT}.dtype: expected at most 1000 characters, got 2000"),
        ("programs/0/signature/inputs/0/values/min", -2, f"#{INPUT}.values.min: expected at least -1, got -2"),
        ("programs/0/signature/states/0/shape/0", "B", "#programs[0].signature: `cache.0.key` has the undeclared dimension `B`"),
        ("programs/0/signature/outputs", [], "#programs[0].signature: expected at least one output"),
        ("programs/0/file", "other.pt2", ": program file `other.pt2` is not listed in `files`"),
        ("programs/0/file", "../decode.pt2", "#programs[0].file: expected a plain file name, got `../decode.pt2`"),
        (
            "files/weights.safetensors",
            DELETED,
            ": weights file `weights.safetensors` is not listed in `files`",
        ),
        ("weights", "none", ": weights `none` cannot have these weights files: `weights.safetensors`"),
        ("weights", "reference", ": weights `reference` cannot have these weights files: `weights.safetensors`"),
        ("weights_headers", {}, ": weights `copy` cannot have these weights files: none"),
        (
            "weights_headers/weights.safetensors",
            "x",
            "#weights_headers.weights.safetensors: expected 64 hexadecimal digits, got `x`",
        ),
        (
            "referenced",
            {"model.safetensors": {"bytes": 9, "sha256": "0" * 64}},
            ": weights file `model.safetensors` is not listed in `weights_headers`",
        ),
        (
            "referenced",
            {"weights.safetensors": {"bytes": 9, "sha256": "0" * 64}},
            ": `weights.safetensors` is in `files` and in `referenced`",
        ),
        (
            "referenced",
            {"../model.safetensors": {"bytes": 9, "sha256": "0" * 64}},
            "#referenced.../model.safetensors: expected a plain file name, got `../model.safetensors`",
        ),
        ("files/tokenizer.json", DELETED, ": `tokenizer.json` is not listed in `files`"),
        ("files/chat_template.jinja", DELETED, ": `chat_template.jinja` is not listed in `files`"),
    ],
)  # fmt: skip
def test_a_malformed_field_is_named_with_its_key_path(
    path: str, new: object, expected: str
) -> None:
    assert message(changed(path, new)) == WHERE + expected


@pytest.mark.parametrize(
    "name",
    ["../x", "/abs", "a/b", "", ".", "..", ".hidden", "a\\b", "C:x", "é", "x" * 201],
)
def test_a_listed_file_lies_beside_the_manifest(name: str) -> None:
    found = message(changed("files", files_with(name)))
    assert found.startswith(f"{WHERE}#files.{name[:50]}")
    assert f": expected a plain file name, got `{name[:50]}" in found


@pytest.mark.parametrize("name", [FILE_NAME, "model.sig"])
def test_what_is_made_after_the_list_is_not_in_it(name: str) -> None:
    found = message(changed("files", files_with(name)))
    assert found == f"{WHERE}: `{name}` is listed in `files`, which is made before it"


@pytest.mark.parametrize("name", ["a\x00b", "a\nb", "a\x1b[2J", "\ud800"])
def test_a_listed_file_has_a_printable_name(name: str) -> None:
    shown = ascii(name)[1:-1]
    expected = f"expected text without control characters, got `{shown}`"
    assert message(changed("files", files_with(name))) == f"{WHERE}#files.{shown}: {expected}"


def files_with(name: str) -> dict[str, Any]:
    files: dict[str, Any] = sample_value()["files"]
    return files | {name: dataclasses.asdict(describe(b""))}


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
    value["programs"][1]["shards"] = 2
    manifest = from_json(json.dumps(value).encode(), where=WHERE)
    assert manifest == sample_manifest(schema="1.7")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    expected = "bundle format 1.7 is newer than 1.0; ignored keys: novelty, programs[1].shards"
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


@pytest.mark.parametrize("place", ["schema", "weights", "name", "unknown"])
def test_nesting_at_the_limit_of_the_parser_is_no_traceback(place: str) -> None:
    data = json.dumps(sample_value()).encode()
    for depth in range(700, 1000, 7):
        nested = f'{{"{place}": {"[" * depth}{"]" * depth}, '.encode()
        text = nested + data[1:].replace(f'"{place}": '.encode(), b'"z": ', 1)
        with pytest.raises(ManifestError):
            from_json(text, where=WHERE)


def nodes(value: Any) -> Iterator[Any]:
    yield value
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, (dict, list)):
            yield from nodes(child)


def mutate(value: Any, dice: random.Random) -> None:
    """Deletes, replaces, moves or duplicates one node in place."""
    scraps: list[Any] = [
        None,
        True,
        -1,
        0,
        2**63,
        10**400,
        0.5,
        float("nan"),
        "",
        "S",
        "\ud800",
        [],
        {},
        [[]],
    ]
    node = dice.choice([node for node in nodes(value) if node])
    key = dice.choice(list(node) if isinstance(node, dict) else range(len(node)))
    kind = dice.randrange(4)
    if kind == 0:
        del node[key]
    elif kind == 1:
        node[key] = copy.deepcopy(dice.choice(scraps))
    elif kind == 2:
        node[key] = copy.deepcopy(dice.choice(list(nodes(value))))
    elif isinstance(node, dict):
        node[dice.choice(["", "x", "../x", "name", "max"])] = copy.deepcopy(node[key])
    else:
        node.append(copy.deepcopy(node[key]))


def flip(data: bytes, dice: random.Random) -> bytes:
    """Changes, cuts or repeats a few bytes."""
    result = bytearray(data)
    for _ in range(dice.randint(1, 3)):
        place = dice.randrange(len(result))
        kind = dice.randrange(4)
        if kind == 0:
            result[place] ^= 1 << dice.randrange(8)
        elif kind == 1:
            result[place] = dice.choice(b'{}[]",:0-.eNI\\\x00\xff')
        elif kind == 2:
            del result[place : place + dice.randint(1, 40)]
        else:
            result[place:place] = result[place : place + dice.randint(1, 40)]
    return bytes(result)


def attempt(data: bytes) -> bool:
    """Whether the manifest is accepted; anything but a known error is a failure of the test."""
    start = time.process_time()
    try:
        manifest = from_json(data, where=WHERE)
    except LlamaExportError as error:
        complaint = str(error)
    else:
        complaint = ""
        assert from_json(to_json(manifest), where=WHERE) == manifest
    assert time.process_time() - start < 0.5
    assert complaint.isprintable()
    assert len(complaint) < 1500
    return not complaint


@pytest.mark.parametrize("seed", range(6))
def test_mutated_values_are_read_or_refused(seed: int) -> None:
    dice = random.Random(seed)
    base = sample_value()
    base["programs"] = base["programs"][:1]
    outcomes = []
    for _ in range(250):
        value = copy.deepcopy(base)
        for _ in range(dice.randint(1, 2)):
            mutate(value, dice)
        outcomes.append(attempt(json.dumps(value).encode()))
    assert 0 < sum(outcomes) < 125


@pytest.mark.parametrize("seed", range(6))
def test_mutated_bytes_are_read_or_refused(seed: int) -> None:
    dice = random.Random(seed)
    data = to_json(sample_manifest())
    outcomes = [attempt(flip(data, dice)) for _ in range(250)]
    assert 0 < sum(outcomes) < 125


def test_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(to_json(sample_manifest()))
    assert manifests.read(tmp_path) == sample_manifest()


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
        manifests.read(folder)
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
