"""A forecast: what needs how much memory, how each figure was found, and what is not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from llama_artifacts.manifest import Format

Basis = Literal["exact", "modelled", "estimated"]
"""`exact`: adds up declared sizes; `modelled`: follows the program; `estimated`: from a measured
constant that may differ elsewhere."""


@dataclass(frozen=True)
class Figure:
    """One part of the memory; `how` says in a few words where the number comes from."""

    name: str
    bytes: int
    basis: Basis
    how: str


@dataclass(frozen=True)
class Forecast:
    """What one call of an entry needs on one device.

    Attributes:
        name: the model's.
        entry: which entry.
        format: of its program.
        device: `cpu` or `cuda`.
        batch: sequences of the call.
        seq_len: positions of each sequence's state, or tokens where there is no state.
        shards: devices that share the network; the figures are one device's.
        sizes: of the call's dimensions.
        figures: in bytes.
        unknown: what needs memory too, and is in no figure.
    """

    name: str
    entry: str
    format: Format
    device: str
    batch: int
    seq_len: int
    shards: int
    sizes: Mapping[str, int]
    figures: tuple[Figure, ...]
    unknown: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """The sum of the figures."""
        return sum(figure.bytes for figure in self.figures)
