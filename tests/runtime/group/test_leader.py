"""What the leader announces, in which order, and what follows from a failure."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import llama_runtime
from llama_artifacts.errors import GroupError, InputError, LlamaExportError
from llama_runtime.group import follow, lead
from llama_runtime.group.link import Kind, Link, Message
from llama_runtime.programs.pt2 import Pt2Program
from llama_runtime.shards import Group
from llama_runtime.states import States

CALL = {"tokens": [[5]], "pos": 0}


class FakeLink:
    """Keeps what was sent; a follower may receive it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sent: list[Message] = []
        self.error: LlamaExportError | None = None
        self.is_over = self.is_torn = False

    def send(self, message: Message) -> None:
        assert self.lock.acquire(blocking=False)
        if self.error is not None:
            raise self.error
        self.sent.append(message)

    def tear(self) -> None:
        self.is_torn = True

    def receive(self) -> Message:
        return self.sent.pop(0) if self.sent else Message(Kind.END)

    def failure(self, cause: Exception) -> LlamaExportError:
        self.error = GroupError(f"failed: {cause}")
        return self.error

    @property
    def kinds(self) -> list[str]:
        return [message.kind.name for message in self.sent]


def led(folder: Path) -> tuple[llama_runtime.LoadedBundle, Any]:
    link: Any = FakeLink()
    bundle = llama_runtime.load(folder, format="pt2")
    lead(bundle, link)
    return bundle, link


@pytest.fixture
def pair(short_bundle: Path) -> tuple[llama_runtime.LoadedBundle, Any]:
    return led(short_bundle)


def test_programs_states_and_calls_are_announced(
    pair: tuple[llama_runtime.LoadedBundle, Any],
) -> None:
    bundle, link = pair
    decode = bundle.entry("decode")
    states = decode.new_states()
    decode(states, **CALL)
    decode(states, **CALL)
    assert link.kinds == ["LOAD", "STATES", "RUN", "RUN"]
    assert {message.program for message in link.sent} == {
        bundle.manifest.programs.index(p) for p in bundle.manifest.programs if p.entry == "decode"
    }


def test_states_of_entries_that_share_them_have_one_number(
    pair: tuple[llama_runtime.LoadedBundle, Any],
) -> None:
    bundle, link = pair
    session = bundle.session()
    session.prefill([1, 2, 3])
    session.decode(4)
    runs = [message for message in link.sent if message.kind is Kind.RUN]
    assert [message.states for message in runs] == [0, 0]
    assert runs[0].program != runs[1].program


def test_states_that_are_gone_are_dropped_and_zeroes_are_passed_on(
    pair: tuple[llama_runtime.LoadedBundle, Any],
) -> None:
    bundle, link = pair
    decode = bundle.entry("decode")
    first = decode.new_states()
    second = decode.new_states()
    second.zero_()
    second.clear_(2, [3, 4])
    del first
    gc.collect()
    decode(second, **CALL)
    assert link.kinds == ["LOAD", "STATES", "STATES", "ZERO", "CLEAR", "DROP", "RUN"]
    assert [m.states for m in link.sent[1:]] == [0, 1, 1, 1, 0, 1]


def test_other_states_are_refused_and_nothing_runs(
    pair: tuple[llama_runtime.LoadedBundle, Any],
) -> None:
    bundle, link = pair
    decode = bundle.entry("decode")
    own = {name: tensor.clone() for name, tensor in decode.new_states().items()}
    sent = len(link.sent)
    with pytest.raises(InputError, match="expected states that every process has"):
        decode(own, **CALL)
    assert link.kinds[sent:] in ([], ["DROP"])  # the first ones are gone by then
    assert link.error is None


def test_a_refused_input_is_not_announced(pair: tuple[llama_runtime.LoadedBundle, Any]) -> None:
    bundle, link = pair
    decode = bundle.entry("decode")
    states = decode.new_states()
    with pytest.raises(InputError):
        decode(states, tokens=[[5]], pos=-1)
    assert link.kinds == ["LOAD", "STATES"]


def test_a_call_that_fails_here_ends_the_group(
    pair: tuple[llama_runtime.LoadedBundle, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, link = pair
    decode = bundle.entry("decode")
    states = decode.new_states()

    def run(*args: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Pt2Program, "run", run)
        with pytest.raises(GroupError, match="failed: no room"):
            decode(states, **CALL)
    with pytest.raises(GroupError, match="failed: no room"):
        decode(states, **CALL)
    assert link.kinds == ["LOAD", "STATES", "RUN"]


def test_after_an_interrupt_nothing_is_sent(
    pair: tuple[llama_runtime.LoadedBundle, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, link = pair
    decode = bundle.entry("decode")
    states = decode.new_states()

    def run(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Pt2Program, "run", run)
    with pytest.raises(KeyboardInterrupt):
        decode(states, **CALL)
    assert link.is_torn


def test_no_gradients_where_others_follow(short_bundle: Path) -> None:
    bundle, _ = led(short_bundle)
    with pytest.raises(LlamaExportError, match="has no gradients where one process leads"):
        bundle.trainable("prefill")


def test_a_follower_does_what_was_announced(
    short_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of both, after the same calls, are the same."""
    bundle, link = led(short_bundle)
    session = bundle.session()
    session.prefill([1, 2, 3])
    session.decode(4)
    made: list[States] = []

    class Kept(States):
        @classmethod
        def zeros(cls, *args: Any) -> States:
            made.append(States.zeros(*args))
            return made[-1]

    monkeypatch.setattr("llama_runtime.group.follower.States", Kept)
    follow(llama_runtime.load(short_bundle, format="pt2"), link)
    (states,) = made
    for name, tensor in session._states.items():
        assert torch.equal(tensor, states[name])
        assert tensor.any()


def test_a_follower_that_fails_says_so(short_bundle: Path) -> None:
    bundle, link = led(short_bundle)
    bundle.entry("decode")
    link.sent.append(Message(Kind.DROP, states=99))
    with pytest.raises(GroupError, match="failed: 99"):
        follow(llama_runtime.load(short_bundle, format="pt2"), link)


def test_a_link_of_one_process_sends_nothing(short_bundle: Path) -> None:
    bundle = llama_runtime.load(short_bundle, format="pt2")
    link = Link(Group(0, 1), timeout=1.0, on_end=lambda link, error: None)
    lead(bundle, link)
    alone = llama_runtime.load(short_bundle, format="pt2").session().prefill([1, 2])
    assert torch.equal(bundle.session().prefill([1, 2]), alone)
    link.close()
