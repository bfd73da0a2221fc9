"""Manifests spoilt at random are read or refused, never a traceback."""

from __future__ import annotations

import copy
import json
import random
import time
from typing import Any

import pytest

from llama_artifacts.errors import LlamaExportError, ManifestError
from llama_artifacts.manifest_file import from_json, to_json
from tests.artifacts.manifest_samples import WHERE, nodes, sample_value
from tests.bundles import sample_manifest


@pytest.mark.parametrize("place", ["schema", "weights", "name", "unknown"])
def test_nesting_at_the_limit_of_the_parser_is_no_traceback(place: str) -> None:
    data = json.dumps(sample_value()).encode()
    for depth in range(700, 1000, 7):
        nested = f'{{"{place}": {"[" * depth}{"]" * depth}, '.encode()
        text = nested + data[1:].replace(f'"{place}": '.encode(), b'"z": ', 1)
        with pytest.raises(ManifestError):
            from_json(text, where=WHERE)


def mutate(value: Any, dice: random.Random) -> None:
    """Deletes, replaces, moves or duplicates one node in place."""
    scraps: list[Any] = [
        None,
        True,
        -1,
        0,
        2**63,
        10**400,
        0.5,
        float("nan"),
        "",
        "S",
        "\ud800",
        [],
        {},
        [[]],
    ]
    node = dice.choice([node for node in nodes(value) if node])
    key = dice.choice(list(node) if isinstance(node, dict) else range(len(node)))
    kind = dice.randrange(4)
    if kind == 0:
        del node[key]
    elif kind == 1:
        node[key] = copy.deepcopy(dice.choice(scraps))
    elif kind == 2:
        node[key] = copy.deepcopy(dice.choice(list(nodes(value))))
    elif isinstance(node, dict):
        node[dice.choice(["", "x", "../x", "name", "max"])] = copy.deepcopy(node[key])
    else:
        node.append(copy.deepcopy(node[key]))


def flip(data: bytes, dice: random.Random) -> bytes:
    """Changes, cuts or repeats a few bytes."""
    result = bytearray(data)
    for _ in range(dice.randint(1, 3)):
        place = dice.randrange(len(result))
        kind = dice.randrange(4)
        if kind == 0:
            result[place] ^= 1 << dice.randrange(8)
        elif kind == 1:
            result[place] = dice.choice(b'{}[]",:0-.eNI\\\x00\xff')
        elif kind == 2:
            del result[place : place + dice.randint(1, 40)]
        else:
            result[place:place] = result[place : place + dice.randint(1, 40)]
    return bytes(result)


def attempt(data: bytes) -> bool:
    """Whether the manifest is accepted; anything but a known error is a failure of the test."""
    start = time.process_time()
    try:
        manifest = from_json(data, where=WHERE)
    except LlamaExportError as error:
        complaint = str(error)
    else:
        complaint = ""
        assert from_json(to_json(manifest), where=WHERE) == manifest
    assert time.process_time() - start < 0.5
    assert complaint.isprintable()
    assert len(complaint) < 1500
    return not complaint


@pytest.mark.parametrize("seed", range(6))
def test_mutated_values_are_read_or_refused(seed: int) -> None:
    dice = random.Random(seed)
    base = sample_value()
    base["programs"] = base["programs"][:1]
    outcomes = []
    for _ in range(250):
        value = copy.deepcopy(base)
        for _ in range(dice.randint(1, 2)):
            mutate(value, dice)
        outcomes.append(attempt(json.dumps(value).encode()))
    assert 0 < sum(outcomes) < 125


@pytest.mark.parametrize("seed", range(6))
def test_mutated_bytes_are_read_or_refused(seed: int) -> None:
    dice = random.Random(seed)
    data = to_json(sample_manifest())
    outcomes = [attempt(flip(data, dice)) for _ in range(250)]
    assert 0 < sum(outcomes) < 125
