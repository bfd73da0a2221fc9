"""A follower's side: it does what the leader announces, until that ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llama_artifacts.errors import GroupError
from llama_runtime.group import calls
from llama_runtime.group.link import Kind, Link, Message, as_integers
from llama_runtime.loader import LoadedBundle
from llama_runtime.states import States

if TYPE_CHECKING:
    from llama_runtime.programs.base import Program


def follow(bundle: LoadedBundle, link: Link) -> None:
    """Runs what the leader runs, and returns when it ends well.

    To be called in every rank but 0, with the bundle loaded in the group.

    Raises:
        LlamaExportError: what failed first, in this process or another.
    """
    follower = _Follower(bundle, link)
    while (message := link.receive()).kind is not Kind.END:
        try:
            follower.do(message)
        except Exception as cause:  # engines of programs raise whatever they like
            if link.is_over:
                return
            raise link.failure(cause) from cause


class _Follower:
    def __init__(self, bundle: LoadedBundle, link: Link) -> None:
        self._bundle = bundle
        self._records = bundle.manifest.programs
        self._programs: dict[int, Program] = {}
        self._states: dict[int, States] = {}

    def do(self, message: Message) -> None:
        """One message; whatever is raised, this process has lost the thread."""
        kind, number = message.kind, message.states
        if kind is Kind.RUN:
            self._run(message)
        elif kind is Kind.LOAD:
            if message.program not in self._programs:
                record = self._records[message.program]
                self._programs[message.program] = self._bundle.load_program(record)
        elif kind is Kind.STATES:
            signature = self._records[message.program].signature
            sizes = calls.unpack_sizes(signature, message.payload)
            self._states[number] = States.zeros(signature.states, self._bundle.device, sizes)
        elif kind is Kind.DROP:
            del self._states[number]
        elif kind is Kind.ZERO:
            self._states[number].zero_()
        elif kind is Kind.CLEAR:
            axis, *places = as_integers(message.payload)
            self._states[number].clear_(axis, places)
        else:
            raise GroupError(f"expected a message of a known kind, got {kind!r}")

    def _run(self, message: Message) -> None:
        signature = self._records[message.program].signature
        inputs, sizes = calls.unpack(signature, message.payload)
        states: list[torch.Tensor] = []
        if message.states >= 0:
            states = self._states[message.states].tensors()
        flat = [tensor.to(self._bundle.device) for tensor in inputs]
        self._programs[message.program].run(flat, states, sizes)
