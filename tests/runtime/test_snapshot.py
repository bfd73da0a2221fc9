"""Sessions on disk: the same logits after a restore, and files that nobody should trust."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import llama_runtime
from llama_artifacts.errors import (
    CompatibilityError,
    InputError,
    IntegrityError,
    LlamaExportError,
    SessionError,
)
from llama_export.build import build
from llama_export.cache import ProgramCache
from llama_export.recipe import Recipe
from llama_runtime import LoadedBundle, Session
from llama_runtime.snapshot import _content_digest
from tests.runtime.loading import LOGITS_ATOL, copied, is_same, snapshot

Loaded = dict[str, LoadedBundle]
PROMPT = [[1, 5, 9, 33, 2, 17], [7, 7, 4, 3, 90, 6]]
slow_pt2 = pytest.param("pt2", marks=pytest.mark.slow)
each_format = pytest.mark.parametrize("format", ["aoti", slow_pt2, "onnx"])


@pytest.fixture(scope="module")
def saved(tiny_loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompt's states as one format wrote them. Do not write into it."""
    path = tmp_path_factory.mktemp("snapshot") / "prompt.safetensors"
    session = tiny_loaded["aoti"].session()
    session.prefill(PROMPT)
    session.save(path)
    return path


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


@each_format
def test_a_restored_session_gives_the_same_logits(
    tiny_loaded: Loaded, tmp_path: Path, format: str
) -> None:
    session = tiny_loaded[format].session()
    session.prefill(PROMPT)
    session.save(tmp_path / "s")
    expected = [session.decode([3, 4]), session.prefill([8, 9])]
    other = tiny_loaded[format].session()
    other.restore(tmp_path / "s")
    assert other.position == 6
    assert other.tokens.tolist() == PROMPT
    for actual, logits in zip((other.decode([3, 4]), other.prefill([8, 9])), expected, strict=True):
        assert torch.equal(actual, logits)


@each_format
def test_a_snapshot_goes_on_in_every_format(tiny_loaded: Loaded, saved: Path, format: str) -> None:
    expected, session = tiny_loaded["aoti"].session(), tiny_loaded[format].session()
    expected.restore(saved)
    session.restore(saved)
    torch.testing.assert_close(session.decode(3), expected.decode(3), atol=LOGITS_ATOL, rtol=0)


SCRIPT = """
import sys, llama_runtime, torch
from safetensors.torch import save_file
session = llama_runtime.load(sys.argv[1], format="aoti", threads=1).session()
session.restore(sys.argv[2])
save_file({"logits": session.decode(3)}, sys.argv[3])
"""


@pytest.mark.slow
def test_another_process_gives_the_same_logits(
    tiny_bundle: Path, tiny_loaded: Loaded, saved: Path, tmp_path: Path
) -> None:
    words = [tiny_bundle, saved, tmp_path / "logits"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", SCRIPT, *map(str, words)], check=True, env=env)
    session = tiny_loaded["aoti"].session()
    session.prefill(PROMPT)
    assert torch.equal(load_file(tmp_path / "logits")["logits"], session.decode(3))


def test_only_used_positions_are_in_the_file(saved: Path) -> None:
    tensors = load_file(saved)
    assert tensors.pop("tokens").shape == (2, 6)
    assert {tensor.shape[2] for tensor in tensors.values()} == {6}
    assert len(tensors) == 4


@pytest.fixture(scope="module")
def small(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows of 16 positions, `decode` alone: another capacity over the same weights."""
    output = tmp_path_factory.mktemp("bundle") / "small"
    recipe = Recipe(str(tiny_checkpoint), output, ("decode",), ("onnx",), max_seq=16, batch=2)
    return build(recipe, cache=ProgramCache()).folder


def test_a_snapshot_moves_to_a_larger_capacity(
    tiny_loaded: Loaded, small: Path, tmp_path: Path
) -> None:
    first = llama_runtime.load(small).session()
    first.prefill(PROMPT)
    first.save(tmp_path / "s")
    expected = first.decode(3)
    session = tiny_loaded["onnx"].session()
    session.restore(tmp_path / "s")
    torch.testing.assert_close(session.decode(3), expected, atol=LOGITS_ATOL, rtol=0)


def test_a_snapshot_that_is_too_long(tiny_loaded: Loaded, small: Path, tmp_path: Path) -> None:
    long = tiny_loaded["aoti"].session()
    long.prefill([1] * 16)
    long.save(tmp_path / "s")
    session = llama_runtime.load(small).session()
    with pytest.raises(CompatibilityError, match="expected at most 15 positions, got 16") as caught:
        session.restore(tmp_path / "s")
    assert caught.value.hint == "build with a larger --max-seq"


def test_a_restore_takes_the_place_of_what_was_fed(tiny_loaded: Loaded, saved: Path) -> None:
    session, other = (tiny_loaded["aoti"].session() for _ in range(2))
    session.prefill([99] * 20)
    session.restore(saved)
    other.restore(saved)
    assert session.position == 6
    assert torch.equal(session.decode(3), other.decode(3))


def test_rewind(tiny_loaded: Loaded, saved: Path) -> None:
    session, other = (tiny_loaded["aoti"].session() for _ in range(2))
    session.restore(saved)
    session.decode(50)
    session.rewind(4)
    assert session.tokens.tolist() == [row[:4] for row in PROMPT]
    other.prefill(PROMPT)
    other.rewind(4)
    assert torch.equal(session.decode(3), other.decode(3))


@pytest.mark.parametrize("position", [-1, 7, True, 1.0])
def test_positions_that_cannot_be_gone_back_to(
    tiny_loaded: Loaded, saved: Path, position: Any
) -> None:
    session = tiny_loaded["aoti"].session()
    session.restore(saved)
    with pytest.raises(InputError):
        session.rewind(position)
    assert session.position == 6


def test_a_session_without_tokens_is_not_saved(tiny_loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="expected a session with tokens, got none"):
        tiny_loaded["aoti"].session().save(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_session_is_not_saved_but_restored(
    tiny_loaded: Loaded, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = tiny_loaded["aoti"].session()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session._decode, "run", fail)
        with pytest.raises(KeyboardInterrupt):
            session.decode(3)
    for call in (lambda: session.save(tmp_path / "s"), lambda: session.rewind(0)):
        with pytest.raises(SessionError, match="an earlier call failed"):
            call()
    session.restore(saved)
    assert session.position == 6
    session.decode(3)


def test_a_failed_write_leaves_the_old_file(
    tiny_loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    path.write_text("old")
    session = tiny_loaded["aoti"].session()
    session.decode(3)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llama_runtime.snapshot.save_file", fail)
    with pytest.raises(SessionError, match="s: cannot be written: No space left on device"):
        session.save(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tiny_loaded: Loaded, tmp_path: Path) -> None:
    session = tiny_loaded["aoti"].session()
    session.decode(3)
    with pytest.raises(SessionError, match="cannot be written: No such file"):
        session.save(tmp_path / "none" / "s")


def test_a_file_is_replaced_whole(tiny_loaded: Loaded, tmp_path: Path) -> None:
    session = tiny_loaded["aoti"].session()
    for _ in range(2):
        session.decode(3)
        session.save(tmp_path / "s")
    assert load_file(tmp_path / "s")["tokens"].shape == (2, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


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


def resumed(bundle: LoadedBundle, path: Path, prompt: list[int]) -> tuple[int, list[int], Session]:
    stream = bundle.generate_tokens(prompt, max_new=8)
    taken = stream.resume(path)
    return taken, list(stream), stream._session


@pytest.mark.parametrize(
    ("prompt", "num_taken"),
    [
        ([1, 5, 9, 33, 8, 8, 8], 4),  # a common beginning
        ([1, 5, 9, 33, 2, 17, 40, 41], 6),  # all of it
        ([1, 5, 9, 33, 2, 17], 5),  # the last token is fed in any case
        ([1, 5], 1),
        ([1], 0),
        ([6, 5, 9, 33], 0),  # nothing in common
    ],
)
def test_a_prompt_takes_what_it_has_in_common(
    tiny_loaded: Loaded, tmp_path: Path, prompt: list[int], num_taken: int
) -> None:
    bundle = tiny_loaded["aoti"]
    session = bundle.session()
    session.prefill(PROMPT[0])
    session.save(tmp_path / "s")
    taken, tokens, after = resumed(bundle, tmp_path / "s", prompt)
    assert taken == num_taken
    assert tokens == list(bundle.generate_tokens(prompt, max_new=8))
    assert after.tokens[0].tolist() == [*prompt, *tokens[:-1]]


def test_rows_that_differ_have_nothing_more_in_common(tiny_loaded: Loaded, saved: Path) -> None:
    assert resumed(tiny_loaded["aoti"], saved, PROMPT[0])[0] == 0


def test_a_generation_can_be_saved_and_resumed(tiny_loaded: Loaded, tmp_path: Path) -> None:
    bundle = tiny_loaded["aoti"]
    first = bundle.generate([1, 5, 9], max_new=4)
    "".join(first)
    first.save(tmp_path / "s")
    second = bundle.generate([1, 5, 9, *first.tokens, 7], max_new=4)
    assert second.resume(tmp_path / "s") == 6


def test_a_pipe_or_device_is_not_replaced(tiny_loaded: Loaded, tmp_path: Path) -> None:
    session = tiny_loaded["aoti"].session()
    session.decode(3)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SessionError, match="pipe: expected a plain file"):
        session.save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
