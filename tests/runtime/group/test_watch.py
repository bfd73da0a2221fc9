"""Connections that end, fall silent or bring an error, and who is told of it."""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from llama_artifacts.errors import GroupError, InputError, LlamaExportError
from llama_runtime.group import watch
from llama_runtime.group.watch import Watch

WAIT = 5.0
End = LlamaExportError | None


class Group:
    """Watches that are connected to that of rank 0, each with what it was told at its end."""

    def __init__(self, size: int, silence: float = 60.0) -> None:
        pairs = [socket.socketpair() for _ in range(1, size)]
        self.ends: list[queue.Queue[End]] = [queue.Queue() for _ in range(size)]
        self.sockets = [second for _, second in pairs]
        leader = Watch(
            {rank: pair[0] for rank, pair in enumerate(pairs, 1)},
            silence=silence,
            on_end=self.ends[0].put,
        )
        self.watches = [leader] + [
            Watch({0: sock}, silence=silence, on_end=self.ends[rank].put)
            for rank, sock in enumerate(self.sockets, 1)
        ]

    def end(self, rank: int) -> End:
        return self.ends[rank].get(timeout=WAIT)

    def message(self, rank: int) -> str:
        error = self.end(rank)
        assert error is not None
        return error.message


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Group]]:
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.05)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    made: list[Group] = []

    def group(*args: float) -> Group:
        made.append(Group(*args))  # type: ignore[arg-type]
        return made[-1]

    yield group
    for each in (one for group in made for one in group.watches):
        each.close()


def test_one_that_is_gone_is_told_to_all_the_others(make: Callable[..., Group]) -> None:
    group = make(4)
    group.sockets[1].shutdown(socket.SHUT_RDWR)  # as when rank 2 is killed
    text = "rank 2 is gone: it was killed, or crashed"
    assert [group.message(rank) for rank in (0, 1, 3)] == [text] * 3
    assert [each.lost for each in group.watches] == [2, None, 0, None]


def test_an_error_reaches_all_and_is_the_first_one_for_each(make: Callable[..., Group]) -> None:
    group = make(3)
    first = group.watches[1].fail(GroupError("rank 1: no memory", where="decode", hint="add some"))
    assert first.message == "rank 1: no memory"
    for rank in (0, 2):
        error = group.end(rank)
        assert isinstance(error, GroupError)
        assert (error.message, error.where, error.hint) == (
            "rank 1: no memory",
            "decode",
            "add some",
        )
    later = group.watches[2].fail(InputError("the call failed"))
    assert later.message == "rank 1: no memory"
    assert group.watches[0].reason() is not None
    assert group.watches[0].lost is None


def test_whoever_fails_and_then_ends_was_not_lost_without_a_word(
    make: Callable[..., Group],
) -> None:
    group = make(2)
    group.watches[0].fail(GroupError("a call failed"))
    group.watches[0].close()
    assert group.message(1) == "a call failed"
    group.watches[1].close()
    assert group.watches[1].lost is None


def test_an_end_without_failure_is_none(make: Callable[..., Group]) -> None:
    group = make(3)
    group.watches[0].close()
    assert [group.end(rank) for rank in (1, 2)] == [None, None]
    assert [each.is_done for each in group.watches] == [False, True, True]
    assert all(each.reason() is None for each in group.watches)


def test_one_that_is_silent_is_lost(make: Callable[..., Group]) -> None:
    ours, theirs = socket.socketpair()
    ends: queue.Queue[End] = queue.Queue()
    one = Watch({1: ours}, silence=0.3, on_end=ends.put)
    started = time.monotonic()
    error = ends.get(timeout=WAIT)
    assert error is not None
    assert error.message == "rank 1 has been silent for 0.3 s"
    assert 0.25 < time.monotonic() - started < WAIT
    assert one.lost == 1
    one.close()
    theirs.close()


def test_beats_keep_a_quiet_group_alive(make: Callable[..., Group]) -> None:
    group = make(3, 0.5)
    time.sleep(1.2)
    assert [each.reason() for each in group.watches] == [None] * 3
    assert all(end.empty() for end in group.ends)


def test_the_launcher_is_missed_too(
    make: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    group = make(2)
    parent = os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: parent + 1)
    assert group.message(0) == "torchrun is gone: it was killed, or crashed"


def test_noise_on_a_connection_is_no_word(make: Callable[..., Group]) -> None:
    group = make(2)
    group.sockets[0].send(watch._HEAD.pack(b"F", 40)[:2])  # half of a frame's head
    group.sockets[0].shutdown(socket.SHUT_RDWR)
    assert group.message(0) == "rank 1 is gone: it was killed, or crashed"
