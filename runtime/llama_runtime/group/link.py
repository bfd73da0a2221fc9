"""What the leader announces to the followers: messages of a few integers, and tensors as bytes."""

from __future__ import annotations

import contextlib
import datetime
import enum
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import distributed

from llama_artifacts.errors import GroupError, LlamaExportError
from llama_runtime.group.watch import LEADER, Watch
from llama_runtime.shards import Group

SILENCE_FACTOR = 2.0
"""Of the timeout: a process that gives no sign of life for so long is taken for lost.

Native code that waits in a collective gives none, and that ends by the timeout: whoever waits must
be the first to say that another hangs.
"""

_FRAME_BYTES = 4096
_HEAD = 4  # integers: kind, program, states, bytes of the payload
_INLINE_BYTES = _FRAME_BYTES - 8 * _HEAD
_TOKEN_BYTES = 16
_REASON_SECONDS = 1.0
_END_SECONDS = 2.0
# The watch ends a wait; a quiet server may wait for long.
_FOR_EVER = datetime.timedelta(days=3650)


OnEnd: TypeAlias = Callable[["Link", LlamaExportError | None], None]


class Kind(enum.IntEnum):
    """What a message asks for; which of the fields of `Message` it uses is told in brackets."""

    LOAD = 1  # a program [program]
    STATES = 2  # new states, all zero [program, states, payload: sizes]
    DROP = 3  # states that nobody uses any more [states]
    ZERO = 4  # states to zero [states]
    CLEAR = 5  # places of an axis of states to zero [states, payload: axis, places]
    RUN = 6  # a call [program, states, payload: sizes, inputs]
    END = 7  # nothing more will come


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        kind: what it asks for.
        program: an index into the manifest's programs; -1 if it is about none.
        states: the number of a set of states; -1 if it is about none.
        payload: uint8 [bytes].
    """

    kind: Kind
    program: int = -1
    states: int = -1
    payload: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


class Link:
    """The way from the leader to the followers. Every process of the group makes one at its start.

    Messages take a process group of their own, on CPUs, in which a follower waits as long as it
    takes. Beside it a `Watch` tells when a process is lost.

    Args:
        group: of this process; with one of a single process nothing is sent.
        timeout: seconds that making the link may wait for the others, and each collective of the
            programs, as `join` was told.
        on_end: called with the link, once, in a thread of its own, when the group has lost a
            process (with the first error) or the leader ends (with None). Whatever this process
            computes or waits for fails soon after that on CPUs; it may hang on GPUs.

    Raises:
        GroupError: a process did not come.
    """

    def __init__(self, group: Group, *, timeout: float, on_end: OnEnd) -> None:
        self.group = group
        self.lock = threading.RLock()
        self._frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        self._watch: Watch | None = None
        self._is_open = group.size > 1
        self._is_torn = False
        self._timeout = timeout
        if self._is_open:
            try:
                wait = datetime.timedelta(seconds=timeout)
                self._channel = distributed.new_group(backend="gloo", timeout=wait)
                peers = self._connect(timeout)
            except (RuntimeError, OSError) as cause:
                raise GroupError(f"the processes did not meet: {_first_line(cause)}") from cause
            self._watch = Watch(
                peers, silence=SILENCE_FACTOR * timeout, on_end=partial(on_end, self)
            )

    @property
    def is_leader(self) -> bool:
        """Whether this process is rank 0."""
        return self.group.rank == LEADER

    @property
    def is_over(self) -> bool:
        """Whether the leader has said that it ends, all being well."""
        return self._watch is not None and self._watch.is_done

    def send(self, message: Message) -> None:
        """Announces a message to every follower; to be called with `lock` held.

        Raises:
            GroupError: the group has lost a process.
        """
        if not self._is_open:
            return
        if (reason := self.reason()) is not None:
            raise GroupError(reason.message, where=reason.where, hint=reason.hint)
        if self._is_torn:
            raise GroupError("an earlier call was interrupted, which the others may still be in")
        try:
            self._announce(message, self._timeout)
        except RuntimeError as cause:
            raise self.failure(cause) from cause

    def _announce(self, message: Message, timeout: float) -> None:
        """Returns when the followers take it, which they do when they have done all before it."""
        size = message.payload.numel()
        head = torch.tensor([message.kind, message.program, message.states, size])
        self._frame[: 8 * _HEAD] = head.view(torch.uint8)
        if size <= _INLINE_BYTES:
            self._frame[8 * _HEAD : 8 * _HEAD + size] = message.payload
        self._broadcast(self._frame, timeout)
        if size > _INLINE_BYTES:
            self._broadcast(message.payload, timeout)

    def receive(self) -> Message:
        """The next message of the leader, however long it takes.

        Raises:
            GroupError: the group has lost a process.
        """
        try:
            self._broadcast(self._frame)
            kind, program, states, size = self._frame[: 8 * _HEAD].view(torch.int64).tolist()
            payload = self._frame[8 * _HEAD :][:size].clone()
            if size > _INLINE_BYTES:
                payload = torch.empty(size, dtype=torch.uint8)
                self._broadcast(payload)
        except RuntimeError as cause:
            if self.is_over:
                return Message(Kind.END)
            raise self.failure(cause) from cause
        return Message(Kind(kind), program, states, payload)

    @property
    def is_speaker(self) -> bool:
        """Whether it is for this process to say what failed: the leader, or one that lost it."""
        return self.is_leader or (self._watch is not None and self._watch.lost == LEADER)

    def reason(self, wait: float = 0.0) -> LlamaExportError | None:
        """The first error of the group; None if nothing is known after waiting so many seconds."""
        return None if self._watch is None else self._watch.reason(wait)

    def failure(self, cause: BaseException) -> LlamaExportError:
        """Tells the group that this process fails; returns the first error, here or elsewhere.

        A collective fails here when another process is lost: what the watch tells within a moment
        comes first.
        """
        own = cause if isinstance(cause, LlamaExportError) else _as_error(cause)
        if self._watch is None:
            return own
        if (reason := self._watch.reason(_REASON_SECONDS)) is not None:
            return reason
        rank = self.group.rank
        text = own.message if rank == LEADER else f"rank {rank}: {own.message}"
        return self._watch.fail(GroupError(text, where=own.where, hint=own.hint))

    def tear(self) -> None:
        """Nothing can be sent any more: this process left a call that the others may be in."""
        self._is_torn = True

    def close(self) -> None:
        """Ends the followers' wait, if this is the leader and all is well; to be called once."""
        if self._watch is None:
            return
        # A call that hangs keeps the lock; the others are then ended by the watch.
        is_whole = self._watch.reason() is None and not self._is_torn
        if self.is_leader and is_whole and self.lock.acquire(timeout=1.0):
            with contextlib.suppress(RuntimeError):  # one hangs; the watch tells it, too
                self._announce(Message(Kind.END), _END_SECONDS)
            self.lock.release()
        self._is_open = False
        self._watch.close()

    def _broadcast(self, tensor: torch.Tensor, timeout: float | None = None) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = LEADER, 0
        options.timeout = _FOR_EVER if timeout is None else datetime.timedelta(seconds=timeout)
        self._channel.broadcast([tensor], options).wait()

    def _connect(self, timeout: float) -> dict[int, socket.socket]:
        """The sockets of the watch: the leader's to each follower, a follower's to the leader."""
        deadline = time.monotonic() + timeout
        if not self.is_leader:
            place = torch.zeros(8 + _TOKEN_BYTES, dtype=torch.uint8)
            self._broadcast(place, timeout)
            number, secret = as_integers(place[:8])[0], bytes(place[8:].tolist())
            sock = socket.create_connection((_host(), number), timeout)
            sock.sendall(secret + self.group.rank.to_bytes(8, "big"))
            return {LEADER: sock}
        token = secrets.token_bytes(_TOKEN_BYTES)
        host = _host()
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, 0), family=family) as server:
            port = as_bytes([server.getsockname()[1]])
            self._broadcast(torch.cat([port, torch.tensor(list(token)).byte()]), timeout)
            return _accept(server, token, self.group.size - 1, deadline)


def _accept(
    server: socket.socket, token: bytes, num_peers: int, deadline: float
) -> dict[int, socket.socket]:
    """A connection of each follower; others, which do not know the token, are closed."""
    peers: dict[int, socket.socket] = {}
    while len(peers) < num_peers:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        sock = server.accept()[0]
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        greeting = sock.recv(_TOKEN_BYTES + 8, socket.MSG_WAITALL)
        rank = int.from_bytes(greeting[_TOKEN_BYTES:], "big")
        if secrets.compare_digest(greeting[:_TOKEN_BYTES], token) and rank not in peers:
            peers[rank] = sock
        else:
            sock.close()
    return peers


def _host() -> str:
    """Where the leader listens: on no network, if all processes are on one machine."""
    is_alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return "127.0.0.1" if is_alone else os.environ["MASTER_ADDR"]


def _as_error(cause: BaseException) -> GroupError:
    return GroupError(f"a call failed: {type(cause).__name__}: {_first_line(cause)}")


def _first_line(cause: BaseException) -> str:
    """Without the place in the source of Gloo that it begins with."""
    line = next(iter(str(cause).splitlines()), type(cause).__name__)
    return re.sub(r"^\[[^\]]*:\d+\] ", "", line)


def as_bytes(values: Sequence[int]) -> torch.Tensor:
    """Integers as a payload."""
    return torch.tensor(values, dtype=torch.int64).view(torch.uint8)


def as_integers(payload: torch.Tensor) -> list[int]:
    """The integers of such a payload."""
    return [int(value) for value in payload.view(torch.int64)]
