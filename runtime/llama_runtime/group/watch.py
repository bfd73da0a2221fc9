"""Notices within moments that a process of the group is gone, and tells the others why.

The leader has a connection to each follower, beside those of the collectives: a process that waits
for nobody has no other way to learn of a loss, and one that hangs in a collective may be waiting
for a third. A frame is one byte of its kind, two of its length, and so many bytes of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from llama_artifacts.errors import GroupError, LlamaExportError

LEADER = 0
BEAT_SECONDS = 1.0
_STARVED_SECONDS = 3 * BEAT_SECONDS
_CLOSE_SECONDS = 3.0
_FAILED_SECONDS = 0.2  # others may hang until this process is gone
_BEAT, _DONE, _FAILED = b".", b"D", b"F"
_HEAD = struct.Struct(">cH")
_MAX_LEN = 1000  # of a text, which is then far from the largest length of a frame
_LAUNCHED_VARIABLE = "TORCHELASTIC_RUN_ID"

OnEnd = Callable[[LlamaExportError | None], None]


class Watch:
    """Holds the connections of this process, and a thread that listens to them.

    A process is lost when its connection ends without a word, when it says that it failed, or when
    it is silent for too long; then the leader tells the others, and each one's `on_end` is called, once,
    in the thread of the watch. The processes that `torchrun` started are lost without it.

    Attributes:
        is_done: whether the leader has said that all went well and that it ends.
        lost: the rank that was lost without a word, if this process saw that before all else.

    Args:
        peers: a connected socket for each rank that this one listens to; owned from here on.
        silence: seconds without a beat after which a process is taken for lost.
        on_end: what to do then; its argument is the first error, or None where the leader says that
            all went well.
    """

    def __init__(
        self, peers: Mapping[int, socket.socket], *, silence: float, on_end: OnEnd
    ) -> None:
        self._silence = silence
        self._on_end = on_end
        self.is_done = False
        self.lost: int | None = None
        self._sockets = dict(peers)
        self._received = dict.fromkeys(peers, b"")
        self._heard = dict.fromkeys(peers, time.monotonic())
        self._reason: LlamaExportError | None = None
        self._is_known = threading.Event()
        self._close_at: float | None = None
        self._lock = threading.Lock()  # of sending, and of who fails first
        self._selector = selectors.DefaultSelector()
        for rank, sock in self._sockets.items():
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, rank)
        self._parent = os.getppid() if _LAUNCHED_VARIABLE in os.environ else None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def reason(self, wait: float = 0.0) -> LlamaExportError | None:
        """The first error of the group; None if nothing is known after waiting so many seconds."""
        self._is_known.wait(wait)
        return self._reason

    def fail(self, error: LlamaExportError) -> LlamaExportError:
        """Tells the others that this process fails; returns the first error of the group."""
        with self._lock:
            if self._reason is None:
                self._reason = error
                self._tell(_FAILED, _as_json(error))
                self._is_known.set()
        return self._reason

    def close(self) -> None:
        """Says that all went well, if it did, and waits a moment for the others to end, too."""
        with self._lock:
            wait = _FAILED_SECONDS
            if self._reason is None:
                self._tell(_DONE)
                wait = _CLOSE_SECONDS
            self._close_at = time.monotonic() + wait
            for sock in list(self._sockets.values()):
                with contextlib.suppress(OSError):  # the thread has closed it
                    sock.shutdown(socket.SHUT_WR)
        self._thread.join(wait)

    # The thread of the watch

    def _run(self) -> None:
        beat_at = 0.0
        woken_at = time.monotonic()
        while self._sockets:
            ready = [key.data for key, _ in self._selector.select(BEAT_SECONDS / 2)]
            is_late = time.monotonic() - woken_at > _STARVED_SECONDS
            woken_at = time.monotonic()
            self._read(ready)
            if self._close_at is not None:
                if woken_at > self._close_at:
                    break
                continue
            if woken_at >= beat_at:
                beat_at = woken_at + BEAT_SECONDS
                with self._lock:
                    self._tell(_BEAT)
            if is_late:
                # Native code held the interpreter: here, and for as long in the others.
                self._heard = dict.fromkeys(self._heard, woken_at)
            self._check(woken_at)
        self._selector.close()
        for sock in self._sockets.values():
            sock.close()

    def _read(self, ranks: Sequence[int]) -> None:
        """Takes what came; those that are gone first, since others fail for lack of them."""
        ended = [rank for rank in ranks if self._is_ended(rank)]
        words = [(rank, *word) for rank in ranks for word in self._words(rank)]
        parted = {rank for rank, _, _ in words}  # after its last word nothing comes, or is read
        for rank in parted.union(ended):
            self._selector.unregister(self._sockets[rank])
            self._sockets.pop(rank).close()
            if rank not in parted:
                self._lose(GroupError(f"rank {rank} is gone: it was killed, or crashed"), rank)
        for rank, kind, text in words:
            if kind == _FAILED:
                self._lose(_from_json(text))
            elif rank == LEADER and self._close_at is None:
                self.is_done = True
                self._on_end(None)

    def _is_ended(self, rank: int) -> bool:
        """Receives all that is there; whether the connection has ended."""
        self._heard[rank] = time.monotonic()
        try:
            while data := self._sockets[rank].recv(1 << 16):
                self._received[rank] += data
        except BlockingIOError:
            return False
        except OSError:  # reset: it died with frames unread
            return True
        return True

    def _words(self, rank: int) -> list[tuple[bytes, bytes]]:
        """The whole frames of what was received, but for the beats."""
        data, words = self._received[rank], []
        while len(data) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(data)
            if len(data) < _HEAD.size + length:
                break
            if kind != _BEAT:
                words.append((kind, data[_HEAD.size : _HEAD.size + length]))
            data = data[_HEAD.size + length :]
        self._received[rank] = data
        return words

    def _check(self, now: float) -> None:
        if self._parent not in (None, os.getppid()):
            self._lose(GroupError("torchrun is gone: it was killed, or crashed"))
        for rank, heard in self._heard.items():
            if rank in self._sockets and now - heard > self._silence:
                text = f"rank {rank} has been silent for {self._silence:g} s"
                self._lose(GroupError(text), rank)

    def _lose(self, error: LlamaExportError, rank: int | None = None) -> None:
        with self._lock:
            if self._reason is not None or self._close_at is not None:
                return
            self._reason, self.lost = error, rank
            self._tell(_FAILED, _as_json(error))
            self._is_known.set()
        self._on_end(error)

    def _tell(self, kind: bytes, text: bytes = b"") -> None:
        frame = _HEAD.pack(kind, len(text)) + text
        for sock in list(self._sockets.values()):
            with contextlib.suppress(OSError):  # it is gone, or takes nothing: the thread notices
                sock.send(frame)


def _as_json(error: LlamaExportError) -> bytes:
    fields = {"message": error.message, "where": error.where, "hint": error.hint}
    return json.dumps({key: text and text[:_MAX_LEN] for key, text in fields.items()}).encode()


def _from_json(text: bytes) -> GroupError:
    fields: dict[str, str | None] = json.loads(text)
    return GroupError(str(fields["message"]), where=fields["where"], hint=fields["hint"])
