"""The tokenizer in a GGUF file's metadata, written as the files that Hugging Face checkpoints have.

Byte-level BPE only. GGUF stores vocabulary, merges and token types whole, but of the splitting of
text into words only a name (`tokenizer.ggml.pre`), so each name that is known here stands for the
pre-tokenizer that the checkpoints of that kind carry in their `tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from llama_artifacts.errors import TokenizerError
from llama_artifacts.strict_json import shown
from llama_export.checkpoint.config import LlamaConfig, RopeConfig
from llama_export.checkpoint.gguf_metadata import Metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer, pre_tokenizers

MODEL = "gpt2"  # GGUF's word for byte-level BPE
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_TORCH_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_CONVERT_AGAIN = "convert the model again with a current llama.cpp"


@dataclass(frozen=True)
class PreKind:
    """How one kind of checkpoint splits text into words.

    `has_ignored_merges`: a word that is a token stays whole even where no merge makes it.
    """

    name: str
    has_ignored_merges: bool = False
    has_bos_by_default: bool = False


_GPT2 = PreKind("gpt-2")
_LLAMA3 = PreKind("llama-bpe", has_ignored_merges=True, has_bos_by_default=True)
PRE_KINDS: Mapping[str, PreKind] = {
    "smollm": PreKind("smollm"),
    "llama-bpe": _LLAMA3,
    "gpt-2": _GPT2,
    "default": _GPT2,
}


@dataclass(frozen=True)
class GgufTokenizer:
    """Vocabulary, merges and special tokens of one checkpoint, free of contradictions."""

    pre: PreKind
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    named: Mapping[str, int]  # `bos_token`, `eos_token`, `unk_token`, `pad_token` to ids
    stop_tokens: tuple[int, ...]
    adds_bos: bool
    adds_eos: bool
    adds_prefix_space: bool
    chat_template: str | None
    max_length: int
    notes: tuple[str, ...]

    def files(self) -> dict[str, bytes]:
        """`tokenizer.json`, `tokenizer_config.json` and, where there is one, the chat template."""
        files = {
            "tokenizer.json": self.build().to_str(pretty=False).encode(),
            "tokenizer_config.json": _json(self._config()),
        }
        if self.chat_template is not None:
            files["chat_template.jinja"] = self.chat_template.encode()
        return files

    def build(self) -> Tokenizer:
        """The tokenizer itself."""
        from tokenizers import AddedToken, Tokenizer, decoders, models

        model = models.BPE(
            vocab=_vocab(self.tokens, self.types),
            merges=list(self.merges),
            ignore_merges=self.pre.has_ignored_merges,
        )
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = _pre_tokenizer(self.pre, self.adds_prefix_space)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [AddedToken(text, special=True, normalized=False) for text in self._of(_CONTROL)]
        )
        tokenizer.add_tokens(
            [AddedToken(text, special=False, normalized=False) for text in self._of(_USER_DEFINED)]
        )
        self._add_template(tokenizer)
        return tokenizer

    def _of(self, kind: int) -> list[str]:
        return [token for token, its in zip(self.tokens, self.types, strict=True) if its == kind]

    def _add_template(self, tokenizer: Tokenizer) -> None:
        from tokenizers import processors

        if not (self.adds_bos or self.adds_eos):
            return
        single, pair = ["$A:0"], ["$B:1"]
        special = []
        for adds, alias, name in (
            (self.adds_bos, "BOS", "bos_token"),
            (self.adds_eos, "EOS", "eos_token"),
        ):
            if adds:
                index = self.named[name]
                special.append({"id": alias, "ids": [index], "tokens": [self.tokens[index]]})
                place = 0 if alias == "BOS" else len(single)
                single.insert(place, f"{alias}:0")
                pair.insert(place, f"{alias}:1")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(single), pair=" ".join(single + pair), special_tokens=special
        )

    def _config(self) -> dict[str, Any]:
        named = {name: self.tokens[index] for name, index in self.named.items()}
        return {
            **named,
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.max_length,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }


def read_tokenizer(metadata: Metadata, vocab_size: int) -> GgufTokenizer | None:
    """The tokenizer of a file whose embedding has `vocab_size` rows; None where it holds none.

    Raises:
        TokenizerError: another kind of tokenizer, or one that contradicts itself or the model.
    """
    if "tokenizer.ggml.model" not in metadata:
        return None
    metadata = replace(metadata, error=TokenizerError)
    _check_model(metadata)
    pre = _pre_kind(metadata)
    tokens = _tokens(metadata, vocab_size)
    types = _types(metadata, tokens)
    named = _named_tokens(metadata, len(tokens))
    adds_bos = metadata.flag("tokenizer.ggml.add_bos_token", pre.has_bos_by_default)
    adds_eos = metadata.flag("tokenizer.ggml.add_eos_token", False)
    _check_added(metadata, named, adds_bos=adds_bos, adds_eos=adds_eos)
    template_key = "tokenizer.chat_template"
    return GgufTokenizer(
        pre=pre,
        tokens=tokens,
        types=types,
        merges=_merges(metadata, tokens, types),
        named=named,
        stop_tokens=_stop_tokens(metadata, len(tokens)),
        adds_bos=adds_bos,
        adds_eos=adds_eos,
        adds_prefix_space=_adds_prefix_space(metadata, pre),
        chat_template=metadata.text(template_key) if template_key in metadata else None,
        max_length=metadata.integer("llama.context_length", minimum=1),
        notes=_notes(metadata),
    )


def config_files(
    config: LlamaConfig, dtype: str, tokenizer: GgufTokenizer | None
) -> dict[str, bytes]:
    """`config.json` and `generation_config.json` in the Hugging Face spelling."""
    ids: dict[str, Any] = {}
    if tokenizer is not None:
        ids = {
            f"{name}_id": tokenizer.named[name]
            for name in ("bos_token", "pad_token")
            if name in tokenizer.named
        }
        stop = list(tokenizer.stop_tokens)
        ids["eos_token_id"] = stop[0] if len(stop) == 1 else stop or None
    return {
        "config.json": _json(hf_config(config, dtype) | ids),
        "generation_config.json": _json(ids),
    }


def hf_config(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The configuration as a Hugging Face `config.json` says it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": config.attention_bias,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position,
        "mlp_bias": config.mlp_bias,
        "model_type": "llama",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": _rope_scaling(config.rope),
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": _TORCH_DTYPES[dtype],
        "vocab_size": config.vocab_size,
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """Divisors have no Hugging Face spelling: an own one, which other readers refuse by name."""
    if rope.kind == "default":
        return None
    if rope.kind == "divisors":
        return {"rope_type": "divisors", "divisors": list(rope.divisors)}
    return {"rope_type": rope.kind, "factor": rope.factor}


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _pre_tokenizer(pre: PreKind, adds_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    if pre.name == "llama-bpe":
        split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated", invert=False)
        tail = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, tail])
    words = pre_tokenizers.ByteLevel(add_prefix_space=adds_prefix_space, use_regex=True)
    if pre.name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words


def _fail(metadata: Metadata, key: str, message: str, hint: str = _CONVERT_AGAIN) -> NoReturn:
    metadata.fail(key, message, hint=hint)


def _check_model(metadata: Metadata) -> None:
    key = "tokenizer.ggml.model"
    model = metadata.text(key)
    if model != MODEL:
        meaning = " (SentencePiece)" if model == "llama" else ""
        message = f"tokenizer {shown(model)}{meaning} is not supported (supported: {MODEL})"
        _fail(metadata, key, message, "use the Hugging Face folder of this model")


def _pre_kind(metadata: Metadata) -> PreKind:
    key = "tokenizer.ggml.pre"
    if key not in metadata:
        _fail(metadata, key, f"{key} is missing, and without it the text cannot be split rightly")
    name = metadata.text(key)
    if name not in PRE_KINDS:
        message = (
            f"pre-tokenizer {shown(name)} is not supported (supported: {', '.join(PRE_KINDS)})"
        )
        _fail(metadata, key, message, "use the Hugging Face folder of this model")
    return PRE_KINDS[name]


def _tokens(metadata: Metadata, vocab_size: int) -> tuple[str, ...]:
    key = "tokenizer.ggml.tokens"
    tokens = metadata.texts(key)
    if len(tokens) != vocab_size:
        message = f"expected {vocab_size} tokens (the rows of the embedding), got {len(tokens)}"
        _fail(metadata, key, message, "tokenizer and weights come from different models")
    if len(set(tokens)) != len(tokens):
        ids = {token: index for index, token in enumerate(tokens)}
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        _fail(metadata, key, f"the token {shown(twice)} occurs twice")
    return tuple(tokens)


def _types(metadata: Metadata, tokens: Sequence[str]) -> tuple[int, ...]:
    key = "tokenizer.ggml.token_type"
    types = metadata.integers(key)
    if len(types) != len(tokens):
        _fail(metadata, key, f"expected {len(tokens)} token types, got {len(types)}")
    for index, kind in enumerate(types):
        if not _NORMAL <= kind <= _BYTE:
            _fail(metadata, f"{key}[{index}]", f"expected a token type from 1 to 6, got {kind}")
        if kind in (_CONTROL, _USER_DEFINED) and not tokens[index]:
            _fail(metadata, f"{key}[{index}]", "expected a text for a special token, got none")
    return tuple(types)


def _vocab(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Ids by token, without the fillers that a converter puts in for ids without a token."""
    pairs = enumerate(zip(tokens, types, strict=True))
    return {token: index for index, (token, kind) in pairs if kind != _UNUSED}


def _has_long_words(tokens: Sequence[str], types: Sequence[int]) -> bool:
    """Whether there are words that only a merge can make; without any, a file may have no merges."""
    pairs = zip(tokens, types, strict=True)
    return any(len(token) > 1 for token, kind in pairs if kind == _NORMAL)


def _merges(
    metadata: Metadata, tokens: Sequence[str], types: Sequence[int]
) -> tuple[tuple[str, str], ...]:
    key = "tokenizer.ggml.merges"
    if key not in metadata and not _has_long_words(tokens, types):
        return ()
    vocab = _vocab(tokens, types)
    merges = []
    for index, line in enumerate(metadata.texts(key)):
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            _fail(metadata, f"{key}[{index}]", f"expected two tokens, got {shown(line)}")
        for token in (left, right, left + right):
            if token not in vocab:
                message = (
                    f"merge {shown(line)} needs {shown(token)}, which is not in the vocabulary"
                )
                _fail(metadata, f"{key}[{index}]", message)
        merges.append((left, right))
    return tuple(merges)


def _token_id(metadata: Metadata, name: str, vocab_size: int) -> int:
    key = f"tokenizer.ggml.{name}"
    index = metadata.integer(key)
    if index >= vocab_size:
        _fail(metadata, key, f"expected an id below {vocab_size} (the vocabulary), got {index}")
    return index


def _named_tokens(metadata: Metadata, vocab_size: int) -> dict[str, int]:
    return {
        name: _token_id(metadata, key, vocab_size)
        for name, key in _NAMED_TOKENS.items()
        if f"tokenizer.ggml.{key}" in metadata
    }


def _stop_tokens(metadata: Metadata, vocab_size: int) -> tuple[int, ...]:
    """End of text, of turn and of message, in this order, each once."""
    names = [name for name in _STOP_KEYS if f"tokenizer.ggml.{name}" in metadata]
    return tuple(dict.fromkeys(_token_id(metadata, name, vocab_size) for name in names))


def _check_added(
    metadata: Metadata, named: Mapping[str, int], *, adds_bos: bool, adds_eos: bool
) -> None:
    for adds, what in ((adds_bos, "bos"), (adds_eos, "eos")):
        if adds and f"{what}_token" not in named:
            key = f"tokenizer.ggml.{what}_token_id"
            _fail(metadata, key, f"{key} is missing, and the tokenizer adds that token")


def _adds_prefix_space(metadata: Metadata, pre: PreKind) -> bool:
    key = "tokenizer.ggml.add_space_prefix"
    adds = metadata.flag(key, False)
    if adds and pre is not _GPT2:
        message = f"expected false for the pre-tokenizer `{pre.name}`, got true"
        _fail(metadata, key, message, "use the Hugging Face folder of this model")
    return adds


def _notes(metadata: Metadata) -> tuple[str, ...]:
    notes = []
    if metadata.text("tokenizer.ggml.pre") == "default":
        notes.append("pre-tokenizer `default` is read as gpt-2")
    if "tokenizer.chat_templates" in metadata:
        notes.append("only the default chat template is kept")
    return tuple(notes)
