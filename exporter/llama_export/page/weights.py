"""The weights by part of the network and dtype, from the headers of their files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from llama_artifacts.bundle import Bundle
from llama_artifacts.signature import show
from llama_artifacts.weights import stored_tensors

_LAYER = re.compile(r"(.*?\.[0-9]+)\.(.*)")


@dataclass(frozen=True)
class Weight:
    """One tensor; `part` is its layer, or its module where it is of none."""

    name: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Share:
    """What tensors have in common, and their bytes together."""

    name: str
    dtype: str
    num_tensors: int
    num_bytes: int


def read_weights(bundle: Bundle) -> tuple[Weight, ...]:
    """Every tensor that the bundle holds, in the order of its files.

    Raises:
        IntegrityError: a file's header breaks the format.
    """
    return tuple(
        Weight(name, _part(name), tensor.dtype, tensor.shape, tensor.end - tensor.start)
        for name, (_, tensor) in stored_tensors(bundle).items()
    )


def shares(weights: tuple[Weight, ...]) -> tuple[Share, ...]:
    """The weights by kind, layers taken together, and dtype; the largest first."""
    found: dict[tuple[str, str], list[int]] = {}
    for weight in weights:
        found.setdefault((_kind(weight), weight.dtype), []).append(weight.num_bytes)
    rows = [Share(*key, len(sizes), sum(sizes)) for key, sizes in found.items()]
    return tuple(sorted(rows, key=lambda share: -share.num_bytes))


def to_list(weights: tuple[Weight, ...]) -> list[dict[str, Any]]:
    """The parts with their tensors, for the page's script."""
    parts: dict[str, list[Weight]] = {}
    for weight in weights:
        parts.setdefault(weight.part, []).append(weight)
    return [
        {
            "name": part,
            "tensors": [
                {
                    "name": weight.name,
                    "kind": _kind(weight),
                    "dtype": weight.dtype,
                    "shape": show(weight.shape),
                    "bytes": weight.num_bytes,
                }
                for weight in tensors
            ],
        }
        for part, tensors in parts.items()
    ]


def _part(name: str) -> str:
    match = _LAYER.fullmatch(name)
    return match[1] if match else name.rpartition(".")[0] or name


def _kind(weight: Weight) -> str:
    """The module within its layer, such as `self_attn.q_proj`, or the part itself."""
    inner = weight.name.removeprefix(f"{weight.part}.")
    module = inner.rpartition(".")[0]
    return module or weight.part
