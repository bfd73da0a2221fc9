"""The programs of a bundle, ready to be driven, and what was found out about them so far."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch

import llama_runtime
from llama_artifacts.bundle import open_bundle
from llama_artifacts.manifest import Format, Manifest, Program
from llama_export.laws.calls import PLANNED, Sequences, new_sequences
from llama_export.laws.drive import Driven, drive
from llama_export.laws.generation import Generated, generate
from llama_export.laws.memory import (
    NUM_FREE_ROWS,
    Memory,
    Order,
    capacity_of,
    new_memory,
    rows_of,
)
from llama_export.laws.oracle import Oracle, load_model, network_weights, repeat_heads
from llama_export.laws.spans import Plan, usual
from llama_export.model.llama import Llama
from llama_runtime import compat
from llama_runtime.comparison import LIMITS
from llama_runtime.entry import Entry
from llama_runtime.places import find_weights
from llama_runtime.shards import Group
from llama_runtime.weights import bundle_weights

NUM_TOKENS = 24

_Key = tuple[str, Format, int]


class Bench:
    """Loads each program once, runs its usual plan once, and keeps what it gave.

    Programs of several shards need a bench in each process of a group, and the same done with all.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        weights_dir: Path | None = None,
        group: Group | None = None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.weights_dir = weights_dir
        self._group = group
        self._bundles: dict[tuple[str, bool], llama_runtime.LoadedBundle] = {}
        self._entries: dict[_Key, Entry] = {}
        self._driven: dict[_Key, Driven] = {}
        self._generated: dict[_Key, tuple[Generated, ...]] = {}

    @cached_property
    def sequences(self) -> Sequences:
        """What is fed to every program."""
        return random_sequences(self.manifest, NUM_TOKENS)

    @cached_property
    def oracle(self) -> Oracle:
        """The eager model on the bench's sequences."""
        return Oracle(self._model(), self.sequences, 0 if self._group is None else self._group.rank)

    @cached_property
    def ungrouped(self) -> Oracle:
        """The same network with a key/value head for every query head."""
        model = self._model()
        repeat_heads(model, self.manifest.model.num_heads // self.manifest.model.num_kv_heads)
        return Oracle(model, self.sequences)

    @cached_property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The network's weights by name, whole, mapped."""
        places = find_weights(open_bundle(self.folder), weights_dir=self.weights_dir)
        return network_weights(bundle_weights(self.manifest, places), self.manifest)

    def _model(self) -> Llama:
        return load_model(self.weights, self.manifest, where=self.folder)

    def _loaded(self, device: str, num_shards: int) -> llama_runtime.LoadedBundle:
        key = (device, num_shards > 1)
        if key not in self._bundles:
            if device == "cuda" and self._group is not None:  # each process has its own
                device = f"cuda:{torch.cuda.current_device()}"
            self._bundles[key] = llama_runtime.load(
                self.folder,
                device=device,
                weights_dir=self.weights_dir,
                group=self._group if num_shards > 1 else None,
            )
        return self._bundles[key]

    def entry(self, program: Program) -> Entry:
        """The program as a callable.

        Raises:
            LlamaExportError: it cannot be loaded.
        """
        key = _key(program)
        if key not in self._entries:
            loaded = self._loaded(device_of(program), program.shards)
            self._entries[key] = loaded.open(program)
        return self._entries[key]

    def companion(self, program: Program, entry: str) -> Program | None:
        """The program of another entry with the same states in the same format, if it runs here."""
        for other in self.manifest.programs:
            is_like = _key(other) == (entry, program.format, program.shards)
            if is_like and other.signature.states == program.signature.states and runs_here(other):
                return other
        return None

    def usual(self, program: Program) -> Plan:
        """The usual plan of a program."""
        return usual(program.entry, num_rows(program), self.sequences.num_tokens)

    def drive(
        self,
        program: Program,
        plan: Plan | None = None,
        *,
        sequences: Sequences | None = None,
        memory: Memory | None = None,
    ) -> Driven:
        """Runs a plan; the usual plan of the bench's sequences is run once and kept."""
        key = _key(program)
        is_usual = plan is None and sequences is None and memory is None
        if is_usual and key in self._driven:
            return self._driven[key]
        entry = self.entry(program)
        plan = plan or self.usual(program)
        memory = memory or self.memory(program)
        driven = drive(entry, plan, sequences or self.sequences, memory)
        if is_usual:
            self._driven[key] = driven
        return driven

    def memory(self, program: Program, *, order: Order = "scattered", num_wider: int = 0) -> Memory:
        """New poisoned states of a program."""
        entry = self.entry(program)
        return new_memory(entry, self.sequences.num_tokens, order=order, num_wider=num_wider)

    def generate(self, program: Program) -> tuple[Generated, ...]:
        """What a generating program gives after the beginning of the bench's sequences; once."""
        key = _key(program)
        if key not in self._generated:
            self._generated[key] = generate(self.entry(program), self.oracle)
        return self._generated[key]

    def drop(self, format: Format) -> None:
        """Lets go of the programs of a format; what they gave is kept."""
        self._entries = {key: entry for key, entry in self._entries.items() if key[1] != format}


def _key(program: Program) -> _Key:
    return program.label, program.format, program.shards


def random_sequences(manifest: Manifest, num_tokens: int) -> Sequences:
    """Random tokens for every row of any program, as many as fit; always the same."""
    room = [capacity_of(program.signature) for program in manifest.programs]
    fitting = min(num_tokens, manifest.max_seq - 1, *(n for n in room if n is not None))
    shape = (max(NUM_FREE_ROWS, manifest.batch), fitting)
    vocab_size = manifest.model.vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, shape, generator=generator, dtype=torch.int32)
    return new_sequences(tokens, vocab_size)


def num_rows(program: Program) -> int:
    """Sequences that one call takes."""
    return rows_of(program.signature)


def limit_of(program: Program) -> float:
    """The largest relative difference that rounding in the program's dtype explains."""
    return LIMITS[program.dtype]


def is_known(program: Program) -> bool:
    """Whether this version can drive the program's entry."""
    if not set(program.variant) <= {"Rows", "B"}:
        return False
    return program.entry in PLANNED or is_generating(program)


def is_generating(program: Program) -> bool:
    """Whether the program gives tokens rather than logits."""
    return "<" in program.entry


def runs_here(program: Program) -> bool:
    """Whether this machine can run the program."""
    return compat.fits(program, device=device_of(program), allow_native=True)


def device_of(program: Program) -> str:
    """Where the program is run here."""
    if program.target.device == "cuda" and not torch.cuda.is_available():
        return "cpu"
    return program.target.device
