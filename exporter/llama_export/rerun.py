"""The recipe of a bundle, read off its manifest and weights header, so that `build` can rerun it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from llama_artifacts.bundle import Bundle
from llama_artifacts.errors import BuildError, CompatibilityError
from llama_artifacts.manifest import FORMATS, Manifest, Program, Source
from llama_artifacts.strict_json import parse_object, shown
from llama_artifacts.weights import stored_tensors
from llama_export.checkpoint.layout import E4M3, EIGHT_BITS, FACTORS, ORDER, PACKED, SCALE
from llama_export.entries import registry
from llama_export.entries.variants import DEFAULTS, NONE

T = TypeVar("T")
_FIXED = (*FACTORS, ORDER, ".inv_freq")
"""How the names of weights end whose dtype no choice changes."""
_CODES = (E4M3, EIGHT_BITS, PACKED)
"""Dtypes of weights beside the compute dtype."""
VERSION_KEY, VERSION = "llama-export", 1
"""The key that marks such a file, and the version of its form."""


def to_json(bundle: Bundle) -> str:
    """The recipe as JSON: the choices of `build` by the names of `Recipe`'s fields.

    Choices that the bundle leaves open, such as a page size where nothing is paged, are left out.
    The model is the hub repository with its commit; of a local checkpoint only the name is known.

    Raises:
        CompatibilityError: the programs come from several builds that differ, such as one for the
            CPU and one for CUDA.
        ManifestError, IntegrityError: the weights' header is damaged.
    """
    text = json.dumps({VERSION_KEY: VERSION, **choices(bundle)}, indent=2, ensure_ascii=False)
    return text + "\n"


def from_json(data: bytes, *, where: object, known: Collection[str]) -> dict[str, Any]:
    """The choices of such a file.

    Args:
        data: its bytes.
        where: its place, for messages.
        known: the choices there are.

    Raises:
        BuildError: it is no JSON object, is of another version, or holds an unknown key.
    """
    value = parse_object(data, where=where, error=BuildError)
    hint = "`llama-export export-config` writes such files"
    found = value.pop(VERSION_KEY, None)
    if found != VERSION:
        message = f"expected `{VERSION_KEY}`: {VERSION}, got {shown(found)}"
        raise BuildError(message, where=where, hint=hint)
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise BuildError("unknown key", where=f"{where}#{unknown[0]}", hint=hint)
    return value


def choices(bundle: Bundle) -> dict[str, Any]:
    """The choices of the build, by name; see `to_json`."""
    manifest = bundle.manifest
    programs = manifest.programs
    general = [program for program in programs if not program.variant]
    formats = {program.format for program in programs}
    found = {
        "model": _model(manifest.source),
        "entries": list(manifest.entries()),
        "formats": [format for format in FORMATS if format in formats],
        "max_seq": manifest.max_seq,
        "batch": manifest.batch,
        "page_size": _only(_page_sizes(general), "page sizes", bundle),
        "rows": _only(_dims(general, "Rows"), "sizes of `Rows`", bundle),
        "pages": _only(_dims(general, "Pages"), "sizes of `Pages`", bundle),
        "variants": _variants(bundle),
        "dtype": _dtype(bundle),
        "device": _only((p.target.device for p in programs), "devices", bundle),
        "isa": _only((p.target.isa for p in programs if p.target.isa), "ISAs", bundle),
        "numerics": _only((p.numerics for p in programs if p.numerics), "numerics", bundle),
        **_quantized(manifest),
        "shards": _shards(bundle),
        "num_layers": manifest.model.num_layers,
        "weights": manifest.weights,
    }
    return {name: value for name, value in found.items() if value is not None}


def _quantized(manifest: Manifest) -> dict[str, Any]:
    quantized = manifest.quantized
    if quantized is None:
        # A GGUF file has no scales unless its codes are kept.
        names = {name for program in manifest.programs for name in program.constants}
        is_kept = any(name.endswith(SCALE) for name in names) and manifest.source.kind == "gguf"
        return {"quantize": "stored"} if is_kept else {}
    size = quantized.group_size
    return {"quantize": quantized.kind, "group_size": "row" if size is None else str(size)}


def _model(source: Source) -> str:
    return source.name if source.revision is None else f"{source.name}@{source.revision}"


def _page_sizes(programs: Iterable[Program]) -> Iterable[int | str]:
    for program in programs:
        for state in program.signature.states:
            if registry.find(program.entry).states == "pool":
                yield state.shape[2]


def _dims(programs: Iterable[Program], name: str) -> Iterable[int]:
    for program in programs:
        yield from (dim.max for dim in program.signature.dims if dim.name == name)


def _shards(bundle: Bundle) -> list[int] | None:
    """For how many processes every entry is there; None for one alone, the default."""
    manifest = bundle.manifest
    counts = manifest.shard_counts()
    built = {(program.entry, program.shards) for program in manifest.programs}
    if len(built) < len(counts) * len(manifest.entries()):
        raise _several("entries for several numbers of shards", bundle)
    return None if counts == (1,) else list(counts)


def _variants(bundle: Bundle) -> list[str] | None:
    """None for the defaults, which are in some formats only; else each, which is in all formats."""
    manifest = bundle.manifest
    if _is_default(manifest):
        return None
    built = [program for program in manifest.programs if program.variant]
    labels = list(dict.fromkeys(program.label for program in built))
    for label in labels:
        entry = next(program.entry for program in built if program.label == label)
        general = [p for p in manifest.programs if p.entry == entry and not p.variant]
        alike = [program for program in built if program.label == label]
        if {(p.format, p.shards) for p in alike} != {(p.format, p.shards) for p in general}:
            raise _several(f"variant {shown(label)}, in some formats only", bundle)
    return labels or [NONE]


def _is_default(manifest: Manifest) -> bool:
    general = [program for program in manifest.programs if not program.variant]
    expected = {
        (program.entry, program.format, program.shards, frozenset(variant.sizes.items()))
        for program in general
        for variant in DEFAULTS
        if registry.find(program.entry).method == registry.find(variant.entry).method
        and (variant.formats is None or program.format in variant.formats)
        and variant.device in (None, program.target.device)
    }
    found = {
        (program.entry, program.format, program.shards, frozenset(program.variant.items()))
        for program in manifest.programs
        if program.variant
    }
    return found == expected


def _dtype(bundle: Bundle) -> str | None:
    """The compute dtype; None where weights are stored in several, which only the default keeps."""
    manifest = bundle.manifest
    if manifest.weights == "none":
        return manifest.dtype
    if manifest.weights != "copy":
        return None  # they stay in the checkpoint's own files, as they are
    stored = stored_tensors(bundle)
    kinds = {tensor.dtype for name, (_, tensor) in stored.items() if not name.endswith(_FIXED)}
    return manifest.dtype if kinds <= {manifest.dtype, *_CODES} else None


def _only(values: Iterable[T], what: str, bundle: Bundle) -> T | None:
    found = list(dict.fromkeys(values))
    if len(found) > 1:
        raise _several(f"several {what} ({', '.join(map(str, found))})", bundle)
    return found[0] if found else None


def _several(what: str, bundle: Bundle) -> CompatibilityError:
    return CompatibilityError(
        f"expected programs of one build, got {what}",
        where=bundle.folder,
        hint="write the options of each build by hand",
    )
