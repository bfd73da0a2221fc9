from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llama_runtime
from llama_artifacts.errors import InputError, SessionError
from llama_runtime import LoadedBundle, Session
from llama_runtime.programs.base import Loading, Program
from tests.bundles import sample_program, write_sample
from tests.runtime.loading import (
    BATCH,
    FORMAT_NAMES,
    LOGITS_ATOL,
    VOCAB_SIZE,
    copied,
    expected_logits,
    random_tokens,
    reduced,
    rewrite_programs,
    snapshot,
    written,
)

Loaded = dict[str, LoadedBundle]
each_format = pytest.mark.parametrize("format", FORMAT_NAMES)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=LOGITS_ATOL, rtol=0)


@pytest.fixture
def session(tiny_loaded: Loaded) -> Session:
    return tiny_loaded["onnx"].session()


@pytest.fixture(scope="module")
def short(short_bundle: Path) -> LoadedBundle:
    return llama_runtime.load(short_bundle)


@each_format
def test_a_conversation(tiny_loaded: Loaded, tiny_checkpoint: Path, format: str) -> None:
    session = tiny_loaded[format].session()
    tokens = random_tokens(BATCH, 30)
    expected = expected_logits(tiny_checkpoint, tokens)
    assert (session.position, session.capacity) == (0, 255)
    assert_near(session.prefill(tokens[:, :10].tolist()), expected[:, 9])
    assert session.position == 10
    for position in (10, 11):
        assert_near(session.decode(tokens[:, position].tolist()), expected[:, position])
    assert_near(session.prefill(tokens[:, 12:29].tolist()), expected[:, 28])
    assert_near(session.prefill(tokens[:, 29:].tolist()), expected[:, 29])
    assert session.position == 30
    session.reset()
    assert session.position == 0
    assert_near(session.prefill(tokens[:, :10].tolist()), expected[:, 9])


def test_one_list_is_for_every_row(session: Session, tiny_checkpoint: Path) -> None:
    expected = expected_logits(tiny_checkpoint, torch.tensor([[1, 50, 60, 70]] * BATCH))
    assert_near(session.prefill([1, 50, 60]), expected[:, 2])
    assert_near(session.decode(70), expected[:, 3])


@pytest.mark.parametrize(
    "as_type",
    [tuple, torch.tensor, np.array, lambda t: torch.tensor(t, dtype=torch.int32), range],
    ids=["tuple", "int64 tensor", "array", "int32 tensor", "range"],
)
def test_ids_come_as_any_sequence(session: Session, as_type: Callable[[Any], Any]) -> None:
    plain = session.prefill([5, 6, 7])
    session.reset()
    tokens = range(5, 8) if as_type is range else as_type([5, 6, 7])
    assert torch.equal(session.prefill(tokens), plain)


@pytest.mark.parametrize("token", [np.int64(9), torch.tensor(9), [9, 9], (9, 9), np.array([9, 9])])
def test_a_token_comes_as_any_number(session: Session, token: Any) -> None:
    session.prefill([1, 2])
    plain = session.decode(9)
    session.reset()
    session.prefill([1, 2])
    assert torch.equal(session.decode(token), plain)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "none empty; got shape [2, 0]"),
        ([[], []], "got shape [2, 0]"),
        ([[1, 2]], "got shape [1, 2]"),
        ([[1], [2], [3]], "got shape [3, 1]"),
        ([[1, 2], [3]], "expected i32 numbers"),
        ([[[1]], [[2]]], "got shape [2, 1, 1]"),
        (5, "got shape []"),
        ([1, 128], "tokens: expected at most 127, got 128"),
        ([1, -1], "tokens: expected at least 0, got -1"),
        ([2**40], "expected i32 numbers"),
        ([1.5], "expected i32 numbers"),
        ([1.0], "expected i32 numbers"),
        ([True], "expected i32 numbers"),
        (["1"], "expected i32 numbers"),
        ("12", "expected i32 numbers"),
        (None, "expected i32 numbers"),
        ([1] * 256, "256 tokens do not fit: 0 + 256 positions are more than the capacity of 255"),
    ],
)
def test_refused_tokens_change_nothing(session: Session, tokens: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        session.prefill(tokens)
    assert words in str(caught.value)
    assert session.position == 0
    session.prefill([1])


@pytest.mark.parametrize("token", [None, "a", 1.5, True, [], [1, 2, 3], [[1, 2], [3, 4]], 128, -1])
def test_a_refused_token(session: Session, token: Any) -> None:
    session.prefill([1])
    with pytest.raises(InputError):
        session.decode(token)
    assert session.position == 1


def test_a_bad_token_in_a_later_chunk_stops_the_first_one(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    folder = reduced(
        tiny_bundle, tmp_path / "b", lambda p: (p.entry, p.format) == ("decode", "onnx")
    )
    session = llama_runtime.load(folder).session()
    with pytest.raises(InputError, match="expected at most 127, got 128"):
        session.prefill([1, 2, 128])
    assert session.position == 0


def test_a_long_prompt_comes_in_chunks(
    tiny_bundle: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = reduced(tiny_bundle, tmp_path / "b", lambda p: p.format == "onnx")

    def shorten(program: Any) -> Any:
        dims = tuple(dataclasses.replace(d, max=7) for d in program.signature.dims)
        signature = dataclasses.replace(program.signature, dims=dims)
        return dataclasses.replace(program, signature=signature)

    rewrite_programs(folder, shorten)
    session = llama_runtime.load(folder).session()
    tokens = random_tokens(BATCH, 30)
    assert_near(session.prefill(tokens.tolist()), expected_logits(tiny_checkpoint, tokens)[:, -1])
    assert session.position == 30


@each_format
@pytest.mark.parametrize("entry", ["decode", "prefill"])
def test_one_entry_is_enough(
    tiny_bundle: Path, tiny_checkpoint: Path, tmp_path: Path, entry: str, format: str
) -> None:
    folder = reduced(tiny_bundle, tmp_path / "b", lambda p: (p.entry, p.format) == (entry, format))
    session = llama_runtime.load(folder).session()
    tokens = random_tokens(BATCH, 12)
    expected = expected_logits(tiny_checkpoint, tokens)
    assert_near(session.prefill(tokens[:, :11].tolist()), expected[:, 10])
    assert_near(session.decode(tokens[:, 11].tolist()), expected[:, 11])


def test_no_entry_of_a_conversation(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = reduced(tiny_bundle, tmp_path / "b", lambda p: p.entry in ("forward", "decode_rows"))
    with pytest.raises(SessionError, match="needs the entry `decode` or `prefill`"):
        llama_runtime.load(folder).session()


def test_a_full_session(short: LoadedBundle) -> None:
    session = short.session()
    assert session.capacity == 15
    session.prefill(list(range(1, 15)))
    session.decode(3)
    assert session.position == 15
    with pytest.raises(InputError, match="1 tokens do not fit: 15 \\+ 1 positions"):
        session.decode(3)
    assert session.position == 15
    session.reset()
    session.prefill(list(range(1, 16)))


def test_a_full_session_wrote_no_scratch_position(short: LoadedBundle) -> None:
    session = short.session()
    before = snapshot(session._states)
    session.prefill(list(range(1, 11)))
    for token in range(5):
        session.decode(token)
    filled = {(0, position) for position in range(15)}
    assert all(places == filled for places in written(before, session._states).values())


def test_old_contents_are_never_read_after_a_reset(tiny_loaded: Loaded) -> None:
    session, fresh = (tiny_loaded["onnx"].session() for _ in range(2))
    session.prefill(random_tokens(BATCH, 200).tolist())
    session.reset()
    assert torch.equal(session.prefill([1, 2, 3]), fresh.prefill([1, 2, 3]))
    assert torch.equal(session.decode(4), fresh.decode(4))


def test_sessions_do_not_touch_each_other(tiny_loaded: Loaded) -> None:
    one, two, alone = (tiny_loaded["aoti"].session() for _ in range(3))
    for token in (5, 6, 7, 8):
        expected = alone.decode(token)
        assert torch.equal(one.decode(token), expected)
        two.decode(VOCAB_SIZE - token)


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("error", [BrokenError, RuntimeError, InputError, KeyboardInterrupt])
def test_a_step_that_fails_breaks_the_session_until_reset(
    tiny_loaded: Loaded, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    session, fresh = (tiny_loaded["onnx"].session() for _ in range(2))
    session.prefill([1, 2])
    program = tiny_loaded["onnx"].entry("decode")._program

    def fail(inputs: Any, states: list[torch.Tensor], sizes: Any) -> Any:
        states[0].fill_(9)
        raise error("boom")

    with monkeypatch.context() as patch:
        patch.setattr(program, "run", fail)
        with pytest.raises(error, match="boom"):
            session.decode(3)
    for call in (
        lambda: session.decode(3),
        lambda: session.prefill([3]),
        lambda: session.prefill([]),
    ):
        with pytest.raises(SessionError, match="failed in the middle of a step") as caught:
            call()
        assert caught.value.hint == "call reset()"
    session.reset()
    assert session.position == 0
    assert torch.equal(session.prefill([1, 2]), fresh.prefill([1, 2]))
    assert torch.equal(session.decode(3), fresh.decode(3))


def test_formats_whose_states_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a bf16 bundle keeps float32 states in ONNX."""
    folder = write_sample(
        tmp_path / "b",
        programs=(
            sample_program("prefill", "pt2", "prefill.pt2"),
            sample_program("decode", "onnx", "decode.onnx"),
        ),
    )

    def widen(program: Any) -> Any:
        if program.format == "onnx":
            return program
        states = tuple(dataclasses.replace(s, dtype="bf16") for s in program.signature.states)
        return dataclasses.replace(
            program, signature=dataclasses.replace(program.signature, states=states)
        )

    class Nothing:
        def run(self, *args: Any) -> list[torch.Tensor]:
            raise AssertionError

    def load_nothing(loading: Loading) -> Program:
        return Nothing()

    rewrite_programs(folder, widen)
    monkeypatch.setattr("llama_runtime.loader.load_program", load_nothing)
    message = "`prefill` in pt2 and `decode` in onnx keep different states"
    with pytest.raises(SessionError, match=message) as caught:
        llama_runtime.load(folder).session()
    assert caught.value.hint == "choose one format for both"


def test_formats_whose_states_agree_are_mixed(
    tiny_bundle: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    keeps: Mapping[str, str] = {"prefill": "pt2", "decode": "onnx"}
    folder = reduced(tiny_bundle, tmp_path / "b", lambda p: keeps.get(p.entry) == p.format)
    session = llama_runtime.load(folder).session()
    tokens = random_tokens(BATCH, 9)
    session.prefill(tokens[:, :8].tolist())
    logits = session.decode(tokens[:, 8].tolist())
    assert_near(logits, expected_logits(tiny_checkpoint, tokens)[:, 8])


def test_the_capacity_of_the_manifest_is_not_believed_past_the_signature(
    short_bundle: Path, tmp_path: Path
) -> None:
    session = llama_runtime.load(copied(short_bundle, tmp_path / "b", max_seq=64)).session()
    before = snapshot(session._states)
    with pytest.raises(InputError):
        session.prefill([1] * 16)
    assert not any(written(before, session._states).values())
