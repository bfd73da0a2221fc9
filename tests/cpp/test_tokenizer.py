"""The C++ tokenizer gives the ids of the `tokenizers` library."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from llama_export.checkpoint.gguf_tokenizer import LLAMA3_SPLIT
from tests.cpp.building import output_of

pytestmark = pytest.mark.slow

ODDITIES = [
    *("", " ", "  ", "\n", "\r\n", "\t \n x", " \n\n  a", "a  b", "\u00a0a", "a\u3000\u3000b"),
    *("it's we'll I'D you'RE he'\u017f 'tis", "don\u2019t", "x'", "''s", "1", "12345678", "3.14"),
    *("\u0661\u0662\u0663\u0664", "\u2167\u00bd\u00b2", "\U0001d7d8\U0001d7d9", "e\u0301\u0301"),
    *("\u1680\u180e\u200b\u2028\u2029\u202f\u205f\ufeff", "\x00\x01\x7f\x85\x9f\xad"),
    *("\U0001f468\u200d\U0001f469\u200d\U0001f467!", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35"),
    *("<|begin|>", "a<|begin|><|begin|>b <|be", "plain text token", "\U0010ffff\ue000"),
    *("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "!!!???...", "def f(x):\n\treturn x**2  # ok\r\n"),
    *("\u4f60\u597d\uff0c\u4e16\u754c", "\u0645\u0631\u062d\u0628\u0627", "Stra\u00dfe \u0130"),
]
_PIECES = [
    *("the ", " and", "'s", "'LL", "  ", "\r\n", "123", "<|begin|>", "plain text", "\u0301"),
    *"abcXYZ019 _-'!.,\n\r\t\u00e9\u00df\u4f60\u0661\u00b2\u00a0\u2028\U0001f600",
]


def _corpus() -> list[str]:
    """Two thousand odd strings, the same each time."""
    draw = random.Random(2)
    made = ["".join(draw.choices(_PIECES, k=draw.randint(1, 40))) for _ in range(1500)]
    blocks = [(0x20, 0x600), (0x900, 0xE00), (0x2000, 0x2C00), (0x4E00, 0x4F00), (0x1F300, 0x1F600)]
    for _ in range(2000 - len(made) - len(ODDITIES)):
        low, high = draw.choice(blocks)
        made.append("".join(chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 30))))
    return ODDITIES + made


CORPUS = _corpus()


def _trained(pre_tokenizer: Any, **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|begin|>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("plain text", special=False)])
    return tokenizer


def _llama3() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated", invert=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = _trained(pre_tokenizers.Sequence([split, words]), ignore_merges=True)
    begin = tokenizer.token_to_id("<|begin|>")
    template = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tokenizer


def _smollm2() -> Tokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return _trained(pre_tokenizers.Sequence([digits, words]))


def _with_prefix_space() -> Tokenizer:
    return _trained(pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True))


@pytest.mark.parametrize("make", [_llama3, _smollm2, _with_prefix_space])
def test_two_thousand_odd_strings(make: Any, build_folder: Path, tmp_path: Path) -> None:
    tokenizer = make()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(CORPUS) == 2000
    output = output_of(
        build_folder / "tests" / "encode", tmp_path / "tokenizer.json", stdin=json.dumps(CORPUS)
    )
    wrong = []
    for text, found in zip(CORPUS, json.loads(output), strict=True):
        ids = tokenizer.encode(text).ids
        expected = {"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)}
        if found != expected:
            wrong.append((text, found, expected))
    assert not wrong, f"{len(wrong)} differ, such as {wrong[0]!r}"


def test_what_is_not_implemented_is_refused_by_its_key(
    build_folder: Path, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    path = tiny_checkpoint / "tokenizer.json"
    line = output_of(build_folder / "tests" / "encode", path, stdin="[]", status=1)
    assert line.startswith(f"TokenizerError\t{path}#model.unk_token: expected none")
    (tmp_path / "tokenizer.json").write_text("{")
    line = output_of(
        build_folder / "tests" / "encode", tmp_path / "tokenizer.json", stdin="[]", status=1
    )
    assert line.startswith(f"TokenizerError\t{tmp_path}/tokenizer.json: expected a tokenizer")
