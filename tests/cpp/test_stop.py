"""Stop texts end a text in C++ where they end it in Python."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import llama_runtime
from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from llama_artifacts.bundle import describe
from llama_runtime.stop import StopTexts
from tests.cpp.building import output_of

pytestmark = pytest.mark.slow

Case = tuple[list[str], list[str]]


def _cases() -> list[Case]:
    """Stop texts over few characters, so that they overlap, and a text in uneven pieces."""
    draw = random.Random(3)
    cases: list[Case] = [([], ["a", "b"]), (["aab"], ["aaab"]), (["b", "ab"], ["xa", "by"])]
    for _ in range(400):
        alphabet = "ab" if draw.random() < 0.7 else "a\u00e9\u4f60\U0001f600"
        stops = [
            "".join(draw.choices(alphabet, k=draw.randint(1, 6))) for _ in range(draw.randint(0, 3))
        ]
        pieces = ["".join(draw.choices(alphabet, k=draw.randint(0, 4))) for _ in range(8)]
        cases.append((stops, pieces))
    return cases


def _in_python(case: Case) -> list[object]:
    stops = StopTexts(case[0])
    pieces = [stops.push(piece) for piece in case[1]]
    return [[*pieces, stops.finish()], stops.matched]


def test_what_is_passed_on_is_that_of_python(build_folder: Path) -> None:
    cases = _cases()
    found = json.loads(output_of(build_folder / "tests" / "stop", stdin=json.dumps(cases)))
    expected = [_in_python(case) for case in cases]
    assert sum(matched is not None for _, matched in expected) > 100
    assert found == expected


@pytest.fixture(scope="module")
def readable(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with a tokenizer that gives each of its 128 ids a character."""
    bundle = tmp_path_factory.mktemp("readable") / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())[:128]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(bundle / "tokenizer.json"))
    manifest = manifest_file.read(bundle)
    files = {**manifest.files, "tokenizer.json": describe(bundle / "tokenizer.json")}
    manifest = dataclasses.replace(manifest, files=files)
    (bundle / manifests.FILE_NAME).write_bytes(manifest_file.to_json(manifest))
    return bundle


@pytest.mark.parametrize("num_before", [1, 9, 20])
def test_a_text_ends_before_its_stop_text(
    num_before: int, build_folder: Path, readable: Path
) -> None:
    options = ("-p", "Hi", "--max-new", "24")
    text = output_of(build_folder / "llama-run", readable, *options)[:-1]
    bundle = llama_runtime.load(readable, format="aoti")
    assert text == "".join(bundle.generate("Hi", chat=False, max_new=24))
    stop = text[num_before : num_before + 3]
    expected = "".join(bundle.generate("Hi", chat=False, max_new=24, stop=[stop, "never"]))
    assert len(expected) < len(text)
    stops = ("--stop", stop, "--stop", "never")
    assert output_of(build_folder / "llama-run", readable, *options, *stops) == f"{expected}\n"
