"""A bundle folder becomes callable entries: manifest, versions, target, digests, then programs."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch

from llama_artifacts import signing
from llama_artifacts.bundle import Bundle, check_digest, open_bundle
from llama_artifacts.errors import CompatibilityError, InputError, TokenizerError
from llama_artifacts.manifest import (
    CHAT_TEMPLATE_NAME,
    FORMATS,
    TOKENIZER_NAME,
    Format,
    Manifest,
    Program,
)
from llama_runtime import compat
from llama_runtime.choice import choose
from llama_runtime.cuda_graphs import CudaGraphs, graphs_for
from llama_runtime.devices import find_device
from llama_runtime.entry import Entry, Variant
from llama_runtime.generate import Generation, Message, TokenStream, prompt_ids
from llama_runtime.mirror import Mirror
from llama_runtime.places import find_weights
from llama_runtime.programs.base import Loading, load_program
from llama_runtime.programs.base import Program as LoadedProgram
from llama_runtime.sampling import SamplingParams
from llama_runtime.session import Session
from llama_runtime.shards import Group, check_shards, launch_hint
from llama_runtime.tokenizer import Tokenizer
from llama_runtime.trainable import TrainableEntry
from llama_runtime.weights import bundle_weights

_TOKENIZER_FILES = (TOKENIZER_NAME, "tokenizer_config.json", CHAT_TEMPLATE_NAME)


def load(
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    format: Format | None = None,
    threads: int | None = None,
    allow_native: bool = True,
    weights_dir: str | os.PathLike[str] | None = None,
    require_signature: str | os.PathLike[str] | None = None,
    cuda_graphs: bool | None = None,
    group: Group | None = None,
) -> LoadedBundle:
    """Opens a bundle. Programs are loaded when they are first asked for.

    Args:
        path: the bundle's folder.
        device: `cpu`, `cuda` or `cuda:N`.
        format: `aoti`, `pt2` or `onnx`; None: for each entry the fastest that fits this machine.
        threads: CPU threads of the programs; sets torch's number for the whole process. None
            leaves it as it is.
        allow_native: False refuses programs that are native code (format aoti), for bundles
            whose origin is not trusted.
        weights_dir: the checkpoint's folder, for a bundle that refers to its weights; None: the
            hub's cache, or a download.
        require_signature: a public key (PEM file) by which the bundle must be signed, every file
            as it was signed. It is checked before anything of the bundle is mapped or loaded;
            `llama_artifacts.signing.open_signed` says what holds after that.
        cuda_graphs: see `llama_runtime.cuda_graphs.graphs_for`.
        group: the processes that run programs together, of which this is one (see
            `llama_runtime.shards.join`): those programs are loaded that are for so many. All of them
            load, with the same arguments. None: this process runs programs by itself.

    Raises:
        SignatureError: the bundle is not signed so.
        ManifestError: the folder holds no sound manifest.
        IntegrityError: a file is missing or has another size than recorded. Digests of programs
            are checked when they are loaded, that of the weights by `llama-export verify`; weights
            that are elsewhere are checked here.
        CompatibilityError: no such device, the bundle has no weights, or they cannot be had; it has
            no programs for so many processes, or another bundle is loaded in another of them.
    """
    if format is not None and format not in FORMATS:
        raise InputError(f"expected one of {', '.join(FORMATS)}, got `{format}`", where="format")
    if require_signature is None:
        bundle = open_bundle(Path(path))
    else:
        bundle, _ = signing.open_signed(Path(path), signing.PublicKey(Path(require_signature)))
    # Programs are opened later, perhaps from another working folder.
    bundle = replace(bundle, folder=bundle.folder.absolute())
    place = find_device(device, group)
    places = find_weights(bundle, weights_dir=None if weights_dir is None else Path(weights_dir))
    if threads is not None:
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise InputError(f"expected at least 1, got {threads!r}", where="threads")
        torch.set_num_threads(threads)
    graphs = graphs_for(place, cuda_graphs)
    check_shards(bundle, group)
    return LoadedBundle(bundle, places, place, format, threads, allow_native, graphs, group)


class LoadedBundle:
    """A bundle on a device. Entries and sessions made from it share one copy of the weights.

    Safe to ask for entries from several threads; what it gives out is not safe to share.

    Attributes:
        mirror: runs calls in other processes, too; set before the first entry is asked for.
    """

    def __init__(
        self,
        bundle: Bundle,
        places: Mapping[str, Path],
        device: torch.device,
        format: Format | None,
        threads: int | None,
        allow_native: bool,
        graphs: CudaGraphs | None = None,
        group: Group | None = None,
    ) -> None:
        self._bundle = bundle
        self._places = places
        self._device = device
        self._format = format
        self._threads = threads
        self._allow_native = allow_native
        self._graphs = graphs
        self.mirror: Mirror | None = None
        self._group = group
        num_shards = 1 if group is None else group.size
        self._programs = tuple(p for p in bundle.manifest.programs if p.shards == num_shards)
        self._entries: dict[str, Entry] = {}
        self._weights: dict[str, torch.Tensor] | None = None
        self._lock = threading.RLock()

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self._bundle.manifest

    @property
    def device(self) -> torch.device:
        """Where its programs run."""
        return self._device

    @property
    def programs(self) -> tuple[Program, ...]:
        """Those of the manifest's programs that are for as many processes as run it here."""
        return self._programs

    @property
    def group(self) -> Group | None:
        """The processes that run programs together; None: this one alone."""
        return self._group

    @property
    def folder(self) -> Path:
        """The bundle's folder."""
        return self._bundle.folder

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Every weight by name, on the device; on the CPU a read-only use of the mapped files.

        In a group those that are cut are this process's parts.
        """
        with self._lock:
            if self._weights is None:
                weights = bundle_weights(self.manifest, self._places, self._group)
                if self._device.type != "cpu":
                    weights = {name: tensor.to(self._device) for name, tensor in weights.items()}
                self._weights = weights
            return self._weights

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer.

        Raises:
            TokenizerError: the bundle has none.
            IntegrityError: one of its files is damaged.
        """
        if self.manifest.tokenizer is None:
            raise TokenizerError(
                "the bundle has no tokenizer", where=self.folder, hint="use token ids (--tokens)"
            )
        for name in _TOKENIZER_FILES:
            if name in self.manifest.files:
                check_digest(self._bundle, name)
        return Tokenizer.load(self.folder)

    def entry(self, name: str) -> Entry:
        """The entry of that name, loaded on first use.

        Args:
            name: such as `decode`; `generate` is enough where the bundle has one `generate<N>`.

        Raises:
            InputError: the bundle has no such entry.
            CompatibilityError: none of its programs fits the machine, or the format asked for.
            IntegrityError: the program's file is damaged.
        """
        with self._lock:
            if name not in self._entries:
                program = self._choose(name, self._format)
                variants = [
                    Variant(other.variant, partial(self._load, other))
                    for other in self._programs
                    if other.variant and _is_alike(other, program) and self._fits(other)
                ]
                loaded = self._load(program)
                self._entries[name] = Entry(program, loaded, self._device, variants, self.mirror)
            return self._entries[name]

    def trainable(self, name: str) -> TrainableEntry:
        """A module that computes an entry without states, such as `loss_packed`, with gradients.

        Each one has parameters of its own: copies of the weights, under the checkpoint's names. In a
        group they are copies of this process's parts, and gradients those of the parts.

        Raises:
            InputError: the bundle has no such entry.
            CompatibilityError: it is not there as pt2, the only format with gradients, or the
                bundle is loaded in another; it has states; its weights have eight bits.
            IntegrityError: the program's file is damaged.
        """
        if self.mirror is not None:
            raise CompatibilityError(
                f"`{name}` has no gradients where one process leads others",
                where=self.folder,
                hint="call it in every process, without a leader",
            )
        formats = [program.format for program in self._programs if program.entry == name]
        found = self._format or ("pt2" if "pt2" in formats else next(iter(formats), None))
        if found not in ("pt2", None):
            raise CompatibilityError(
                f"`{name}` in format {found} has no gradients",
                where=self.folder,
                hint="load the bundle with format pt2"
                if "pt2" in formats
                else f"build it with --entry {name} --format pt2",
            )
        with self._lock:
            return TrainableEntry(self._loading(self._choose(name, "pt2")), self.manifest.cuts)

    def open(self, program: Program) -> Entry:
        """One program of the manifest as a callable, and no other, whatever call it gets.

        Raises:
            CompatibilityError: it does not fit the machine.
            IntegrityError: its file is damaged.
        """
        if program not in self._programs:
            message = f"`{program.label}` is run by {program.shards} processes together"
            raise CompatibilityError(message, where=self.folder, hint=launch_hint(program.shards))
        compat.check(program, device=str(self._device), allow_native=self._allow_native)
        with self._lock:
            return Entry(program, self._load(program), self._device, mirror=self.mirror)

    def load_program(self, record: Program) -> LoadedProgram:
        """One program of the manifest in this process alone; it trusts whoever runs it.

        Raises:
            CompatibilityError: it does not fit the machine.
            IntegrityError: its file is damaged.
        """
        compat.check(record, device=str(self._device), allow_native=self._allow_native)
        with self._lock:
            return (self._graphs.load if self._graphs else load_program)(self._loading(record))

    def _load(self, record: Program) -> LoadedProgram:
        load = partial(self.load_program, record)
        return load() if self.mirror is None else self.mirror.load(record, load)

    def _loading(self, program: Program) -> Loading:
        """What the program is loaded with, its digest checked."""
        check_digest(self._bundle, program.file)
        return Loading(
            path=self._bundle.path(program.file),
            program=program,
            weights=self.weights,
            device=self._device,
            threads=self._threads,
            is_whole=not self.manifest.referenced,
        )

    def _fits(self, program: Program) -> bool:
        return compat.fits(program, device=str(self._device), allow_native=self._allow_native)

    def session(self) -> Session:
        """A new conversation at position 0."""
        return Session(self)

    def generate_tokens(
        self,
        prompt: Sequence[int],
        *,
        max_new: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
    ) -> TokenStream:
        """New tokens after a prompt of token ids; greedy unless a temperature is given.

        Raises:
            InputError: the prompt is empty or too long, or a sampling field is out of range.
        """
        params = SamplingParams(temperature, top_k, top_p, min_p, seed)
        return TokenStream(
            self.session(),
            prompt,
            max_new=max_new,
            params=params,
            stop_tokens=self.manifest.stop_tokens,
        )

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        *,
        max_new: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        chat: bool | None = None,
        system: str | None = None,
    ) -> Generation:
        """New text after a prompt, in pieces as they come.

        Args:
            prompt: text; or token ids; or chat messages with `role` and `content`.
            max_new: most tokens to generate.
            temperature: 0 is greedy; this and the next four are those of `SamplingParams`.
            top_k: keeps the k likeliest tokens.
            top_p: keeps the likeliest tokens that reach this probability.
            min_p: keeps tokens of at least this share of the likeliest.
            seed: makes the draws repeatable.
            stop: texts that end the generation and are not delivered.
            chat: whether text is put through the chat template as a user's message; None: if the
                bundle has a template.
            system: the system message of a chat.

        Raises:
            TokenizerError: no tokenizer, or the template refuses the messages.
            InputError: as `generate_tokens`.
        """
        stream = self.generate_tokens(
            prompt_ids(prompt, lambda: self.tokenizer, chat=chat, system=system),
            max_new=max_new,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
        )
        return Generation(stream, self.tokenizer, stop)

    def _choose(self, name: str, format: Format | None) -> Program:
        chosen = choose(self._programs, name, format, fits=self._fits, where=self.folder)
        compat.check(chosen, device=str(self._device), allow_native=self._allow_native)
        return chosen


def _is_alike(variant: Program, program: Program) -> bool:
    """Whether a variant keeps the same states as the program, so that calls may alternate."""
    return (variant.entry, variant.format, variant.dtype, variant.target) == (
        program.entry,
        program.format,
        program.dtype,
        program.target,
    )
