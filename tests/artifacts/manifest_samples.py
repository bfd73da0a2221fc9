"""Manifests to read and to spoil: one by hand, as JSON, and any by hypothesis."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st

from llama_artifacts import manifest as manifests
from llama_artifacts.dtypes import BY_NAME
from llama_artifacts.errors import ManifestError
from llama_artifacts.manifest import FORMATS
from llama_artifacts.manifest_file import from_json, to_json
from llama_artifacts.signature import Bounds, Dim, Signature, StateSpec, TensorSpec
from tests.bundles import CONTENTS, sample_manifest

WHERE = "b/manifest.json"
DELETED = object()
"""Stands for no value in `changed`."""


def sample_value() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(to_json(sample_manifest()))
    return value


def message(data: bytes) -> str:
    with pytest.raises(ManifestError) as caught:
        from_json(data, where=WHERE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


text = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=12)
size = st.integers(1, 2**40)
small = st.integers(1, 2**15)
entry_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}(<[1-9][0-9]{0,8}>)?", fullmatch=True)
dtype = st.sampled_from(sorted(BY_NAME))


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    dims = draw(st.lists(st.sampled_from("BSPM"), unique=True, max_size=3))
    shapes = st.lists(small | st.sampled_from(dims) if dims else small, max_size=3).map(tuple)
    names = draw(st.lists(text.filter(bool), unique=True, min_size=2, max_size=5))
    bounds = st.none() | st.builds(Bounds, st.just(0), size, st.sampled_from([None, *dims]))
    inputs = [TensorSpec(name, draw(dtype), draw(shapes), draw(bounds)) for name in names[1:]]
    inputs[0] = dataclasses.replace(inputs[0], shape=(*dims, 3))
    states = draw(
        st.lists(st.builds(StateSpec, st.just(names[0]), dtype, st.tuples(size)), max_size=1)
    )
    outputs = (TensorSpec("out", draw(dtype), draw(shapes)),)
    ranges = tuple(Dim(name, 1, draw(size)) for name in dims)
    return Signature(tuple(inputs), tuple(states), outputs, ranges)


programs = st.builds(
    manifests.Program,
    entry=entry_names,
    format=st.sampled_from(FORMATS),
    file=st.sampled_from(sorted(CONTENTS)),
    dtype=dtype,
    target=st.builds(
        manifests.Target,
        st.sampled_from(("cpu", "cuda")),
        st.none() | text,
        st.none() | text,
        st.lists(text, max_size=2).map(tuple),
        st.none() | text,
    ),
    signature=signatures(),
    constants=st.lists(text, max_size=2).map(tuple),
    requires=st.dictionaries(text, text, max_size=2),
)
finite = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)
checks = st.builds(manifests.Check, text, text, st.sampled_from(FORMATS), finite, finite)
samples = st.builds(
    sample_manifest,
    name=text,
    source=st.builds(manifests.Source, text, text, st.none() | text),
    batch=size,
    stop_tokens=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    toolchain=st.dictionaries(text, text, max_size=3),
    programs=st.lists(programs, max_size=2).map(tuple),
    checks=st.lists(checks, max_size=2).map(tuple),
)


def changed(path: str, new: object) -> bytes:
    """The sample as JSON, with the value at a key path set or deleted."""
    value = sample_value()
    keys = [int(key) if key.isdigit() else key for key in path.replace("]", "").split("/")]
    node: Any = value
    for key in keys[:-1]:
        node = node[key]
    if new is DELETED:
        del node[keys[-1]]
    else:
        node[keys[-1]] = new
    return json.dumps(value).encode()


def nodes(value: Any) -> Iterator[Any]:
    yield value
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, (dict, list)):
            yield from nodes(child)
