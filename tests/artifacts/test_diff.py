from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.bundle import open_bundle
from llama_artifacts.diff import Change, compare
from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import BLOCK_BYTES, Check, File, Source
from llama_artifacts.signature import Dim
from tests.artifacts.patches import apply, reseal
from tests.bundles import CONTENTS, MODEL, sample_manifest, sample_program, write_sample

WEIGHTS = "weights.safetensors"
MANIFEST = sample_manifest()
PREFILL, DECODE, ONNX = MANIFEST.programs


def changes(folder: Path, **changed: Any) -> tuple[Change, ...]:
    """What differs between the sample and one with some fields of its manifest changed."""
    first = open_bundle(write_sample(folder / "a"))
    return compare(first, open_bundle(write_sample(folder / "b", **changed)))


def test_copies_do_not_differ(tmp_path: Path) -> None:
    assert changes(tmp_path) == ()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"source": Source("hub", "o/tiny", "abc")},
            [
                Change("source", "source.kind", "folder", "hub"),
                Change("source", "source.name", "tiny", "o/tiny"),
                Change("source", "source.revision", "null", "abc"),
            ],
        ),
        (
            {"model": dataclasses.replace(MODEL, num_layers=2), "stop_tokens": (2,)},
            [
                Change("config", "model.num_layers", "1", "2"),
                Change("config", "stop_tokens", "[2, 7]", "[2]"),
            ],
        ),
        (
            {"toolchain": {"torch": "2.14.0"}},
            [
                Change("toolchain", "toolchain.llama-export", "0.1.0", None),
                Change("toolchain", "toolchain.torch", "2.13.0", "2.14.0"),
            ],
        ),
        (
            {"checks": (Check("parity", "decode", "pt2", 3e-5, 2e-4),)},
            [Change("checks", "parity decode pt2", "1.5e-05 of 0.0002", "3e-05 of 0.0002")],
        ),
        (
            {"checks": ()},
            [Change("checks", "parity decode pt2", "1.5e-05 of 0.0002", None)],
        ),
        (
            {"programs": (PREFILL, dataclasses.replace(DECODE, requires={"torch": "2.14"}), ONNX)},
            [Change("programs", "decode pt2 cpu requires.torch", "2.13", "2.14")],
        ),
        (
            {
                "programs": (
                    dataclasses.replace(
                        PREFILL,
                        signature=dataclasses.replace(PREFILL.signature, dims=(Dim("S", 1, 9),)),
                    ),
                    DECODE,
                    ONNX,
                )
            },
            [Change("signatures", "prefill dims.S.max", "15", "9")],
        ),
    ],
)
def test_a_changed_field_is_told_with_both_values(
    tmp_path: Path, changed: dict[str, Any], expected: list[Change]
) -> None:
    assert list(changes(tmp_path, **changed)) == expected


def test_a_signature_that_changed_in_every_format_is_told_once(tmp_path: Path) -> None:
    programs = [
        dataclasses.replace(
            program,
            signature=dataclasses.replace(
                program.signature,
                outputs=(dataclasses.replace(program.signature.outputs[0], dtype="bf16"),),
            ),
        )
        for program in (DECODE, ONNX)
    ]
    found = changes(tmp_path, programs=(PREFILL, *programs))
    assert found == (Change("signatures", "decode outputs.logits.dtype", "f32", "bf16"),)


def test_added_removed_and_changed_programs_and_files(tmp_path: Path) -> None:
    contents = {**CONTENTS, "decode.pt2": b"a new program", "config.json": b"{}"}
    del contents["decode.onnx"]
    programs = (PREFILL, DECODE, sample_program("prefill", "onnx", "prefill.pt2"))
    found = changes(tmp_path, contents=contents, programs=programs)
    assert [(x.area, x.name, x.before is None, x.after is None) for x in found] == [
        ("programs", "decode onnx cpu", False, True),
        ("programs", "decode pt2 cpu", False, False),
        ("programs", "prefill onnx cpu", True, False),
        ("files", "config.json", True, False),
    ]
    assert found[1].before == "19 bytes, sha256 72377243eebf..."


def with_weights(folder: Path, *steps: dict[str, Any]) -> tuple[Change, ...]:
    first, second = write_sample(folder / "a"), write_sample(folder / "b")
    for step in steps:
        apply(second, {"file": WEIGHTS, **step})
    reseal(second)
    return compare(open_bundle(first), open_bundle(second))


def test_the_tensors_whose_values_changed_are_told(tmp_path: Path) -> None:
    data = CONTENTS[WEIGHTS][:-1] + b"\x01"
    found = with_weights(tmp_path, {"do": "write", "hex": data.hex()})
    assert found == (Change("weights", "model.norm.weight", "f32 [4]", "f32 [4], other values"),)


def test_other_names_shapes_and_dtypes_of_tensors_are_told(tmp_path: Path) -> None:
    new = {"dtype": "I32", "shape": [2, 2], "data_offsets": [128, 144]}
    operations = [
        {"op": "replace", "path": "/model.embed_tokens.weight/shape", "value": [4, 8]},
        {"op": "remove", "path": "/model.norm.weight"},
        {"op": "add", "path": "/model.extra", "value": new},
    ]
    found = with_weights(tmp_path, {"do": "patch", "patch": operations})
    assert found == (
        Change("weights", "model.embed_tokens.weight", "f32 [8, 4]", "f32 [4, 8]"),
        Change("weights", "model.extra", None, "i32 [2, 2]"),
        Change("weights", "model.norm.weight", "f32 [4]", None),
    )


def test_the_same_tensors_in_another_file_are_another_layout(tmp_path: Path) -> None:
    metadata = {"op": "add", "path": "/__metadata__", "value": {"format": "pt"}}
    (found,) = with_weights(tmp_path, {"do": "patch", "patch": [metadata]})
    assert (found.area, found.name) == ("weights", "layout")


def test_that_only_one_lists_blocks_is_no_difference(tmp_path: Path) -> None:
    """As of weights on the hub, whose blocks are known to those alone who have fetched them."""
    name, size = "model.safetensors", BLOCK_BYTES + 1
    digest, blocks = "0" * 64, ("1" * 64, "2" * 64)
    sides = []
    for number, file in enumerate((File(size, digest), File(size, digest, blocks))):
        folder = write_sample(
            tmp_path / str(number),
            weights="reference",
            referenced={name: file},
            weights_headers={**MANIFEST.weights_headers, name: digest},
        )
        sides.append(open_bundle(folder))
    assert compare(*sides) == ()


def test_programs_without_their_weights(tmp_path: Path) -> None:
    contents = {name: data for name, data in CONTENTS.items() if name != WEIGHTS}
    found = changes(tmp_path, contents=contents, weights="none", weights_headers={})
    assert [(x.area, x.name, x.after) for x in found] == [
        ("config", "weights", "none"),
        ("weights", WEIGHTS, None),
    ]


def test_weights_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"b/weights\.safetensors"):
        with_weights(tmp_path, {"do": "write", "text": "not weights at all"})


def test_every_field_of_the_manifest_is_compared(tmp_path: Path) -> None:
    """Also fields that later versions add: an edit of any value is told."""
    first = open_bundle(write_sample(tmp_path / "a"))
    value = json.loads((tmp_path / "a" / "manifest.json").read_bytes())
    edited = {"name": "x", "max_seq": 15, "batch": 2, "dtype": "bf16", "stop_tokens": [1]}
    for key, new in edited.items():
        folder = write_sample(tmp_path / key)
        (folder / "manifest.json").write_text(json.dumps({**value, key: new}))
        assert [x.name for x in compare(first, open_bundle(folder))] == [key]
