"""What a bundle holds, for people (facts and tables of text) and for programs (a dict).

It reads the manifest only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llama_artifacts.bundle import Bundle
from llama_artifacts.codec import encode
from llama_artifacts.manifest import WEIGHTS_NAME, File, Manifest, Program, Quantized, Target
from llama_artifacts.signature import Bounds, Dim, Signature, StateSpec, TensorSpec, show

_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Table:
    """Rows of text under column names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Interface:
    """A signature and the programs that have it."""

    entry: str
    signature: Signature
    programs: tuple[Program, ...]


@dataclass(frozen=True)
class StateGroup:
    """States that follow each other and differ in nothing but their names."""

    states: tuple[StateSpec, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all of them."""
        return sum(state.num_bytes for state in self.states)

    @property
    def names(self) -> str:
        """The one name, or the first and the last."""
        first, last = self.states[0].name, self.states[-1].name
        return first if len(self.states) == 1 else f"{first} .. {last}"


def facts(bundle: Bundle) -> tuple[tuple[str, str], ...]:
    """The bundle as a whole: what a fact is called, and the fact."""
    manifest = bundle.manifest
    model = manifest.model
    head = "tied" if model.tie_word_embeddings else "separate"
    network = (
        f"{model.num_layers} layers, hidden {model.hidden_size:,}, inner"
        f" {model.intermediate_size:,}, {model.num_heads} query and {model.num_kv_heads} key/value"
        f" heads of {model.head_dim}, vocabulary {model.vocab_size:,}, {head} head"
    )
    return (
        ("name", manifest.name),
        ("source", _source(manifest)),
        ("parameters", f"{model.num_parameters:,}"),
        ("dtype", manifest.dtype),
        ("network", network),
        ("rope", model.rope),
        (
            "positions",
            f"{manifest.max_seq - 1:,} usable of {manifest.max_seq:,}; the last is scratch",
        ),
        ("batch", f"{manifest.batch}"),
        ("weights", _weights(manifest)),
        *((("quantised", show_quantized(manifest.quantized)),) if manifest.quantized else ()),
        ("programs", f"{len(manifest.programs)}, {show_bytes(_program_bytes(manifest))}"),
        ("tokenizer", _tokenizer(manifest)),
        ("stop tokens", " ".join(map(str, manifest.stop_tokens)) or "none"),
        (
            "built with",
            ", ".join(f"{name} {at}" for name, at in sorted(manifest.toolchain.items())),
        ),
        ("format", f"bundle format {manifest.schema}"),
    )


def tables(bundle: Bundle) -> tuple[Table, ...]:
    """The programs, how they are called, their states, and the checks they passed."""
    manifest = bundle.manifest
    found = [_program_table(manifest), _call_table(manifest), _state_table(manifest)]
    if manifest.checks:
        found.append(_check_table(manifest))
    return tuple(table for table in found if table.rows)


def to_dict(bundle: Bundle) -> dict[str, Any]:
    """Everything above as JSON values; sizes in bytes."""
    manifest = bundle.manifest
    return {
        "name": manifest.name,
        "schema": manifest.schema,
        "source": encode(manifest.source),
        "model": encode(manifest.model),
        "dtype": manifest.dtype,
        "quantized": encode(manifest.quantized),
        "max_seq": manifest.max_seq,
        "usable_positions": manifest.max_seq - 1,
        "batch": manifest.batch,
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "weights": {
            "mode": manifest.weights,
            "bytes": sum(file.bytes for file in _held_weights(manifest)),
            "referenced_bytes": sum(file.bytes for file in manifest.referenced.values()),
        },
        "tokenizer": manifest.tokenizer,
        "has_chat_template": manifest.has_chat_template,
        "stop_tokens": list(manifest.stop_tokens),
        "toolchain": dict(sorted(manifest.toolchain.items())),
        "programs": [_program_dict(manifest, program) for program in manifest.programs],
        "signatures": [_interface_dict(interface) for interface in interfaces(manifest)],
        "checks": encode(manifest.checks),
    }


def interfaces(manifest: Manifest) -> tuple[Interface, ...]:
    """Each entry's signatures, variants aside, in the order of the programs; mostly one per entry."""
    found: dict[tuple[str, Signature], list[Program]] = {}
    for program in manifest.programs:
        if program.variant:
            continue
        found.setdefault((program.entry, program.signature), []).append(program)
    return tuple(
        Interface(entry, signature, tuple(programs))
        for (entry, signature), programs in found.items()
    )


def group_states(states: Sequence[StateSpec]) -> tuple[StateGroup, ...]:
    """The states, with neighbours of the same dtype and shape together."""
    groups = groupby(states, key=lambda state: (state.dtype, state.shape))
    return tuple(StateGroup(tuple(group)) for _, group in groups)


def show_bytes(num_bytes: int) -> str:
    """A size for people, such as `269.1 MB`; a kB is 1,000 bytes."""
    size = float(num_bytes)
    for unit in _UNITS:
        # 999.95 would be shown as 1000.0
        if size < 999.95 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{num_bytes} B" if unit == "B" else f"{size:,.1f} {unit}"


def show_bounds(bounds: Bounds, name: str) -> str:
    """The values an input may hold, such as `0 to 2046`."""
    if bounds.span is not None:
        return f"from {bounds.min}; {name}+{bounds.span}-1 to {bounds.max}"
    if bounds.dim is None:
        return f"{bounds.min} to {bounds.max}"
    size = bounds.dim if bounds.scale == 1 else f"{bounds.scale}*{bounds.dim}"
    return f"{bounds.min} to {size}{f'{bounds.offset:+d}' if bounds.offset else ''}"


def show_target(target: Target) -> str:
    """The machine of a program, such as `cpu x86_64 avx512`."""
    capability = target.capability and f"sm {target.capability}"
    return " ".join(
        part for part in (target.device, target.machine, target.isa, capability) if part
    )


def show_quantized(quantized: Quantized) -> str:
    """What was done to the matrices, such as `int4 in groups of 32; embedding and head int8`."""
    size = quantized.group_size
    groups = "row by row" if size is None else f"in groups of {size}"
    rest = "" if quantized.kind == "int8" else "; embedding and head int8"
    return f"{quantized.kind} {groups}{rest}"


def _source(manifest: Manifest) -> str:
    source = manifest.source
    revision = "" if source.revision is None else f" at {source.revision}"
    return f"{source.name} ({source.kind}){revision}"


def _weights(manifest: Manifest) -> str:
    if manifest.weights == "none":
        return "none: the programs cannot run without them"
    held = sum(file.bytes for file in _held_weights(manifest))
    if manifest.weights == "reference":
        elsewhere = sum(file.bytes for file in manifest.referenced.values())
        where = f"not here: {show_bytes(elsewhere)} in {_listed(manifest.referenced)}"
        return f"{where} of the checkpoint; {show_bytes(held)} in {WEIGHTS_NAME}"
    return f"{show_bytes(held)} in {_listed(manifest.weights_headers)}"


def _held_weights(manifest: Manifest) -> list[File]:
    return [file for name, file in manifest.files.items() if name in manifest.weights_headers]


def _listed(names: Collection[str]) -> str:
    first = sorted(names)[0]
    return first if len(names) == 1 else f"{len(names)} files, {first} and others"


def _tokenizer(manifest: Manifest) -> str:
    if manifest.tokenizer is None:
        return "none: token ids only"
    return f"tokenizer.json, {'a' if manifest.has_chat_template else 'no'} chat template"


def _program_bytes(manifest: Manifest) -> int:
    names = {program.file for program in manifest.programs}
    return sum(manifest.files[name].bytes for name in names)


def _program_table(manifest: Manifest) -> Table:
    rows = tuple(
        (
            program.label,
            program.format,
            show_target(program.target),
            program.dtype,
            program.numerics or "",
            show_bytes(manifest.files[program.file].bytes),
            program.file,
        )
        for program in manifest.programs
    )
    columns = ("entry", "format", "target", "dtype", "fp8", "size", "file")
    if not any(program.numerics for program in manifest.programs):
        return Table("Programs", _without(columns, 4), tuple(_without(row, 4) for row in rows))
    return Table("Programs", columns, rows)


def _without(row: tuple[str, ...], index: int) -> tuple[str, ...]:
    return row[:index] + row[index + 1 :]


def _call_table(manifest: Manifest) -> Table:
    rows: list[tuple[str, ...]] = []
    for interface in interfaces(manifest):
        signature = interface.signature
        lines = [
            *(("input", *_tensor(spec)) for spec in signature.inputs),
            *(("output", *_tensor(spec)) for spec in signature.outputs),
            *(("dim", dim.name, "", "", f"{dim.min} to {dim.max}") for dim in signature.dims),
        ]
        names = [_label(interface, manifest)] + [""] * (len(lines) - 1)
        rows += [(name, *line) for name, line in zip(names, lines, strict=True)]
    return Table("Signatures", ("entry", "kind", "name", "dtype", "shape", "values"), tuple(rows))


def _state_table(manifest: Manifest) -> Table:
    rows = tuple(
        (
            _label(interface, manifest),
            f"{len(group.states)}",
            show_bytes(group.num_bytes),
            group.states[0].dtype,
            show(group.states[0].shape),
            group.names,
        )
        for interface in interfaces(manifest)
        for group in group_states(interface.signature.states)
    )
    return Table("States", ("entry", "count", "size", "dtype", "shape", "names"), rows)


def _check_table(manifest: Manifest) -> Table:
    rows = tuple(
        (check.law, check.entry, check.format, f"{check.figure:.3g}", f"{check.limit:.3g}")
        for check in manifest.checks
    )
    return Table("Checks", ("law", "entry", "format", "figure", "limit"), rows)


def _label(interface: Interface, manifest: Manifest) -> str:
    """The entry, and the formats where the others of the same entry are called differently."""
    entries = [other.entry for other in interfaces(manifest)]
    if entries.count(interface.entry) == 1:
        return interface.entry
    formats = dict.fromkeys(program.format for program in interface.programs)
    return f"{interface.entry} ({', '.join(formats)})"


def _tensor(spec: TensorSpec) -> tuple[str, str, str, str]:
    values = "" if spec.values is None else show_bounds(spec.values, spec.name)
    return spec.name, spec.dtype, show(spec.shape), values


def _program_dict(manifest: Manifest, program: Program) -> dict[str, Any]:
    return {
        "entry": program.entry,
        "variant": program.variant,
        "format": program.format,
        "file": program.file,
        "bytes": manifest.files[program.file].bytes,
        "sha256": manifest.files[program.file].sha256,
        "dtype": program.dtype,
        "numerics": program.numerics,
        "target": encode(program.target),
        "num_constants": len(program.constants),
        "requires": program.requires,
    }


def _interface_dict(interface: Interface) -> dict[str, Any]:
    signature = interface.signature
    dims: tuple[Dim, ...] = signature.dims
    return {
        "entry": interface.entry,
        "files": [program.file for program in interface.programs],
        "inputs": encode(signature.inputs),
        "outputs": encode(signature.outputs),
        "dims": encode(dims),
        "states": {
            "count": len(signature.states),
            "bytes": signature.state_bytes,
            "tensors": [{**encode(state), "bytes": state.num_bytes} for state in signature.states],
        },
    }
