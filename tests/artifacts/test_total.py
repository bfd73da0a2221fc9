"""Whatever is done to a bundle, reading it ends with a known error or with a bundle that is sound."""

from __future__ import annotations

import copy
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llama_artifacts.errors import IntegrityError, LlamaExportError
from llama_artifacts.manifest import FILE_NAME, WEIGHTS_NAME
from llama_artifacts.manifest_file import from_json, to_json
from llama_artifacts.safetensors import parse_header
from tests.artifacts.complaining import complaint
from tests.artifacts.patches import patched, reseal
from tests.bundles import CONTENTS, sample_manifest, write_sample

T = TypeVar("T")
MAX_SECONDS, MAX_BYTES = 0.5, 8 * 2**20
MANIFEST = to_json(sample_manifest())
VALUE: dict[str, Any] = json.loads(MANIFEST)
WEIGHTS = CONTENTS[WEIGHTS_NAME]
HEADER = WEIGHTS[8 : 8 + int.from_bytes(WEIGHTS[:8], "little")]

steady = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def pointers(value: Any, path: str = "") -> Iterator[str]:
    """JSON pointers of everything in a value but the value itself."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            place = f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"
            yield place
            yield from pointers(item, place)


numbers = st.sampled_from([0, -1, 1, 2**31, 2**53 + 1, 2**63, 10**30, 0.5, 1e308, float("nan")])
words = st.sampled_from(
    ["", "S", "2*S", "../x", "1.0", "f32", "F32", "x" * 1001, "\x1b", "\ud800", "__metadata__"]
)
scalars = st.none() | st.booleans() | numbers | words | st.text(max_size=6)
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(words, v, max_size=3), max_leaves=6
)


def edits(value: Any) -> st.SearchStrategy[list[dict[str, Any]]]:
    """One or two RFC 6902 operations on one place each; a value may come from another place."""
    places = sorted(pointers(value))
    place = st.sampled_from(places)
    moved = place.map(lambda path: at(value, path))
    replaced = st.fixed_dictionaries(
        {"op": st.just("replace"), "path": place, "value": values | moved}
    )
    removed = st.fixed_dictionaries({"op": st.just("remove"), "path": place})
    added = st.fixed_dictionaries(
        {
            "op": st.just("add"),
            "path": st.sampled_from([p for p in places if isinstance(at(value, p), dict)]).flatmap(
                lambda p: words.map(lambda w: f"{p}/{w.replace('/', '~1')}")
            ),
            "value": values | moved,
        }
    )
    return st.lists(replaced | removed | added, min_size=1, max_size=2)


def at(value: Any, path: str) -> Any:
    for key in path.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        value = value[int(key)] if isinstance(value, list) else value[key]
    return copy.deepcopy(value)


def edited(value: Any, operations: list[dict[str, Any]]) -> bytes:
    result = copy.deepcopy(value)
    for operation in operations:
        try:
            result = patched(result, [operation])
        except (LookupError, TypeError, ValueError):
            continue  # the first operation took the second one's place away
    return json.dumps(result).encode()


def byte_edits(size: int) -> st.SearchStrategy[list[tuple[int, int, bytes]]]:
    """Places, how many bytes go there, and what comes instead."""
    new = st.binary(max_size=6) | st.sampled_from([b"{", b"}", b"[", b'"', b",", b"NaN", b"1e999"])
    edit = st.tuples(st.integers(0, size), st.integers(0, 30), new)
    return st.lists(edit, min_size=1, max_size=3)


def spliced(data: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for place, count, new in changes:
        data = data[:place] + new + data[place + count :]
    return data


@contextmanager
def bounded() -> Iterator[None]:
    """Neither a hang nor a large allocation."""
    tracemalloc.start()
    try:
        start = time.process_time()
        yield
        seconds = time.process_time() - start
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seconds < MAX_SECONDS
    assert peak < MAX_BYTES


def is_refused(folder: Path) -> bool:
    """Whether the bundle is refused, in one line; anything but a known error fails the test."""
    with bounded():
        error = complaint(folder)
    if error is None:
        return False
    assert str(error).isprintable()
    assert len(str(error)) < 2000
    return True


@given(edits(VALUE))
@steady
def test_an_edited_manifest_is_refused_or_means_what_it_says(edit: list[dict[str, Any]]) -> None:
    check_manifest(edited(VALUE, edit))


@given(byte_edits(len(MANIFEST)))
@steady
def test_a_manifest_of_other_bytes_is_refused_or_means_what_it_says(
    edit: list[tuple[int, int, bytes]],
) -> None:
    check_manifest(spliced(MANIFEST, edit))


@given(edits(json.loads(HEADER)))
@steady
def test_an_edited_header_is_refused_or_tiles_its_data(edit: list[dict[str, Any]]) -> None:
    check_header(edited(json.loads(HEADER), edit))


@given(byte_edits(len(HEADER)))
@example([(0, 1, b"[")])
@steady
def test_a_header_of_other_bytes_is_refused_or_tiles_its_data(
    edit: list[tuple[int, int, bytes]],
) -> None:
    check_header(spliced(HEADER, edit))


def check_manifest(data: bytes) -> None:
    manifest = attempt(lambda: from_json(data, where="f"))
    assert manifest is None or from_json(to_json(manifest), where="f") == manifest


def check_header(text: bytes) -> None:
    header = attempt(lambda: parse_header(text, where="f", error=IntegrityError))
    if header is None:
        return
    end = 8 + len(text)
    for tensor in header.tensors.values():
        assert tensor.start == end <= tensor.end
        end = tensor.end
    assert header.data_end == end


def attempt(read: Callable[[], T]) -> T | None:
    """What is read, or None where it is refused in one line; anything else fails the test."""
    complaint = ""
    with bounded():
        try:
            return read()
        except LlamaExportError as error:
            complaint = str(error)
    assert complaint.isprintable()
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("total") / "bundle"


@given(st.sampled_from(sorted(CONTENTS)), st.integers(0, 300), st.binary(min_size=1, max_size=8))
@steady
def test_a_file_of_other_bytes_is_refused(folder: Path, name: str, place: int, new: bytes) -> None:
    data = CONTENTS[name]
    changed = data[:place] + new + data[place + len(new) :]
    write_sample(folder)
    (folder / name).write_bytes(changed)
    assert is_refused(folder) == (changed != data)


@given(st.sampled_from(sorted(CONTENTS)), st.integers(0, 400))
@steady
def test_a_file_that_is_cut_off_is_refused(folder: Path, name: str, kept: int) -> None:
    write_sample(folder)
    data = CONTENTS[name][:kept]
    (folder / name).write_bytes(data)
    assert is_refused(folder) == (data != CONTENTS[name])


@given(st.permutations(sorted(CONTENTS)))
@steady
def test_files_in_each_others_place_are_refused(folder: Path, names: list[str]) -> None:
    write_sample(folder)
    for name, other in zip(sorted(CONTENTS), names, strict=True):
        (folder / name).write_bytes(CONTENTS[other])
    assert is_refused(folder) == (names != sorted(CONTENTS))


@given(byte_edits(len(WEIGHTS)))
@steady
def test_sealed_weights_of_other_bytes_are_refused_or_sound(
    folder: Path, edit: list[tuple[int, int, bytes]]
) -> None:
    write_sample(folder)
    (folder / WEIGHTS_NAME).write_bytes(spliced(WEIGHTS, edit))
    reseal(folder)
    is_refused(folder)


@given(edits(VALUE))
@steady
def test_an_edited_bundle_is_refused_or_sound(folder: Path, edit: list[dict[str, Any]]) -> None:
    write_sample(folder)
    (folder / FILE_NAME).write_bytes(edited(VALUE, edit))
    is_refused(folder)
