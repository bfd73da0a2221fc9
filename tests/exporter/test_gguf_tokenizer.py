from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, processors, trainers
from tokenizers import pre_tokenizers as pre

from llama_artifacts.errors import TokenizerError
from llama_export.checkpoint.gguf import GgufCheckpoint
from tests.tiny import write_tiny
from tests.tiny_gguf import write_tiny_gguf

# The pre-tokenizers as the published tokenizer.json of each kind have them.
LLAMA3_REGEX = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+"
    "[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
PRE_TOKENIZERS = {
    "smollm": lambda: pre.Sequence([pre.Digits(True), pre.ByteLevel(False)]),
    "llama-bpe": lambda: pre.Sequence(
        [pre.Split(Regex(LLAMA3_REGEX), "isolated"), pre.ByteLevel(False, use_regex=False)]
    ),
    "gpt-2": lambda: pre.ByteLevel(False),
    "default": lambda: pre.ByteLevel(False),
}
SENTENCES = [
    "the quick brown fox jumps over the lazy dog and the dog doesn't mind; it's 2024 now, 10000 m",
    "def main(argv):\n    return sum(int(x) for x in argv[1:])\n\n\n\tprint('naïve café', 12345)",
    "the then there these they're other another mother  together    weather  ",
    "Hello, world! HELLO WORLD! Привет мир 你好世界 😀😀 1999 2000 2001 300 300 300",
]
SPECIAL = ["<|begin|>", "<|end|>", "<|turn|>"]
FILE = "tokenizer.json"


def write_tokenizer(folder: Path, kind: str, *, vocab_size: int = 400) -> Tokenizer:
    """Trains a byte-level BPE of one kind and writes it as a checkpoint's `tokenizer.json`.

    As in the originals, SmolLM's special tokens come first, those of Llama 3 last, and Llama 3 has
    tokens that no merge makes. One added token is not special.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 8,
        special_tokens=[] if kind == "llama-bpe" else SPECIAL,
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "llama-bpe":
        tokenizer = _with_ignored_merges(tokenizer)
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
        begin = tokenizer.token_to_id("<|begin|>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A",
            pair="<|begin|> $A <|begin|>:1 $B:1",
            special_tokens=[("<|begin|>", begin)],
        )
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    (folder / FILE).write_text(tokenizer.to_str())
    return tokenizer


def _with_ignored_merges(tokenizer: Tokenizer) -> Tokenizer:
    content = json.loads(tokenizer.to_str())
    content["model"]["ignore_merges"] = True
    content["model"]["vocab"]["ĠunmergeableĠ"[:-1]] = len(content["model"]["vocab"])
    return Tokenizer.from_str(json.dumps(content))


def odd_strings(num_random: int = 400) -> list[str]:
    rng = random.Random(3)
    alphabets = [
        "abehortTHE", "0123456789", " \t\n\r\u00a0\u2003\u3000\u200b\u2028\x0b", "!'\"()[]{}<>|=+-_.,;",
        "éüñßİıſ", "你好世界한국어", "мирПривет", "مرحبا", "हिन्दी", "😀👍🏽\u200d❤\ufe0f", "\u0301\u0300\u0323",
        "\x00\x01\x04\x1b\x7f\x80", "²½Ⅻ٣५๓①𝟘", "\ufeff\ufffd\ue000\U0010ffff",
    ]  # fmt: skip
    words = [*SPECIAL, "<tool>", "<|begin", "the", " the", "'s", "'LL", " unmergeable", "[PAD399]"]
    fixed = [
        "", " ", "   ", "\n\n", "\r\n \r\n", "a" * 3000, " " * 200, "1" * 100, "1234567890 3.14 1,000",
        "they're THEY'RE it's", "x<|turn|>y", "<|end|><|end|> <|end|>", "unmergeable unmergeable",
        "tabs\t\tand  spaces   end ", "cafe\u0301 café", "a<tool>b <tool> c",
    ]  # fmt: skip
    for _ in range(num_random):
        parts = (
            rng.choice(words) if rng.random() < 0.2 else _some(rng, rng.choice(alphabets))
            for _ in range(rng.randint(1, 20))
        )
        fixed.append("".join(parts))
    return fixed


def _some(rng: random.Random, alphabet: str) -> str:
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 5)))


def convert(
    tmp_path: Path, kind: str, metadata: dict[str, Any] | None = None
) -> tuple[Tokenizer, GgufCheckpoint]:
    hf = write_tiny(tmp_path / "hf", has_tokenizer=False, num_hidden_layers=1, vocab_size=400)
    original = write_tokenizer(hf, kind)
    values = {"tokenizer.ggml.bos_token_id": original.token_to_id("<|begin|>")} | (metadata or {})
    return original, GgufCheckpoint.open(write_tiny_gguf(tmp_path, hf, pre=kind, metadata=values))


@pytest.mark.parametrize("kind", ["smollm", "llama-bpe", "gpt-2", "default"])
def test_ids_and_text_equal_those_of_the_original(kind: str, tmp_path: Path) -> None:
    # Llama 3 files often lack the key: its kind adds the token unless told otherwise.
    metadata = {"tokenizer.ggml.add_bos_token": None}
    original, checkpoint = convert(tmp_path, kind, metadata)
    restored = Tokenizer.from_str(checkpoint.assets()[FILE].decode())
    assert restored.get_vocab() == original.get_vocab()
    for text in odd_strings():
        for adds in (False, True):
            ids = original.encode(text, add_special_tokens=adds).ids
            assert restored.encode(text, add_special_tokens=adds).ids == ids, repr(text)
        for skips in (False, True):
            assert restored.decode(ids, skips) == original.decode(ids, skips), repr(text)


def test_kinds_differ_where_they_must(tmp_path: Path) -> None:
    counts = {}
    for kind in ("smollm", "llama-bpe", "gpt-2"):
        (tmp_path / kind).mkdir()
        _, checkpoint = convert(tmp_path / kind, kind)
        restored = Tokenizer.from_str(checkpoint.assets()[FILE].decode())
        counts[kind] = [
            len(restored.encode(text, add_special_tokens=False).ids)
            for text in ("2000", " unmergeable")
        ]
    assert counts["smollm"][0] == 4
    assert counts["gpt-2"][0] < 4
    assert counts["llama-bpe"][1] == 1


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("adds_eos", [False, True])
def test_begin_and_end_are_added_as_the_file_says(
    adds_bos: bool, adds_eos: bool, tmp_path: Path
) -> None:
    metadata = {
        "tokenizer.ggml.add_bos_token": adds_bos,
        "tokenizer.ggml.add_eos_token": adds_eos,
        "tokenizer.ggml.eos_token_id": 1,
    }
    _, checkpoint = convert(tmp_path, "smollm", metadata)
    restored = Tokenizer.from_str(checkpoint.assets()[FILE].decode())
    bare = restored.encode("the dog", add_special_tokens=False).ids
    assert restored.encode("the dog").ids == [0] * adds_bos + bare + [1] * adds_eos
    pair = restored.encode("the dog", "the dog").ids
    assert pair == ([0] * adds_bos + bare + [1] * adds_eos) * 2


def test_transformers_reads_the_files(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    metadata = {"tokenizer.chat_template": template, "tokenizer.ggml.eot_token_id": 1}
    original, checkpoint = convert(tmp_path, "smollm", metadata)
    folder = tmp_path / "assets"
    folder.mkdir()
    for name, content in checkpoint.assets().items():
        (folder / name).write_bytes(content)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in odd_strings(50):
        assert tokenizer(text)["input_ids"] == original.encode(text).ids, repr(text)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|turn|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|begin|>hi"
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.num_key_value_heads, config.head_dim) == ("llama", 2, 16)
    assert config.rms_norm_eps == 1e-5
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [2, 1]


def test_stop_tokens_are_those_that_the_metadata_names(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.eom_token_id": 1,
    }
    _, checkpoint = convert(tmp_path, "smollm", metadata)
    assert checkpoint.stop_tokens == (1, 2)
    config = json.loads(checkpoint.assets()["generation_config.json"])
    assert config == {"bos_token_id": 0, "eos_token_id": [1, 2]}


def test_same_file_same_bytes(tmp_path: Path) -> None:
    _, first = convert(tmp_path, "llama-bpe")
    assert GgufCheckpoint.open(tmp_path / "tiny.gguf").assets() == first.assets()


def test_a_default_kind_is_noted(tmp_path: Path) -> None:
    _, checkpoint = convert(tmp_path, "default")
    assert "pre-tokenizer `default` is read as gpt-2" in checkpoint.notes


KEY = "tokenizer.ggml"
REFUSED = {
    "SentencePiece": (
        {f"{KEY}.model": "llama"},
        "tokenizer `llama` (SentencePiece) is not supported (supported: gpt2)",
    ),
    "WordPiece": ({f"{KEY}.model": "bert"}, "tokenizer `bert` is not supported"),
    "unknown pre": ({f"{KEY}.pre": "qwen2"}, "pre-tokenizer `qwen2` is not supported (supported: "),
    "no pre": ({f"{KEY}.pre": None}, f"{KEY}.pre is missing"),
    "too few tokens": (
        {f"{KEY}.tokens": ["a", "b"]},
        f"{KEY}.tokens: expected 400 tokens (the rows of the embedding), got 2",
    ),
    "token twice": (
        {f"{KEY}.tokens": ["a", "b"] + [f"t{index}" for index in range(397)] + ["b"]},
        "the token `b` occurs twice",
    ),
    "too few types": ({f"{KEY}.token_type": [1, 1]}, "expected 400 token types, got 2"),
    "type 9": ({f"{KEY}.token_type": [9] * 400}, f"{KEY}.token_type[0]: expected a token type"),
    "no types": ({f"{KEY}.token_type": None}, f"{KEY}.token_type is missing"),
    "no merges": ({f"{KEY}.merges": None}, f"{KEY}.merges is missing"),
    "merge of three": ({f"{KEY}.merges": ["a b c"]}, f"{KEY}.merges[0]: expected two tokens"),
    "merge of one": ({f"{KEY}.merges": ["a", "t h"]}, f"{KEY}.merges[0]: expected two tokens"),
    "merge to no token": (
        {f"{KEY}.merges": ["q q"]},
        "merge `q q` needs `qq`, which is not in the vocabulary",
    ),
    "merge of an unused token": (
        {f"{KEY}.token_type": [5] * 400},
        "which is not in the vocabulary",
    ),
    "stop token past the end": (
        {f"{KEY}.eot_token_id": 400},
        f"{KEY}.eot_token_id: expected an id below 400 (the vocabulary), got 400",
    ),
    "bos without id": (
        {f"{KEY}.add_bos_token": True, f"{KEY}.bos_token_id": None},
        f"{KEY}.bos_token_id is missing, and the tokenizer adds that token",
    ),
    "prefix space": ({f"{KEY}.add_space_prefix": True}, "expected false for the pre-tokenizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    metadata, message = REFUSED[case]
    with pytest.raises(TokenizerError) as caught:
        convert(tmp_path, "smollm", metadata)
    assert message in str(caught.value)
    assert str(tmp_path / "tiny.gguf") in str(caught.value)


def test_the_tokenizer_of_a_tiny_folder(tmp_path: Path) -> None:
    hf = write_tiny(tmp_path / "hf", vocab_size=300)
    checkpoint = GgufCheckpoint.open(write_tiny_gguf(tmp_path, hf, pre="gpt-2"))
    restored = Tokenizer.from_str(checkpoint.assets()[FILE].decode())
    folder = Tokenizer.from_file(str(hf / FILE))
    for text in ("<s>odd</s>", "čaj 😀 12", "<|user|>x"):
        assert restored.encode(text).ids == folder.encode(text).ids
    assert checkpoint.stop_tokens == (2,)
    assert b"message['role']" in checkpoint.assets()["chat_template.jinja"]


def test_a_file_without_tokenizer_says_so(tmp_path: Path) -> None:
    hf = write_tiny(tmp_path / "hf", has_tokenizer=False)
    checkpoint = GgufCheckpoint.open(write_tiny_gguf(tmp_path, hf))
    assert checkpoint.stop_tokens == ()
    assert checkpoint.notes == ("the file holds no tokenizer",)
    assert sorted(checkpoint.assets()) == ["config.json", "generation_config.json"]
