"""What differs between two bundles, from their manifests and, where needed, their weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llama_artifacts.bundle import Bundle
from llama_artifacts.codec import encode
from llama_artifacts.digests import CHUNK_BYTES, num_processors
from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import Check, File, Program
from llama_artifacts.safetensors import StoredTensor
from llama_artifacts.signature import show
from llama_artifacts.weights import stored_tensors

Area = Literal[
    "source", "config", "toolchain", "signatures", "programs", "weights", "files", "checks"
]
_APART = ("programs", "checks", "files", "weights_headers", "referenced")
"""Fields of a manifest that are not compared as they are."""

_Place = tuple[Path, StoredTensor]


@dataclass(frozen=True)
class Change:
    """One thing that differs.

    Attributes:
        area: what kind of thing it is.
        name: which: a key path, a program, a tensor, a file.
        before: what the first bundle has, in a few words; None: nothing.
        after: what the second has.
    """

    area: Area
    name: str
    before: str | None
    after: str | None


def compare(first: Bundle, second: Bundle) -> tuple[Change, ...]:
    """What differs, by area, each sorted by name; empty if the manifests say the same.

    Files are compared by the digests of the whole in the manifests, which writers keep in step with
    those of the blocks, and `integrity.check` proves. Where those
    of the weights differ, the bytes of each tensor of both are compared.

    Raises:
        IntegrityError: a weights file cannot be read.
    """
    changes = [
        *_fields(first, second),
        *_programs(first, second),
        *_weights(first, second),
        *_files(first, second),
        *_checks(first, second),
    ]
    order = Area.__args__  # type: ignore[attr-defined]
    return tuple(sorted(dict.fromkeys(changes), key=lambda x: (order.index(x.area), x.name)))


def _fields(first: Bundle, second: Bundle) -> Iterator[Change]:
    sides = []
    for bundle in (first, second):
        value = encode(bundle.manifest)
        sides.append(_leaves({key: value[key] for key in value if key not in _APART}))
    for name, before, after in _pairs(*sides):
        top = name.partition(".")[0]
        area: Area = top if top in ("source", "toolchain") else "config"  # type: ignore[assignment]
        yield Change(area, name, before, after)


def _programs(first: Bundle, second: Bundle) -> Iterator[Change]:
    sides = [_by_name(first), _by_name(second)]
    for name in sorted(sides[0].keys() | sides[1].keys()):
        before, after = sides[0].get(name), sides[1].get(name)
        texts = [_program_text(first, before), _program_text(second, after)]
        if texts[0] != texts[1]:
            yield Change("programs", name, *texts)
        if before is None or after is None:
            continue
        fields = [encode(before), encode(after)]
        signatures = [_leaves(field.pop("signature")) for field in fields]
        for key, old, new in _pairs(*map(_leaves, fields)):
            yield Change("programs", f"{name} {key}", old, new)
        for key, old, new in _pairs(*signatures):
            yield Change("signatures", f"{before.title} {key}", old, new)


def _by_name(bundle: Bundle) -> dict[str, Program]:
    found = {}
    for program in bundle.manifest.programs:
        target = program.target
        machine = target.capability or target.isa
        place = target.device if machine is None else f"{target.device}-{machine}"
        found[f"{program.title} {program.format} {place}"] = program
    return found


def _program_text(bundle: Bundle, program: Program | None) -> str | None:
    return None if program is None else _file_text(bundle.manifest.files[program.file])


def _weights(first: Bundle, second: Bundle) -> Iterator[Change]:
    sides = [_weights_files(bundle) for bundle in (first, second)]
    if sides[0] == sides[1]:
        headers = [bundle.manifest.weights_headers for bundle in (first, second)]
        for name, *digests in _pairs(*headers):
            yield Change("weights", f"{name} header", *digests)
    elif first.manifest.referenced or second.manifest.referenced or not all(sides):
        texts = [{name: _file_text(file) for name, file in side.items()} for side in sides]
        for name, before, after in _pairs(*texts):
            yield Change("weights", name, before, after)
    else:
        changes = list(_tensors(stored_tensors(first), stored_tensors(second)))
        yield from changes
        if not changes:  # the same tensors in other files or another order, or other metadata
            yield Change("weights", "layout", *map(_sizes_text, sides))


def _weights_files(bundle: Bundle) -> dict[str, File]:
    manifest = bundle.manifest
    files = {**manifest.files, **manifest.referenced}
    return {name: replace(files[name], blocks=()) for name in manifest.weights_headers}


def _sizes_text(files: Mapping[str, File]) -> str:
    return ", ".join(f"{name}: {_file_text(file)}" for name, file in sorted(files.items()))


def _tensors(first: Mapping[str, _Place], second: Mapping[str, _Place]) -> Iterator[Change]:
    alike = []
    for name in sorted(first.keys() | second.keys()):
        texts = [_tensor_text(place and place[1]) for place in (first.get(name), second.get(name))]
        if texts[0] == texts[1]:
            alike.append(name)
        else:
            yield Change("weights", name, *texts)
    with ThreadPoolExecutor(num_processors()) as pool:
        results = pool.map(
            _has_same_bytes, (first[name] for name in alike), (second[name] for name in alike)
        )
        for name, is_same in zip(alike, results, strict=True):
            if not is_same:
                text = _tensor_text(first[name][1])
                yield Change("weights", name, text, f"{text}, other values")


def _has_same_bytes(here: _Place, there: _Place) -> bool:
    first, one = here
    second, other = there
    try:
        with first.open("rb", buffering=0) as a, second.open("rb", buffering=0) as b:
            a.seek(one.start)
            b.seek(other.start)
            left = one.end - one.start
            while left > 0:
                chunk = a.read(min(left, CHUNK_BYTES))
                if not chunk or b.read(len(chunk)) != chunk:
                    return False
                left -= len(chunk)
    except OSError as cause:
        raise IntegrityError(f"cannot be read: {cause.strerror}", where=first) from cause
    return True


def _files(first: Bundle, second: Bundle) -> Iterator[Change]:
    sides = []
    for bundle in (first, second):
        apart = {
            *bundle.manifest.weights_headers,
            *(program.file for program in bundle.manifest.programs),
        }
        files = bundle.manifest.files.items()
        sides.append({name: _file_text(file) for name, file in files if name not in apart})
    for name, before, after in _pairs(*sides):
        yield Change("files", name, before, after)


def _checks(first: Bundle, second: Bundle) -> Iterator[Change]:
    sides = [dict(map(_check_item, bundle.manifest.checks)) for bundle in (first, second)]
    for name, before, after in _pairs(*sides):
        yield Change("checks", name, before, after)


def _check_item(check: Check) -> tuple[str, str]:
    name = " ".join(filter(None, (check.law, check.entry, check.format)))
    return name, f"{check.figure:.6g} of {check.limit:.6g}"


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What stands under a name in one and otherwise, or not at all, in the other."""
    for name in sorted(first.keys() | second.keys()):
        before, after = first.get(name), second.get(name)
        if before != after:
            yield name, before, after


def _leaves(value: Any, path: str = "") -> dict[str, str]:
    """Values by key path as text; items of a list that have names are found by them."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(x, dict) and "name" in x for x in value)
    ):
        value = {item["name"]: item for item in value}
    if isinstance(value, dict) and value:
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= _leaves(item, f"{path}.{key}" if path else key)
        return found
    return {path: value if isinstance(value, str) else json.dumps(value)}


def _file_text(file: File | None) -> str | None:
    return None if file is None else f"{file.bytes:,} bytes, sha256 {file.sha256[:12]}..."


def _tensor_text(tensor: StoredTensor | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype} {show(tensor.shape)}"
