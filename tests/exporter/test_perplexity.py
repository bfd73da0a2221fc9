"""Perplexity against transformers' own loss, window by window, each alone."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import llama_runtime
from llama_artifacts.errors import CompatibilityError, InputError, LlamaExportError, TokenizerError
from llama_export.build import build
from llama_export.cache import ProgramCache
from llama_export.perplexity import Perplexity, perplexities
from llama_export.recipe import Recipe
from llama_runtime import Entry
from llama_runtime.tokenizer import Tokenizer
from tests.runtime.loading import reference, rewrite, sealed
from tests.tiny import write_tiny, write_tokenizer

pytestmark = pytest.mark.slow  # it builds bundles of its own

WORDS = "the sky is blue because short waves of light are scattered more than long ones are"


def make_text(num_words: int, seed: int = 0) -> str:
    generator = torch.Generator().manual_seed(seed)
    words = WORDS.split()
    order = torch.randint(len(words), (num_words,), generator=generator)
    return " ".join(words[int(index)] for index in order)


TEXT = make_text(180)  # some 900 tokens of a character each


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do not write into it."""
    return built(tiny_checkpoint, tmp_path_factory.mktemp("scored") / "bundle")


def built(checkpoint: Path, output: Path, **choices: Any) -> Path:
    recipe = Recipe(
        str(checkpoint), output, ("log_probs_packed",), ("pt2",), **{"max_seq": 256, **choices}
    )
    return build(recipe, cache=ProgramCache()).folder


def expected_nll(checkpoint: Path, ids: list[int], window: int, stride: int) -> tuple[float, int]:
    """The documentation's loop: labels of tokens counted before are -100, the model shifts."""
    model = reference(checkpoint)
    total, count, previous = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        tokens = torch.tensor([ids[begin:end]])
        labels = tokens.clone()
        labels[:, : len(labels[0]) - (end - previous)] = -100
        num_scored = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            loss = float(model(tokens, labels=labels).loss)
        total, count, previous = total + loss * num_scored, count + num_scored, end
        if end == len(ids):
            break
    return total / count, count


@pytest.mark.parametrize(
    ("window", "stride", "num_words"),
    [(200, 100, 180), (256, 255, 180), (100, 7, 60), (2, 1, 20), (64, 63, 13), (256, 128, 1)],
)
def test_the_figures_are_those_of_each_window_alone(
    bundle: Path, tiny_checkpoint: Path, window: int, stride: int, num_words: int
) -> None:
    text = make_text(num_words)
    (found,) = perplexities([bundle], text, window=window, stride=stride)
    ids = Tokenizer.load(bundle).encode(text)
    nll, count = expected_nll(tiny_checkpoint, ids, window, stride)
    assert found.num_tokens == count == len(ids) - 1
    assert found.nll == pytest.approx(nll, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(nll * count / math.log(2) / len(text.encode()))
    assert (found.window, found.stride, found.format) == (window, stride, "pt2")
    assert found.dtype == "f32"


def test_windows_are_packed_into_few_calls(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = Entry.run

    def run(entry: Entry, states: Any, inputs: Any) -> Any:
        calls.append(len(inputs["tokens"]))
        return original(entry, states, inputs)

    monkeypatch.setattr(Entry, "run", run)
    (found,) = perplexities([bundle], TEXT, window=101, stride=50)
    largest = llama_runtime.load(bundle).entry("log_probs_packed").signature.dim("P").max
    num_windows = math.ceil((found.num_tokens - 100) / 50) + 1
    assert largest // 100 > 1
    assert len(calls) == math.ceil(num_windows / (largest // 100))
    assert max(calls) <= largest


def test_the_default_window_is_what_every_bundle_takes(
    bundle: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    shorter = built(tiny_checkpoint, tmp_path / "b", max_seq=64)
    first, second = perplexities([bundle, shorter], TEXT)
    assert (first.window, first.stride) == (second.window, second.stride) == (64, 32)
    assert first.nll == pytest.approx(second.nll, rel=1e-6)
    assert first.change is None
    assert second.change == pytest.approx(0, abs=1e-6)


def test_bundles_side_by_side(bundle: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    other = built(write_tiny(tmp_path / "c", seed=5), tmp_path / "b")
    narrow = built(tiny_checkpoint, tmp_path / "n", dtype="bf16")
    results = perplexities([bundle, other, narrow], TEXT, window=200)
    for result in results[1:]:
        expected = result.perplexity / results[0].perplexity - 1
        assert result.change == pytest.approx(expected)
    assert abs(results[1].change or 0) > 0.01
    assert 0 < abs(results[2].change or 0) < 0.01
    assert [result.dtype for result in results] == ["f32", "f32", "bf16"]


def test_other_tokens_are_not_compared_but_their_bits_are(bundle: Path, tmp_path: Path) -> None:
    """A tokenizer of bytes in place of characters; umlauts take two."""
    checkpoint = write_tiny(tmp_path / "c", vocab_size=300)
    write_tokenizer(checkpoint, 300)
    text = TEXT.replace("a", "ä")
    first, second = perplexities([bundle, built(checkpoint, tmp_path / "b")], text)
    assert second.num_tokens > first.num_tokens
    assert second.change is None
    for result in (first, second):
        bits = result.nll * result.num_tokens / math.log(2)
        assert result.bits_per_byte == pytest.approx(bits / len(text.encode()))


@pytest.mark.parametrize(
    ("settings", "text", "message"),
    [
        ({}, "", "expected a text, got an empty one"),
        ({"window": 1}, TEXT, "expected a window of 2 to 256 tokens, got 1"),
        ({"window": 257}, TEXT, "expected a window of 2 to 256 tokens, got 257"),
        ({"window": 50, "stride": 50}, TEXT, "expected a stride of 1 to 49"),
        ({"stride": 0}, TEXT, "expected a stride of 1 to 255"),
    ],
)
def test_what_cannot_be_scored(
    bundle: Path, settings: dict[str, int], text: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        perplexities([bundle], text, **settings)


def test_one_token_is_too_short_where_nothing_is_added_before_it(
    bundle: Path, tmp_path: Path
) -> None:
    plain = shutil.copytree(bundle, tmp_path / "b")
    path = plain / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    sealed(plain, "tokenizer.json")
    with pytest.raises(InputError, match="expected a text of at least 2 tokens, got 1"):
        perplexities([plain], "a")
    (found,) = perplexities([plain], "ab")
    assert found.num_tokens == 1


def test_a_bundle_without_the_entry_says_how_to_add_it(short_bundle: Path) -> None:
    with pytest.raises(CompatibilityError, match="no entry `log_probs_packed`") as caught:
        perplexities([short_bundle], TEXT)
    assert caught.value.hint is not None
    assert caught.value.hint.endswith(
        "llama-export build tiny --entry prefill --entry decode --entry log_probs_packed"
    )


def test_a_bundle_without_a_tokenizer(bundle: Path, tmp_path: Path) -> None:
    other = shutil.copytree(bundle, tmp_path / "b")
    rewrite(other, lambda manifest: dataclasses.replace(manifest, tokenizer=None))
    with pytest.raises(TokenizerError):
        perplexities([other], TEXT)
    with pytest.raises(LlamaExportError, match="not there in format onnx"):
        perplexities([bundle], TEXT, format="onnx")


def test_a_result_is_plain_numbers(bundle: Path) -> None:
    (found,) = perplexities([bundle], TEXT[:100])
    assert isinstance(found, Perplexity)
    assert all(type(value) in (str, int, float, type(None)) for value in vars(found).values())
