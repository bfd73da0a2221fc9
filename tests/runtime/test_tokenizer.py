from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from llama_artifacts.errors import InputError, TokenizerError
from llama_runtime.tokenizer import DetokenizeStream, Tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Der schnelle braune Fuchs springt über den faulen Hund: äöü ß.",
    "  Two  spaces, a\ttab and\na line; 12345 numbers.",
    "naïve café, “quotes” …",
]
ODD_TEXTS = [
    "",
    " ",
    "   leading and trailing   ",
    "😀 family 👨‍👩‍👧 flag 🇩🇪",
    "ď \ufffd genuine \ufffd\ufffd end",
    "a\n\n\tb\r\nc",
    "漢字 and العربية",
    "<|im_start|> inside [plain é] text",
    "\x00\x7f\u200b",
]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.add_tokens([AddedToken("[plain é]", normalized=False), "Ġodd"])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    pieces = ["▁The", "▁quick", "▁", "▁▁", "fox", "é", "\ufffd", "<0x41>x", *"abcdefgh."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    model = models.BPE(
        vocab={token: id for id, token in enumerate(tokens)},
        merges=[],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens(["▁plain▁"])
    return backend


def with_decoder(decoder: Any) -> tokenizers.Tokenizer:
    backend = byte_fallback()
    backend.decoder = decoder
    return backend


def join_tokens() -> tokenizers.Tokenizer:
    vocab = {token: id for id, token in enumerate(["a", " b", "▁c", ""])}
    return tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))


BACKENDS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(),
    "metaspace": with_decoder(decoders.Metaspace()),
    "metaspace, never prepended": with_decoder(decoders.Metaspace(prepend_scheme="never")),
    "strip each token": with_decoder(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    ),
    "strip two of the whole": with_decoder(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    ),
    "fallback, not fused": with_decoder(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    ),
    "byte level, stripped": with_decoder(
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)])
    ),
    "none": join_tokens(),
    "unknown: WordPiece": with_decoder(decoders.WordPiece()),
    "unknown: strip at the end": with_decoder(decoders.Strip("b", 0, 1)),
    "unknown: pattern": with_decoder(decoders.Replace(tokenizers.Regex("a+"), "b")),
    "unknown: replace in the whole": with_decoder(
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")])
    ),
}
STREAMING = [name for name in BACKENDS if not name.startswith("unknown")]


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [stream.push(id) for id in ids] + [stream.finish()]


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_streamed_pieces_join_to_the_decoded_text(name: str, data: st.DataObject) -> None:
    tokenizer = Tokenizer(BACKENDS[name])
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=24))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in ("byte level", "none")])
def test_every_order_of_marks_and_letters_joins_to_the_decoded_text(name: str) -> None:
    tokenizer = Tokenizer(BACKENDS[name])
    few = ids_of(name, "▁", "▁▁", "▁The", "a", "b")
    for ids in itertools.product(few, repeat=4):
        assert "".join(pieces_of(tokenizer, list(ids))) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=12), cut=st.integers(0, 4))
def test_streamed_pieces_of_a_cut_text_join_to_the_decoded_text(
    name: str, text: str, cut: int
) -> None:
    tokenizer = Tokenizer(BACKENDS[name])
    ids = tokenizer.encode(text)
    ids = ids[: max(0, len(ids) - cut)]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", [*SENTENCES, *ODD_TEXTS])
def test_byte_level_text_survives_the_round_trip(text: str) -> None:
    tokenizer = Tokenizer(BACKENDS["byte level"])
    ids = tokenizer.encode(text)
    special = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    assert tokenizer.decode(ids) == text.replace("<|im_start|>", "")
    assert len(special) == 1
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def ids_of(name: str, *tokens: str) -> list[int]:
    vocab = BACKENDS[name].get_vocab(with_added_tokens=True)
    return [vocab[token] for token in tokens]


def test_a_character_of_four_byte_level_tokens_comes_with_the_last() -> None:
    tokenizer = Tokenizer(BACKENDS["byte level"])
    ids = tokenizer.encode("a😀ď b", add_special_tokens=False)
    assert len(ids) == 9
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "😀", "", "ď", " ", "b", ""]


def test_a_character_cut_in_the_middle_comes_once_at_the_end() -> None:
    tokenizer = Tokenizer(BACKENDS["byte level"])
    ids = tokenizer.encode("a😀", add_special_tokens=False)[:-1]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "\ufffd"]
    assert tokenizer.decode(ids) == "a\ufffd"


def test_a_broken_character_does_not_stall_what_follows() -> None:
    tokenizer = Tokenizer(BACKENDS["byte level"])
    head = tokenizer.encode("😀", add_special_tokens=False)[:2]
    space = tokenizer.encode(" ", add_special_tokens=False)
    assert pieces_of(tokenizer, [*head, *space]) == ["", "", "\ufffd ", ""]


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_a_genuine_replacement_character_comes_at_once(name: str) -> None:
    tokenizer = Tokenizer(BACKENDS[name])
    if name == "byte level":
        ids = tokenizer.encode("\ufffd\ufffd", add_special_tokens=False)
        assert pieces_of(tokenizer, ids) == ["", "", "\ufffd", "", "", "\ufffd", ""]
    else:
        assert pieces_of(tokenizer, ids_of(name, "\ufffd") * 2) == ["\ufffd", "\ufffd", ""]


def test_a_run_of_fallback_bytes_comes_when_it_ends() -> None:
    tokenizer = Tokenizer(BACKENDS["byte fallback"])
    euro = ["<0xE2>", "<0x82>", "<0xAC>"]
    good = ids_of("byte fallback", "▁The", *euro, "fox")
    assert pieces_of(tokenizer, good) == ["The", "", "", "", "€fox", ""]
    cut = ids_of("byte fallback", *euro, "<0xE2>")
    assert pieces_of(tokenizer, cut) == ["", "", "", "", "\ufffd" * 4]
    bad = ids_of("byte fallback", *euro, "<0xFF>", "<0x41>", "fox")
    assert pieces_of(tokenizer, bad) == ["", "", "", "\ufffd" * 4, "\ufffd", "fox", ""]


@pytest.mark.parametrize("name", ["byte fallback", "metaspace"])
def test_only_the_first_space_is_stripped_and_special_tokens_do_not_count(name: str) -> None:
    tokenizer = Tokenizer(BACKENDS[name])
    ids = ids_of(name, "<s>", "▁The", "</s>", "▁quick")
    assert pieces_of(tokenizer, ids) == ["", "The", "", " quick", ""]


@pytest.mark.parametrize("name", STREAMING)
def test_each_token_costs_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(BACKENDS[name])
    monkeypatch.setattr(Tokenizer, "decode", lambda *_: pytest.fail("decoded again"))
    stream = DetokenizeStream(tokenizer)
    for _ in range(20):
        for id in range(3, tokenizer.vocab_size):
            stream.push(id)
    stream.finish()


def test_a_decoder_that_cannot_stream_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(BACKENDS["unknown: WordPiece"])
    ids = ids_of("unknown: WordPiece", "a", "b")
    with caplog.at_level(logging.WARNING):
        assert pieces_of(tokenizer, ids) == ["", "", "a b"]
    assert "cannot stream" in caplog.text


def test_spaces_before_punctuation_are_kept() -> None:
    tokenizer = Tokenizer(BACKENDS["byte level"])
    text = "do n't , please . "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_added_only_where_wanted() -> None:
    tokenizer = Tokenizer(BACKENDS["byte level"])
    bos = ids_of("byte level", "<s>")
    assert tokenizer.encode("fox") == bos + tokenizer.encode("fox", add_special_tokens=False)


def test_the_vocabulary_reaches_to_the_largest_id() -> None:
    backend = BACKENDS["byte level"]
    assert Tokenizer(backend).vocab_size == backend.get_vocab_size(with_added_tokens=True)
    model = models.WordLevel({"a": 0, "b": 9}, unk_token="a")
    assert Tokenizer(tokenizers.Tokenizer(model)).vocab_size == 10
    assert Tokenizer(tokenizers.Tokenizer(models.BPE())).vocab_size == 0


def save(folder: Path, config: object = None, template: str | None = None) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


USER = [{"role": "user", "content": "The fox"}]
CONFIG = {
    "tokenizer_class": "TokenizersBackend",
    "bos_token": {"content": "<s>", "lstrip": False, "__type": "AddedToken"},
    "eos_token": "</s>",
    "pad_token": None,
    "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
}


def test_a_folder_gives_text_ids_and_chat(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, CONFIG))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(USER) == "<s>The fox"
    assert tokenizer.encode_chat(USER) == tokenizer.encode("The fox")
    assert tokenizer.encode_chat(USER).count(0) == 1


def test_chat_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    template = (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = Tokenizer.load(save(tmp_path, CONFIG, template))
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    theirs = reference.apply_chat_template(
        USER, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.encode_chat(USER) == theirs
    assert tokenizer.render_chat(USER, add_generation_prompt=False).endswith("</s>\n")


def test_the_template_file_goes_before_the_config(tmp_path: Path) -> None:
    assert Tokenizer.load(save(tmp_path, CONFIG, "from é file")).render_chat(USER) == "from é file"


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer = Tokenizer.load(save(tmp_path, {"chat_template": named}))
    assert tokenizer.render_chat(USER) == "yes"


def test_a_tokenizer_without_config_has_no_chat(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path))
    assert not tokenizer.has_chat_template
    assert tokenizer.special_tokens == {}
    with pytest.raises(TokenizerError, match="expected a chat template") as caught:
        tokenizer.encode_chat(USER)
    assert caught.value.where == str(tmp_path)
    assert "--no-chat" in str(caught.value.hint)


def test_a_fixed_length_in_the_file_is_ignored(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode(SENTENCES[0]) == Tokenizer(byte_level()).encode(
        SENTENCES[0]
    )


def test_a_missing_tokenizer_hints_at_token_ids(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="found none") as caught:
        Tokenizer.load(tmp_path)
    assert "--tokens" in str(caught.value.hint)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(TokenizerError, match=r"found only `tokenizer\.model`"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "place"),
    [
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n", "tokenizer.json"),
        ("tokenizer.json", b"{}", "tokenizer.json"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json"),
        ("tokenizer_config.json", b'{"bos_token": 1}', "tokenizer_config.json#bos_token"),
        ("tokenizer_config.json", b'{"bos_token": {}}', "tokenizer_config.json#bos_token"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "tokenizer_config.json#chat_template"),
        ("tokenizer_config.json", b'{"chat_template": []}', "tokenizer_config.json#chat_template"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, name: str, data: bytes, place: str) -> None:
    save(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TokenizerError, match="expected") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.where == str(tmp_path / place)
    assert caught.value.hint
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["\ud800", b"bytes", None])
def test_text_that_is_none_is_refused(text: Any) -> None:
    with pytest.raises(InputError, match="text: expected"):
        Tokenizer(BACKENDS["byte level"]).encode(text)


@pytest.mark.parametrize("id", [-1, 1 << 32, 1.0, True, "1"])
def test_an_id_that_is_none_is_refused(id: Any) -> None:
    tokenizer = Tokenizer(BACKENDS["byte level"])
    with pytest.raises(InputError, match="expected a token id"):
        tokenizer.decode([id])
    with pytest.raises(InputError, match="expected a token id"):
        tokenizer.stream().push(id)


def test_importing_the_tokenizer_is_cheap() -> None:
    code = (
        "import sys, llama_runtime.tokenizer; "
        "sys.exit(bool({'torch', 'tokenizers', 'jinja2', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
