"""From a bundle or a model to figures: weights, states, inputs, activations, runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from llama_artifacts import manifest as manifests
from llama_artifacts.bundle import Bundle, open_bundle
from llama_artifacts.errors import BuildError, ChoiceError, InputError
from llama_artifacts.manifest import Format
from llama_artifacts.manifest import Program as ProgramRecord
from llama_export.entries import registry
from llama_export.entries.registry import DEFAULT_PAGE_SIZE, EntrySpec, Sizes
from llama_export.footprint.activations import Activations, Compiled, Kind, Saved, Traced
from llama_export.footprint.call import Asked, Call, plan_call
from llama_export.footprint.figures import Figure, Forecast
from llama_export.footprint.network import Network, from_bundle, from_model
from llama_export.footprint.runtime import runtime_figure, unknown
from llama_export.presets import find as find_preset
from llama_export.recipe import DEFAULT_MAX_SEQ, Quantize

_PREFERENCE: tuple[Format, ...] = ("aoti", "pt2", "onnx")
"""As the runtime takes them."""
MIN_LENGTH = 2
_GIVE_MODEL = "give the model instead of the bundle to ask for other sizes"


@dataclass(frozen=True)
class Question:
    """What to look at.

    Attributes:
        entry: its name; `generate` is enough for `generate<32>`.
        format: of the program; None: of a bundle what its runtime takes, else `pt2`.
        device: `cpu` or `cuda`; None: that of the bundle's program, else `cpu`.
        dtype: the compute dtype of a model; None: the checkpoint's.
        quantize: what a build of the model makes of its matrices.
        group_size: as a build takes it.
        page_size: positions of a page, of a model's pools.
        shards: devices that share the network.
    """

    entry: str
    format: Format | None = None
    device: str | None = None
    dtype: str | None = None
    quantize: Quantize | None = None
    group_size: str | None = None
    page_size: int = DEFAULT_PAGE_SIZE
    shards: int = 1


class Subject(Protocol):
    """A program, or what a build would make of a model."""

    @property
    def network(self) -> Network: ...
    @property
    def spec(self) -> EntrySpec: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def shards(self) -> int: ...

    @property
    def activations(self) -> Activations | None:
        """None: nobody knows."""
        ...

    @property
    def fixed(self) -> Asked | None:
        """The only batch and length there is, if a build fixed them."""
        ...

    @property
    def usual(self) -> Asked:
        """What is meant where nothing is said."""
        ...

    def call(self, asked: Asked) -> Call:
        """The largest call of a batch and length.

        Raises:
            BuildError: the program does not take them.
        """
        ...


def open_subject(place: str, question: Question) -> Subject:
    """A bundle's folder, or whatever `build` takes as a model.

    Raises:
        LlamaExportError: neither; or it has no such entry, format or device.
    """
    if question.shards < 1:
        raise ChoiceError(f"expected --shards of at least 1, got {question.shards}")
    folder = Path(place)
    if (folder / manifests.FILE_NAME).exists():
        return _open_program(open_bundle(folder), question)
    spec = registry.find(question.entry)
    network = from_model(
        place,
        dtype=question.dtype,
        quantize=question.quantize,
        group_size=question.group_size,
    )
    kind = Kind(question.format or "pt2", question.device or "cpu", "exact", question.page_size)
    if kind.format == "onnx" and kind.device == "cpu":
        network = replace(network, dtype="f32")
    preset = find_preset(network.name)
    length = min(preset.max_seq if preset else DEFAULT_MAX_SEQ, network.config.max_position)
    spec = spec.sized(Sizes(network.config, 1, length, network.dtype))
    if question.shards > 1:
        network = network.shard(question.shards)
    return Planned(network, spec, kind, question.shards, Asked(1, length))


@dataclass
class Planned:
    """What a build would make of a model; any batch and length can be asked for."""

    network: Network
    spec: EntrySpec
    kind: Kind
    shards: int
    usual: Asked
    fixed: Asked | None = None

    @cached_property
    def activations(self) -> Activations | None:
        return _followed(self.network, self.spec, self.kind)

    def call(self, asked: Asked) -> Call:
        config = self.network.called_as
        if not MIN_LENGTH <= asked.seq_len <= config.max_position:
            raise BuildError(
                f"expected --seq-len from {MIN_LENGTH} to the model's {config.max_position:,}, "
                f"got {asked.seq_len:,}"
            )
        sizes = Sizes(
            config,
            asked.batch,
            asked.seq_len + (self.spec.states is None),  # without a state no position is scratch
            self.network.dtype,
            page_size=self.kind.page_size,
            max_rows=asked.batch,
        )
        return plan_call(self.spec, self.spec.sized(sizes).signature(sizes), asked)


@dataclass
class Built:
    """A program of a bundle; what its build fixed cannot be asked to be otherwise."""

    network: Network
    spec: EntrySpec
    kind: Kind
    shards: int
    bundle: Bundle
    record: ProgramRecord

    @cached_property
    def activations(self) -> Activations | None:
        if self.kind.format == "pt2" and self.shards == self.record.shards:
            return Saved(self.bundle, self.record)
        return _followed(self.network, self.spec, self.kind)

    @property
    def fixed(self) -> Asked | None:
        if self.spec.states != "rows":
            return None
        batch, _, length, _ = self.record.signature.states[0].shape
        return Asked(int(batch), int(length))

    @property
    def usual(self) -> Asked:
        ranges = {dim.name: dim.max for dim in self.record.signature.dims}
        length = self.bundle.manifest.max_seq
        if "Pages" in ranges:
            length = min(length, ranges["Pages"] * self.kind.page_size)
        return self.fixed or Asked(1, min(length, ranges.get("S", length), ranges.get("P", length)))

    def call(self, asked: Asked) -> Call:
        fixed = self.fixed
        if fixed is not None:
            _check_fixed("--batch", fixed.batch, asked.batch, self.record)
            _check_fixed("--seq-len", fixed.seq_len, asked.seq_len, self.record)
        heads = self.network.config.num_kv_heads
        states = tuple(
            replace(state, shape=(state.shape[0], heads, *state.shape[2:]))
            for state in self.record.signature.states
        )
        return plan_call(self.spec, replace(self.record.signature, states=states), asked)


def forecast(subject: Subject, asked: Asked) -> Forecast:
    """What one device needs for the largest call of a batch and length.

    Raises:
        BuildError: the program does not take them, or cannot be followed.
    """
    call = subject.call(asked)
    network, kind = subject.network, subject.kind
    parts = [
        Figure("weights", network.weights_bytes, network.weights_basis, network.weights_how),
        Figure("states", call.state_bytes, "exact", "the declared signature"),
        Figure("inputs", call.input_bytes, "exact", "the declared signature"),
    ]
    if subject.activations is not None:
        peak = subject.activations.peak(call)
        parts.append(Figure("activations", peak, "modelled", subject.activations.how))
    if kind.device == "cpu":
        parts.append(runtime_figure(kind.format, network.config.num_layers))
    return Forecast(
        name=network.name,
        entry=subject.spec.name,
        format=kind.format,
        device=kind.device,
        batch=asked.batch,
        seq_len=asked.seq_len,
        shards=subject.shards,
        sizes=call.sizes,
        figures=tuple(parts),
        unknown=tuple(unknown(kind.format, kind.device, subject.shards)),
    )


def _followed(network: Network, spec: EntrySpec, kind: Kind) -> Activations | None:
    if kind.format == "onnx":
        return None
    return Compiled(network, spec, kind) if kind.is_native else Traced(network, spec, kind)


def _open_program(bundle: Bundle, question: Question) -> Built:
    if question.dtype is not None or question.page_size != DEFAULT_PAGE_SIZE:
        raise ChoiceError(
            "--dtype and --page-size are fixed in a bundle", where=bundle.folder, hint=_GIVE_MODEL
        )
    if question.quantize is not None or question.group_size is not None:
        raise ChoiceError(
            "--quantize and --group-size are fixed in a bundle",
            where=bundle.folder,
            hint=_GIVE_MODEL,
        )
    record = _choose(bundle, question)
    network = from_bundle(bundle, record)
    spec = registry.find(record.entry)
    pages = [state.shape[2] for state in record.signature.states[:1] if spec.states == "pool"]
    kind = Kind(
        record.format,
        record.target.device,
        record.numerics or "exact",
        int(pages[0]) if pages else DEFAULT_PAGE_SIZE,
        has_one_row=any(
            other.variant == {"Rows": 1}
            for other in bundle.manifest.programs
            if (other.entry, other.format, other.shards)
            == (record.entry, record.format, record.shards)
        ),
    )
    if question.shards > 1:
        network = network.shard(question.shards)
    return Built(network, spec, kind, question.shards, bundle, record)


def _choose(bundle: Bundle, question: Question) -> ProgramRecord:
    """The general program that is meant: of so many shards, or of one as if it were."""
    manifest = bundle.manifest
    count = question.shards if question.shards in manifest.shard_counts() else 1
    general = [p for p in manifest.programs if not p.variant and p.shards == count]
    if not general:
        there = " or ".join(map(str, manifest.shard_counts()))
        raise InputError(
            f"expected {there} shards, of which the bundle's programs are, got {question.shards}",
            where=bundle.folder,
            hint="ask with --shards",
        )
    name = question.entry
    found = [p for p in general if name in (p.entry, p.entry.partition("<")[0])]
    if not found:
        raise InputError(
            f"the bundle has no entry `{name}`",
            where=bundle.folder,
            hint=f"it has {', '.join(manifest.entries())}",
        )
    fitting = [
        p
        for p in found
        if question.format in (None, p.format) and question.device in (None, p.target.device)
    ]
    if not fitting:
        wanted = " ".join(filter(None, (question.format, question.device)))
        there = ", ".join(f"{p.format} {p.target.device}" for p in found)
        raise InputError(
            f"`{name}` is not there as {wanted}",
            where=bundle.folder,
            hint=f"it is there as {there}",
        )
    return min(fitting, key=lambda program: _PREFERENCE.index(program.format))


def _check_fixed(option: str, fixed: int, got: int, record: ProgramRecord) -> None:
    if got != fixed:
        raise BuildError(
            f"expected {option} {fixed:,}, which the build fixed, got {got:,}",
            where=record.entry,
            hint=_GIVE_MODEL,
        )
