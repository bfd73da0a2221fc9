"""Files of sessions that nobody should trust."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import llama_runtime
from llama_artifacts.errors import CompatibilityError, IntegrityError, LlamaExportError
from llama_runtime import LoadedBundle
from llama_runtime.snapshot import _content_digest
from tests.runtime.loading import Loaded, copied, is_same, snapshot


def rewritten(
    source: Path, target: Path, change: Callable[[dict[str, Any], dict[str, str]], object]
) -> Path:
    """A copy with changed tensors or metadata, its content sealed as an attacker would."""
    with safe_open(source, "pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(source)
    change(tensors, metadata)
    if "content" in metadata:
        metadata["content"] = _content_digest(tensors)
    save_file(tensors, target, metadata)
    return target


def refused(bundle: LoadedBundle, path: Path, error: type[LlamaExportError], text: str) -> None:
    session = bundle.session()
    session.prefill([5, 6])
    before = snapshot(session._states)
    with pytest.raises(error) as caught:
        session.restore(path)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert (session.position, session.tokens.tolist()) == (2, [[5, 6], [5, 6]])
    assert is_same(before, session._states)


def halved(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t if name == "tokens" else t.half() for name, t in tensors.items()}


CHANGES: dict[str, tuple[Callable[[Any, Any], object], type[LlamaExportError], str]] = {
    "other weights": (
        lambda t, m: m.update(bundle="0" * 64),
        CompatibilityError,
        "made with other weights",
    ),
    "no digest": (lambda t, m: m.pop("bundle"), CompatibilityError, "made with other weights"),
    "no kind": (lambda t, m: m.pop("kind"), IntegrityError, "expected a `llama-export snapshot 1`"),
    "a later kind": (
        lambda t, m: m.update(kind="llama-export snapshot 2\n"),
        IntegrityError,
        "got 'llama-export snapshot 2\\n'",
    ),
    "no content": (lambda t, m: m.pop("content"), IntegrityError, "content changed"),
    "another dtype": (
        lambda t, m: t.update(halved(t)),
        CompatibilityError,
        "expected f32 [2, 2, 6, 16], got float16 [2, 2, 6, 16]",
    ),
    "another batch": (
        lambda t, m: t.update({name: x[:1].contiguous() for name, x in t.items()}),
        CompatibilityError,
        "expected f32 [2, 2, 6, 16], got float32 [1, 2, 6, 16]",
    ),
    "fewer positions in one": (
        lambda t, m: t.update({"cache.1.key": t["cache.1.key"][:, :, :5].contiguous()}),
        CompatibilityError,
        "cache.1.key: expected f32 [2, 2, 6, 16]",
    ),
    "a state too few": (lambda t, m: t.pop("cache.1.value"), CompatibilityError, "got none"),
    "a state too many": (
        lambda t, m: t.update({"\x1b[31m\n": t["cache.0.key"].clone()}),
        CompatibilityError,
        "a state that the bundle does not keep",
    ),
    "no tokens": (lambda t, m: t.pop("tokens"), IntegrityError, "expected `tokens` as i32"),
    "tokens of another dtype": (
        lambda t, m: t.update(tokens=t["tokens"].long()),
        IntegrityError,
        "expected `tokens` as i32",
    ),
    "tokens of more rows": (
        lambda t, m: t.update(tokens=t["tokens"].repeat(2, 1)),
        CompatibilityError,
        "expected tokens of 2 rows, got 4",
    ),
    "unknown tokens": (
        lambda t, m: t["tokens"].fill_(128),
        IntegrityError,
        "#tokens: expected at most 127, got 128",
    ),
    "negative tokens": (lambda t, m: t["tokens"].fill_(-1), IntegrityError, "expected at least 0"),
    "no position": (
        lambda t, m: t.update(
            {n: (x[:, :0] if n == "tokens" else x[:, :, :0]).clone() for n, x in t.items()}
        ),
        IntegrityError,
        "expected tokens, got none",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_snapshots_that_do_not_fit(
    tiny_loaded: Loaded, saved: Path, tmp_path: Path, case: str
) -> None:
    change, error, text = CHANGES[case]
    refused(tiny_loaded["aoti"], rewritten(saved, tmp_path / "s", change), error, text)


def test_a_changed_byte_anywhere_is_noticed(
    tiny_loaded: Loaded, saved: Path, tmp_path: Path
) -> None:
    data = saved.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path, session = tmp_path / "s", tiny_loaded["aoti"].session()
    for place in (0, 7, 20, start, (start + len(data)) // 2, len(data) - 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises((IntegrityError, CompatibilityError)):
            session.restore(path)
    assert session.position == 0


@pytest.mark.parametrize("num_bytes", [0, 1, 8, 100, -1])
def test_a_file_that_was_cut_off(
    tiny_loaded: Loaded, saved: Path, tmp_path: Path, num_bytes: int
) -> None:
    path = tmp_path / "s"
    path.write_bytes(saved.read_bytes()[:num_bytes])
    refused(tiny_loaded["aoti"], path, IntegrityError, "")


def test_things_that_are_no_snapshot(
    tiny_loaded: Loaded, tiny_bundle: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    text = json.dumps({"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}})
    (tmp_path / "vast").write_bytes(len(text).to_bytes(8, "little") + text.encode())
    for path, message in (
        (tmp_path / "none", "expected a snapshot, got no such file"),
        (tmp_path, "expected a snapshot, got something else"),
        (tmp_path / "pipe", "expected a snapshot, got something else"),
        (tmp_path / "huge", "expected a header of at most"),
        (tmp_path / "vast", "shorter than its header declares"),
        (tiny_bundle / "weights.safetensors", "expected a `llama-export snapshot 1`, got"),
    ):
        refused(tiny_loaded["aoti"], path, IntegrityError, message)


def test_a_bundle_of_other_weights(
    tiny_bundle: Path, tiny_loaded: Loaded, saved: Path, tmp_path: Path
) -> None:
    manifest = tiny_loaded["aoti"].manifest
    name = "weights.safetensors"
    other = {**manifest.files, name: manifest.files["config.json"]}
    other[name] = type(other[name])(manifest.files[name].bytes, "f" * 64)
    bundle = llama_runtime.load(copied(tiny_bundle, tmp_path / "b", files=other), format="aoti")
    refused(bundle, saved, CompatibilityError, "made with other weights")
