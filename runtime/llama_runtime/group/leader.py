"""The leader's side: whatever it loads, makes or runs is announced first."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from llama_artifacts import manifest
from llama_artifacts.errors import InputError
from llama_runtime.group import calls
from llama_runtime.group.link import Kind, Link, Message, as_bytes
from llama_runtime.loader import LoadedBundle
from llama_runtime.programs.base import Program
from llama_runtime.states import States


def lead(bundle: LoadedBundle, link: Link) -> Leader:
    """Makes a bundle that was loaded in a group one whose calls the followers join in.

    To be called in rank 0, before the first entry is loaded, while the other ranks `follow`.
    """
    leader = Leader(link, bundle.manifest.programs)
    bundle.mirror = leader
    return leader


class Leader:
    """Mirrors a bundle's programs and states in the followers; see `llama_runtime.loader.Mirror`.

    A call that fails in any process ends the group: from then on every call raises what failed
    first. So does one that a signal interrupts here. Calls from several threads take turns.
    """

    def __init__(self, link: Link, programs: Sequence[manifest.Program]) -> None:
        self._link = link
        self._programs = programs
        self._numbers: dict[tuple[int, ...], int] = {}
        self._num_states = 0
        self._dropped: deque[tuple[int, ...]] = deque()

    def load(self, record: manifest.Program, load: Callable[[], Program]) -> Program:
        """Loads a program here and, at the same time, in the followers.

        Raises:
            GroupError: the group has lost a process.
        """
        index = self._programs.index(record)
        # Whatever else is there to refuse would end the followers, too.
        self._send(Message(Kind.LOAD, index))
        return LedProgram(self, index, load())

    def add(self, record: manifest.Program, states: States) -> None:
        """Makes the same states in the followers, all zero.

        Raises:
            GroupError: the group has lost a process.
        """
        tensors = states.tensors()
        key = tuple(map(id, tensors))
        with self._link.lock:
            number, self._num_states = self._num_states, self._num_states + 1
            payload = calls.pack(record.signature, states.sizes)
            index = self._programs.index(record)
            self._send(Message(Kind.STATES, index, number, payload))
            self._numbers[key] = number
        weakref.finalize(tensors[0], self._dropped.append, key).atexit = False
        states.mirror = self

    def zero(self, tensors: Sequence[torch.Tensor]) -> None:
        """Zeroes the followers' states as those tensors are.

        Raises:
            GroupError: the group has lost a process.
        """
        self._send(Message(Kind.ZERO, states=self._number(tensors)))

    def clear(self, tensors: Sequence[torch.Tensor], axis: int, places: Sequence[int]) -> None:
        """Zeroes places of an axis in the followers.

        Raises:
            GroupError: the group has lost a process.
        """
        payload = as_bytes([axis, *places])
        self._send(Message(Kind.CLEAR, -1, self._number(tensors), payload))

    @contextlib.contextmanager
    def call(
        self,
        index: int,
        inputs: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        sizes: Mapping[str, int],
    ) -> Iterator[None]:
        """Within the block the followers run the program, too.

        Raises:
            InputError: the states were not made by `new_states`; nothing has run then.
            GroupError: the group has lost a process, or this one fails now.
        """
        number = self._number(states) if states else -1
        payload = calls.pack(self._programs[index].signature, sizes, inputs)
        with self._link.lock:
            self._send(Message(Kind.RUN, index, number, payload))
            try:
                yield
            except Exception as cause:  # the others are in the middle of the call
                raise self._link.failure(cause) from cause
            except BaseException:  # a signal, which is no failure of the group
                self._link.tear()
                raise

    def _number(self, tensors: Sequence[torch.Tensor]) -> int:
        with self._link.lock:
            self._drop()  # other tensors may have taken the places of these
            number = self._numbers.get(tuple(map(id, tensors)))
        if number is None:
            raise InputError(
                "expected states that every process has",
                where="states",
                hint="pass entry.new_states()",
            )
        return number

    def _send(self, message: Message) -> None:
        with self._link.lock:
            self._drop()
            self._link.send(message)

    def _drop(self) -> None:
        """Lets the followers forget states that are gone here."""
        while self._dropped:
            number = self._numbers.pop(self._dropped.popleft())
            self._link.send(Message(Kind.DROP, states=number))


class LedProgram:
    """See `Program`. Runs in every process of the group."""

    def __init__(self, leader: Leader, index: int, program: Program) -> None:
        self._leader = leader
        self._index = index
        self.program = program

    def run(
        self, inputs: list[torch.Tensor], states: list[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[torch.Tensor]:
        with self._leader.call(self._index, inputs, states, sizes):
            return self.program.run(inputs, states, sizes)
