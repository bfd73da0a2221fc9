"""Tokenizer and template files of a folder: found, held against the vocabulary, handed on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama_artifacts.errors import TokenizerError
from llama_artifacts.strict_json import parse_object, shown
from llama_export.checkpoint.files import CONFIG, GENERATION_CONFIG, is_there, read_bytes, read_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
SENTENCEPIECE = "tokenizer.model"

COPIED = (TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, CONFIG, GENERATION_CONFIG)


def check_tokenizer(folder: Path, vocab_size: int) -> list[str]:
    """Holds tokenizer.json against the vocabulary; returns remarks.

    Raises:
        TokenizerError: the file is damaged, or gives out ids that the model does not have.
    """
    path = folder / TOKENIZER
    if not is_there(path):
        note = f"no {TOKENIZER}: the bundle takes and gives token ids, not text"
        if is_there(folder / SENTENCEPIECE):
            note += f" ({SENTENCEPIECE} alone is not read; convert it with transformers)"
        return [note]
    num_tokens = 0
    for token, index in _tokens(read_json(path, error=TokenizerError), path):
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            message = f"expected a non-negative id for token {shown(token)}, got {shown(index)}"
            raise TokenizerError(message, where=path)
        if index >= vocab_size:
            message = f"token {shown(token)} has id {index}, the model's vocab_size is {vocab_size}"
            hint = "the tokenizer belongs to another model, or tokens were added without resizing"
            raise TokenizerError(message, where=path, hint=hint)
        num_tokens = max(num_tokens, index + 1)
    # Published models pad their vocabulary, but not to twice its size.
    if 2 * num_tokens < vocab_size:
        message = f"has {num_tokens} tokens, less than half of the model's vocab_size {vocab_size}"
        raise TokenizerError(message, where=path, hint="the tokenizer belongs to another model")
    return []


def tokenizer_assets(folder: Path) -> dict[str, bytes]:
    """The files that travel with a bundle, and the chat template as a file of its own."""
    assets = {
        name: read_bytes(folder / name, error=TokenizerError)
        for name in COPIED
        if is_there(folder / name)
    }
    if CHAT_TEMPLATE not in assets and TOKENIZER_CONFIG in assets:
        where = folder / TOKENIZER_CONFIG
        config = parse_object(assets[TOKENIZER_CONFIG], where=where, error=TokenizerError)
        template = _default_template(config.get("chat_template"), where)
        if template is not None:
            assets[CHAT_TEMPLATE] = template.encode()
    return assets


def _tokens(tokenizer: dict[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """Every token and its id: the model's vocabulary (object or list), then the added tokens."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        yield from vocab.items()
    elif isinstance(vocab, list):
        for index, entry in enumerate(vocab):
            yield str(entry[0]) if isinstance(entry, list) and entry else "", index
    else:
        message = "expected model.vocab as an object or a list"
        raise TokenizerError(message, where=f"{path}#model.vocab")
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
        raise TokenizerError("expected a list of objects", where=f"{path}#added_tokens")
    for entry in added:
        yield str(entry.get("content")), entry.get("id")


def _default_template(value: object, where: Path) -> str | None:
    """One template, or the one named `default` of several."""
    if value is None or isinstance(value, str):
        return value
    place = f"{where}#chat_template"
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise TokenizerError("expected a string or a list of named templates", where=place)
    for entry in value:
        template = entry.get("template")
        if entry.get("name") == "default" and isinstance(template, str):
            return template
    return None
