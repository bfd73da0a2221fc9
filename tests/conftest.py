"""Fixtures that are expensive: each is made once per session of tests."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import llama_runtime
from llama_artifacts.manifest import FORMATS
from llama_export.build import build
from llama_export.cache import ProgramCache
from llama_export.recipe import Recipe
from tests.tiny import write_tiny

ALL_ENTRIES = ("forward", "next_token", "prefill", "decode", "decode_rows")
TINY_MAX_SEQ = 256
TINY_BATCH = 2
TINY_STEPS = 12


DEAR_FILES = (
    "runtime/test_packed.py",
    "runtime/test_entry.py",
    "end_to_end/test_smollm2.py",
    "runtime/test_dims.py",
    "cpp/test_run.py",
)
"""Files that build what others wait for, begun first: two workers take turns down the list.

The first builds the packed bundle, while the second builds the other one and those of the real model;
whatever needs the packed one comes after these, so that no worker waits for another.
"""
DEAR_FIXTURES = {"tiny_bundle", "tiny_packed_bundle", "sharded_bundle"}
"""Built for minutes: what asks for one is `slow`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts files in order; deselects `gpu` tests without a device, and `long` ones unasked for."""
    for item in items:
        if DEAR_FIXTURES & fixtures(item):
            item.add_marker(pytest.mark.slow)
    in_order(items)
    left_out = [] if torch.cuda.is_available() else ["gpu"]
    if "long" not in config.option.markexpr:
        left_out.append("long")
    chosen, others = [], []
    for item in items:
        is_out = any(item.get_closest_marker(name) for name in left_out)
        (others if is_out else chosen).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)


def fixtures(item: pytest.Item) -> set[str]:
    """Those that a test asks for, also by a parameter, which may be the name of one."""
    given = getattr(getattr(item, "callspec", None), "params", {}).values()
    return {
        *getattr(item, "fixturenames", ()),
        *(value for value in given if isinstance(value, str)),
    }


def in_order(items: list[pytest.Item]) -> None:
    """What is dear first, then files with slow tests, then the others, with which both workers end."""
    places = {Path(__file__).parent / name: i for i, name in enumerate(DEAR_FILES)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (places.get(item.path, len(DEAR_FILES)), item.path not in slow))


def pytest_collection_finish() -> None:
    """What was imported stays until the end: the collections of garbage below pass it over."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """Traced programs are cycles, with megabytes that Python's own collections do not know of."""
    yield
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cache of programs of this session of tests, not the user's."""
    os.environ["LLAMA_EXPORT_CACHE"] = str(shared_folder(tmp_path_factory) / "cache")


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell that starts the tests in the background lets them ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that other tests import set the width of a terminal that is not there."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama in float32 with grouped heads and a tokenizer."""
    return write_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every entry in every format, two rows, 256 positions, float32. Do not write into it."""
    folder = shared_folder(tmp_path_factory)
    output = folder / "tiny bundle"
    with FileLock(folder / "tiny.lock"):
        if not output.exists():
            recipe = Recipe(
                str(tiny_checkpoint), output, ALL_ENTRIES, max_seq=TINY_MAX_SEQ, batch=TINY_BATCH
            )
            build(recipe, cache=ProgramCache())
    return output


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this session of tests that all of its worker processes share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def short_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One row of 16 positions, `prefill` and `decode` as pt2. Do not write into it."""
    output = tmp_path_factory.mktemp("bundle") / "short"
    recipe = Recipe(str(tiny_checkpoint), output, ("prefill", "decode"), ("pt2",), max_seq=16)
    return build(recipe, cache=ProgramCache()).folder


@pytest.fixture(scope="session")
def tiny_loaded(tiny_bundle: Path) -> dict[str, llama_runtime.LoadedBundle]:
    """The tiny bundle, loaded once in each format."""
    return {format: llama_runtime.load(tiny_bundle, format=format) for format in FORMATS}


@pytest.fixture(scope="session")
def tiny_packed_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slots, packs, pages and loops in every format: four rows, pages of 16, twelve new tokens."""
    folder = shared_folder(tmp_path_factory)
    output = folder / "tiny packed bundle"
    entries = (
        "prefill_slots",
        "prefill_packed",
        "step_packed",
        "decode_rows",
        "training",
        "serving",
        "generation",
    )
    with FileLock(folder / "packed.lock"):
        if not output.exists():
            recipe = Recipe(
                str(tiny_checkpoint),
                output,
                entries,
                max_seq=TINY_MAX_SEQ,
                batch=4,
                steps=TINY_STEPS,
                max_new=TINY_STEPS,
            )
            build(recipe, cache=ProgramCache())
    return output


@pytest.fixture(scope="session")
def sharded_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with eight query and four key/value heads, biases and a tied head, in float32.

    Parts for four processes are large enough for native code: it has tensors of up to eight values
    written into it.
    """
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 1}
    sizes["head_dim"] = 16
    options = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    return write_tiny(tmp_path_factory.mktemp("checkpoint") / "sharded", **sizes, **options)


@pytest.fixture(scope="session")
def sharded_bundle(sharded_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every entry as pt2, for one process and for two: two rows, 64 positions. Do not write into it."""
    folder = shared_folder(tmp_path_factory)
    output = folder / "sharded bundle"
    with FileLock(folder / "sharded.lock"):
        if not output.exists():
            recipe = sharded_recipe(sharded_checkpoint, output)
            build(recipe, cache=ProgramCache())
    return output


def sharded_recipe(checkpoint: Path, output: Path, **changes: Any) -> Recipe:
    """What the sharded bundle is built from, or another of the same sizes."""
    recipe = Recipe(
        str(checkpoint),
        output,
        ("all",),
        ("pt2",),
        max_seq=64,
        batch=2,
        rows=8,
        steps=4,
        max_new=4,
        shards=(1, 2),
    )
    return replace(recipe, **changes)
