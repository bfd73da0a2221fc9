"""Which Triton models a bundle becomes, from its manifest alone.

An entry without states that is there as ONNX is served by Triton's `onnxruntime` backend. All
else is served by the Python backend on `llama_runtime`. Entries that keep the same states become
one model, since a server shares nothing between models: a prompt that `prefill` read is there for
`decode` only if both belong to one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import ChoiceError, CompatibilityError
from llama_artifacts.manifest import (
    FORMATS,
    Format,
    Manifest,
    Program,
    file_stem,
)
from llama_artifacts.signature import Signature, StateSpec

Backend = Literal["onnxruntime", "python"]
Device = Literal["cpu", "cuda"]

TYPES: dict[str, str] = {
    "bool": "TYPE_BOOL",
    "u8": "TYPE_UINT8",
    "i8": "TYPE_INT8",
    "i16": "TYPE_INT16",
    "i32": "TYPE_INT32",
    "i64": "TYPE_INT64",
    "f16": "TYPE_FP16",
    "f32": "TYPE_FP32",
    "f64": "TYPE_FP64",
    "bf16": "TYPE_BF16",
}
"""How Triton's model configuration spells the dtypes that it has."""

# Fastest first, as the runtime takes them.
_PREFERENCE: tuple[Format, ...] = ("aoti", "pt2", "onnx")
_ROWS, _POOL = "rows", "pool"


@dataclass(frozen=True)
class Options:
    """What can be chosen.

    Attributes:
        device: serve the programs for this device; None: the one that the bundle is for.
        format: of the entries that the Python backend serves; None: the runtime chooses the
            fastest that fits the server.
        max_sequences: sequences whose states are kept at the same time, per model.
        max_idle_s: seconds after which Triton forgets a sequence.
        pool_pages: pages of a pool, page 0 included; None: as many as the largest page table of a
            call can name.
    """

    device: Device | None = None
    format: Format | None = None
    max_sequences: int = 16
    max_idle_s: int = 60
    pool_pages: int | None = None


@dataclass(frozen=True)
class TritonModel:
    """One model of the repository.

    Attributes:
        name: of the model, and of its folder.
        backend: Triton's backend that runs it.
        device: where it runs.
        programs: one general program for each entry that it offers, as its interface.
        format: what the Python backend loads; None: what fits the server best.
        sizes: of the states' dynamic dimensions, such as `PoolPages`.
    """

    name: str
    backend: Backend
    device: Device
    programs: tuple[Program, ...]
    format: Format | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The states that a sequence keeps; none for a model without sequences."""
        return self.programs[0].signature.states

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence."""
        total = 0
        for spec in self.states:
            sizes = [self.sizes[size] if isinstance(size, str) else size for size in spec.shape]
            total += math.prod(sizes) * from_name(spec.dtype).num_bytes
        return total


def tensor_name(model: TritonModel, program: Program, name: str) -> str:
    """What a Triton model calls an input or output of an entry.

    The manifest's name; after the entry's where the model offers entries with states: a request
    chooses one by the inputs it brings.
    """
    return f"{file_stem(program.entry)}.{name}" if model.states else name


def plan(manifest: Manifest, options: Options) -> tuple[TritonModel, ...]:
    """The models of a bundle, those without states first.

    Raises:
        CompatibilityError: the bundle holds no weights or no program, or not in the format chosen.
        ChoiceError: it has programs for other devices than chosen, or for several and none was.
    """
    if manifest.weights not in ("copy", "link"):
        raise CompatibilityError(
            f"expected a bundle with its weights, got one of mode `{manifest.weights}`",
            hint="build it with --weights copy",
        )
    device = _device(manifest, options)
    models, groups = [], dict[tuple[StateSpec, ...], list[Program]]()
    for entry in manifest.entries():
        programs = _general(manifest, entry, device)
        if not programs:
            continue
        onnx = programs.get("onnx")
        if onnx is not None and options.format in (None, "onnx") and _is_for_onnxruntime(onnx):
            models.append(TritonModel(file_stem(entry), "onnxruntime", device, (onnx,)))
            continue
        program = _chosen(programs, options.format, entry)
        if program.signature.states:
            groups.setdefault(program.signature.states, []).append(program)
        else:
            name = file_stem(entry)
            models.append(TritonModel(name, "python", device, (program,), options.format))
    models += _stateful(groups, device, options)
    for model in models:
        _check_types(model)
    return tuple(models)


def _device(manifest: Manifest, options: Options) -> Device:
    found = sorted({program.target.device for program in manifest.programs})
    if not found:
        raise CompatibilityError("the bundle holds no program", hint="build one with --entry")
    if options.device is None and len(found) > 1:
        message = f"expected one device, the bundle has programs for {' and '.join(found)}"
        raise ChoiceError(message, hint="choose with --device")
    if options.device is not None and options.device not in found:
        message = f"expected programs for {options.device}, got {found[0]}"
        raise ChoiceError(message, hint=f"choose --device {found[0]}")
    return options.device or found[0]


def _general(manifest: Manifest, entry: str, device: Device) -> dict[Format, Program]:
    return {
        program.format: program
        for program in manifest.programs
        if program.entry == entry and not program.variant and program.shards == 1
        if program.target.device == device
    }


def _chosen(programs: Mapping[Format, Program], format: Format | None, entry: str) -> Program:
    if format is None:
        return next(programs[name] for name in _PREFERENCE if name in programs)
    if format not in programs:
        there = ", ".join(name for name in FORMATS if name in programs)
        message = f"expected `{entry}` in format {format}, got {there}"
        raise CompatibilityError(message, hint=f"build it with --format {format}")
    return programs[format]


def _is_for_onnxruntime(program: Program) -> bool:
    """Whether Triton's onnxruntime backend can run it; it has no tensors of bf16."""
    signature = program.signature
    specs = (*signature.inputs, *signature.outputs)
    return not signature.states and all(spec.dtype != "bf16" for spec in specs)


def _stateful(
    groups: Mapping[tuple[StateSpec, ...], Sequence[Program]], device: Device, options: Options
) -> list[TritonModel]:
    models: list[TritonModel] = []
    for programs in groups.values():
        sizes = _pool_sizes(programs, options)
        base = _POOL if sizes else _ROWS
        count = 1 + sum(model.name.partition("-")[0] == base for model in models)
        name = base if count == 1 else f"{base}-{count}"
        models.append(TritonModel(name, "python", device, tuple(programs), options.format, sizes))
    return models


def _pool_sizes(programs: Sequence[Program], options: Options) -> dict[str, int]:
    signature = programs[0].signature
    shapes = [spec.shape for spec in signature.states]
    names = {size for shape in shapes for size in shape if isinstance(size, str)}
    sizes = {}
    for name in sorted(names):
        dim = signature.dim(name)
        wanted = options.pool_pages or min(dim.max, _table_pages(programs))
        if not dim.min <= wanted <= dim.max:
            message = f"expected a pool of {dim.min} to {dim.max} pages, got {wanted}"
            raise ChoiceError(message, hint="choose with --pool-pages")
        sizes[name] = wanted
    return sizes


def _table_pages(programs: Sequence[Program]) -> int:
    """Pages that the largest table of a call can name, and the scratch page."""

    def largest(signature: Signature) -> int:
        table = next(spec for spec in signature.inputs if spec.name == "table")
        sizes = [size if isinstance(size, int) else signature.dim(size).max for size in table.shape]
        return math.prod(sizes)

    return 1 + max(largest(program.signature) for program in programs)


def _check_types(model: TritonModel) -> None:
    for program in model.programs:
        for spec in (*program.signature.inputs, *program.signature.outputs):
            if spec.dtype not in TYPES:
                message = f"expected a dtype that Triton has, got {spec.dtype}"
                raise CompatibilityError(message, where=f"{program.entry}#{spec.name}")
