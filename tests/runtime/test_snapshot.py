"""Sessions on disk: the same logits after a restore, in other formats, capacities and processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import llama_runtime
from llama_artifacts.errors import CompatibilityError, InputError, SessionError
from llama_export.build import build
from llama_export.cache import ProgramCache
from llama_export.recipe import Recipe
from llama_runtime import LoadedBundle, Session
from tests.runtime.loading import LOGITS_ATOL, PROMPT, Loaded

slow_pt2 = pytest.param("pt2", marks=pytest.mark.slow)
each_format = pytest.mark.parametrize("format", ["aoti", slow_pt2, "onnx"])


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
