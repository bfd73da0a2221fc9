"""What a bundle holds, for people (facts and tables of text) and for programs (a dict).

It reads the manifest; of a bundle whose programs several processes share, or whose weights are
integers that the build did not make, the weights' headers, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llama_artifacts.bundle import Bundle
from llama_artifacts.codec import encode
from llama_artifacts.codes import kept_codes, show_codes
from llama_artifacts.manifest import WEIGHTS_NAME, File, Manifest, Program, show_shards
from llama_artifacts.per_rank import Collective, RankWeights, collectives, rank_weights
from llama_artifacts.signature import Dim, Signature, StateSpec, TensorSpec, show
from llama_artifacts.texts import Table, show_bounds, show_bytes, show_quantized, show_target
from llama_artifacts.weights import stored_tensors

__all__ = (
    "Interface",
    "StateGroup",
    "Table",
    "facts",
    "group_states",
    "interfaces",
    "show_bounds",
    "show_bytes",
    "show_quantized",
    "show_target",
    "tables",
    "to_dict",
)


@dataclass(frozen=True)
class Interface:
    """A signature and the programs of one number of shards that have it."""

    entry: str
    signature: Signature
    programs: tuple[Program, ...]

    @property
    def shards(self) -> int:
        """How many processes run each of the programs together."""
        return self.programs[0].shards

    @property
    def title(self) -> str:
        """The entry, and the number of shards if several."""
        return show_shards(self.entry, self.shards)


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
    """The bundle as a whole: what a fact is called, and the fact.

    Raises:
        IntegrityError: a file of weights breaks the format.
    """
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
        *((("kept codes", show_codes(codes)),) if (codes := kept_codes(bundle)) else ()),
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
    """The programs, how they are called, their states, what shards are, the checks they passed.

    Raises:
        IntegrityError: a file of weights that shards are parts of breaks the format.
    """
    manifest = bundle.manifest
    found = [_program_table(manifest), _call_table(manifest), _state_table(manifest)]
    found += [_rank_table(bundle), _collective_table(manifest)]
    if manifest.checks:
        found.append(_check_table(manifest))
    return tuple(table for table in found if table.rows)


def to_dict(bundle: Bundle) -> dict[str, Any]:
    """Everything above as JSON values; sizes in bytes.

    Raises:
        IntegrityError: as `tables`.
    """
    manifest = bundle.manifest
    return {
        "name": manifest.name,
        "schema": manifest.schema,
        "source": encode(manifest.source),
        "model": encode(manifest.model),
        "dtype": manifest.dtype,
        "quantized": encode(manifest.quantized),
        "kept_codes": kept_codes(bundle),
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
        "signatures": [_interface_dict(manifest, interface) for interface in interfaces(manifest)],
        "ranks": [
            {"shards": num_shards, "weights": encode(weights)}
            for num_shards, weights in _ranks(bundle)
        ],
        "checks": encode(manifest.checks),
    }


def interfaces(manifest: Manifest) -> tuple[Interface, ...]:
    """Each entry's signatures, variants aside, in the order of the programs; mostly one per entry."""
    found: dict[tuple[str, int, Signature], list[Program]] = {}
    for program in manifest.programs:
        if program.variant:
            continue
        found.setdefault((program.entry, program.shards, program.signature), []).append(program)
    return tuple(
        Interface(entry, signature, tuple(programs))
        for (entry, _, signature), programs in found.items()
    )


def group_states(states: Sequence[StateSpec]) -> tuple[StateGroup, ...]:
    """The states, with neighbours of the same dtype and shape together."""
    groups = groupby(states, key=lambda state: (state.dtype, state.shape))
    return tuple(StateGroup(tuple(group)) for _, group in groups)


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
            program.title,
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
    table = Table("Programs", columns, rows)
    return table if any(p.numerics for p in manifest.programs) else table.without("fp8")


def _call_table(manifest: Manifest) -> Table:
    rows: list[tuple[str, ...]] = []
    shown = set()
    for interface in interfaces(manifest):
        signature = interface.signature
        call = (interface.entry, signature.inputs, signature.outputs, signature.dims)
        if call in shown:  # shards differ in their states alone
            continue
        shown.add(call)
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


def _ranks(bundle: Bundle) -> list[tuple[int, RankWeights | None]]:
    """What a rank binds, by the number of shards; None where the weights are not here."""
    manifest = bundle.manifest
    if not manifest.cuts:
        return []
    stored = {name: found.end - found.start for name, (_, found) in stored_tensors(bundle).items()}
    is_here = manifest.weights not in ("none", "reference")
    return [
        (num_shards, rank_weights(manifest, stored, num_shards) if is_here else None)
        for num_shards in manifest.shard_counts()
        if num_shards > 1
    ]


def _rank_table(bundle: Bundle) -> Table:
    rows = tuple(
        (f"{num_shards}", *map(show_bytes, (weights.bound, weights.copied, weights.embedding)))
        if weights is not None
        else (f"{num_shards}", "not here", "", "")
        for num_shards, weights in _ranks(bundle)
    )
    return Table(
        "Weights of one rank", ("shards", "bound", "of them copied", "of them embedding"), rows
    )


def _collective_table(manifest: Manifest) -> Table:
    rows = tuple(
        (
            _label(interface, manifest),
            found.kind,
            f"{found.count}",
            found.dtype,
            show(found.shape),
            _show_sent(found),
        )
        for interface in interfaces(manifest)
        for found in collectives(manifest, interface.programs[0])
    )
    columns = ("entry", "kind", "count", "dtype", "shape", "bytes of all")
    return Table("Collectives of one call", columns, rows)


def _show_sent(collective: Collective) -> str:
    """Bytes of all exchanges, such as `2.6 MB * Rows`."""
    names = [size for size in collective.shape if isinstance(size, str)]
    factors = [f"({name})" if "+" in name else name for name in names]
    return " * ".join([show_bytes(collective.num_bytes), *factors])


def _check_table(manifest: Manifest) -> Table:
    rows = tuple(
        (
            check.law,
            show_shards(check.entry, check.shards),
            check.format,
            f"{check.figure:.3g}",
            f"{check.limit:.3g}",
        )
        for check in manifest.checks
    )
    return Table("Checks", ("law", "entry", "format", "figure", "limit"), rows)


def _label(interface: Interface, manifest: Manifest) -> str:
    """The title, and the formats where the others of the same title are called differently."""
    titles = [other.title for other in interfaces(manifest)]
    if titles.count(interface.title) == 1:
        return interface.title
    formats = dict.fromkeys(program.format for program in interface.programs)
    return f"{interface.title} ({', '.join(formats)})"


def _tensor(spec: TensorSpec) -> tuple[str, str, str, str]:
    values = "" if spec.values is None else show_bounds(spec.values, spec.name)
    return spec.name, spec.dtype, show(spec.shape), values


def _program_dict(manifest: Manifest, program: Program) -> dict[str, Any]:
    return {
        "entry": program.entry,
        "variant": program.variant,
        "shards": program.shards,
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


def _interface_dict(manifest: Manifest, interface: Interface) -> dict[str, Any]:
    signature = interface.signature
    dims: tuple[Dim, ...] = signature.dims
    return {
        "entry": interface.entry,
        "shards": interface.shards,
        "files": [program.file for program in interface.programs],
        "inputs": encode(signature.inputs),
        "outputs": encode(signature.outputs),
        "dims": encode(dims),
        "states": {
            "count": len(signature.states),
            "bytes": signature.state_bytes,
            "tensors": [{**encode(state), "bytes": state.num_bytes} for state in signature.states],
        },
        "collectives": [
            {**encode(found), "bytes": found.num_bytes}
            for found in collectives(manifest, interface.programs[0])
        ],
    }
