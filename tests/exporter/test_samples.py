"""Samples: the same prompts through the bundle and the reference, kept with their digest."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts import manifest_file
from llama_artifacts.manifest import Source
from llama_export import presets
from llama_export.build import build
from llama_export.recipe import Recipe
from llama_export.reference import Reference
from llama_export.report import Reporter
from llama_export.samples import FILE_NAME, NUM_NEW, write_samples
from llama_export.verify import verify
from llama_runtime.tokenizer import Tokenizer
from tests.runtime.loading import greedy_tokens, reduced, rewrite

pytestmark = pytest.mark.slow  # it builds a bundle of its own


class Notes(Reporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


class Straying(Reference):
    """Goes another way after five tokens."""

    def greedy(self, prompt: Sequence[int], **settings: Any) -> list[int]:
        tokens = super().greedy(prompt, **settings)
        return [*tokens[:5], *((token + 1) % 128 for token in tokens[5:])]


@pytest.fixture(scope="module")
def made(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`prefill` and `decode` as pt2. Do not write into it."""
    output = tmp_path_factory.mktemp("sampled") / "bundle"
    recipe = Recipe(str(tiny_checkpoint), output, ("prefill", "decode"), ("pt2",), max_seq=256)
    return build(recipe).folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "b")


def test_samples_are_those_of_both_and_are_kept(bundle: Path, tiny_checkpoint: Path) -> None:
    samples = write_samples(bundle, Reference.load(bundle), reporter=Reporter())
    prompts = [("plain", prompt) for prompt in presets.DEFAULT_PLAIN_PROMPTS]
    prompts += [("chat", prompt) for prompt in presets.DEFAULT_CHAT_PROMPTS]
    assert [(sample.kind, sample.prompt) for sample in samples] == prompts
    tokenizer = Tokenizer.load(bundle)
    for sample in samples:
        if sample.kind == "plain":
            ids = tokenizer.encode(sample.prompt)
        else:
            ids = tokenizer.encode_chat([{"role": "user", "content": sample.prompt}])
        expected = greedy_tokens(tiny_checkpoint, ids, NUM_NEW)
        expected = expected[: expected.index(2)] if 2 in expected else expected
        assert list(sample.tokens) == list(sample.reference_tokens) == expected
        assert sample.text == sample.reference_text == tokenizer.decode(expected)
        assert (sample.num_agreeing, sample.format) == (len(expected), "pt2")
    stored = json.loads((bundle / FILE_NAME).read_text())
    assert stored["samples"][3]["tokens"] == list(samples[3].tokens)
    assert stored["max_new"] == 32
    assert stored["reference"].startswith("transformers ")
    assert FILE_NAME in manifest_file.read(bundle).files
    assert all(result.passed for result in verify(bundle))


def test_the_same_samples_are_the_same_bytes(bundle: Path) -> None:
    reference = Reference.load(bundle)
    contents = []
    for _ in range(2):
        write_samples(bundle, reference, reporter=Reporter(), formats=("pt2", "onnx"))
        contents.append([path.read_bytes() for path in sorted(bundle.iterdir())])
    assert contents[0] == contents[1]


def test_where_the_two_part_is_counted(bundle: Path) -> None:
    samples = write_samples(bundle, Straying.load(bundle), reporter=Reporter())
    assert {sample.num_agreeing for sample in samples} == {5}
    assert all(sample.tokens != sample.reference_tokens for sample in samples)
    assert all(sample.text != sample.reference_text for sample in samples)


def test_a_full_state_ends_both(bundle: Path) -> None:
    rewrite(bundle, lambda manifest: dataclasses.replace(manifest, max_seq=35))
    samples = write_samples(bundle, Reference.load(bundle), reporter=Reporter())
    assert samples
    for sample in samples:
        assert sample.num_agreeing == len(sample.tokens) == len(sample.reference_tokens) < NUM_NEW


def test_prompts_that_do_not_fit_are_noted(short_bundle: Path, tmp_path: Path) -> None:
    bundle, notes = shutil.copytree(short_bundle, tmp_path / "b"), Notes()
    assert write_samples(bundle, Reference.load(bundle), reporter=notes) == ()
    assert len(notes.texts) == 4
    assert "no sample of 'The capital of France is': " in notes.texts[0]
    assert not (bundle / FILE_NAME).exists()


def test_bundles_that_cannot_speak_get_a_note_and_no_file(made: Path, tmp_path: Path) -> None:
    reference = Reference.load(made)
    cases = {
        "no samples: the bundle has no entry `prefill`": reduced(
            made, tmp_path / "1", lambda program: program.entry == "decode"
        ),
        "no samples: the bundle has no tokenizer": shutil.copytree(made, tmp_path / "2"),
    }
    rewrite(tmp_path / "2", lambda manifest: dataclasses.replace(manifest, tokenizer=None))
    for text, folder in cases.items():
        notes = Notes()
        assert write_samples(folder, reference, reporter=notes) == ()
        assert notes.texts == [text]
        assert not (folder / FILE_NAME).exists()
    notes = Notes()
    assert write_samples(made, reference, reporter=notes, formats=("onnx",)) == ()
    assert "no samples: " in notes.texts[0]
    assert "not there in format onnx" in notes.texts[0]


def test_a_bundle_of_a_preset_gets_its_prompts(bundle: Path) -> None:
    preset = presets.find("smollm2-135m-instruct")
    assert preset is not None
    source = Source("hub", preset.repository, preset.revision)
    rewrite(bundle, lambda manifest: dataclasses.replace(manifest, source=source))
    samples = write_samples(bundle, Reference.load(bundle), reporter=Reporter())
    # The prompt of several lines has characters that the tiny tokenizer takes as unknown.
    assert [s.prompt for s in samples if s.kind == "plain"] == list(preset.plain_prompts)
    assert [s.prompt for s in samples if s.kind == "chat"] == list(preset.chat_prompts)


@pytest.mark.parametrize(
    ("name", "repository", "found"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", None, "smollm2-135m-instruct"),
        ("smollm2-135m", None, "smollm2-135m"),
        ("anything", "HuggingFaceTB/SmolLM2-135M", "smollm2-135m"),
        ("smollm2-135m", "someone/smollm2-135m", None),
        ("smollm2-135m-mine", None, None),
    ],
)
def test_the_preset_of_a_source(name: str, repository: str | None, found: str | None) -> None:
    preset = presets.find_source(name, repository)
    assert (preset and preset.name) == found
