"""Every malformed field of a manifest is named with its key path."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from llama_artifacts.manifest import FILE_NAME
from tests.artifacts.manifest_samples import DELETED, WHERE, changed, message, sample_value
from tests.bundles import describe

DIM = "programs[0].signature.dims[0]"
INPUT = "programs[0].signature.inputs[0]"


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
