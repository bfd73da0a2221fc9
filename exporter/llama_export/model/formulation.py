"""How the same network is written for different programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llama_artifacts.manifest import Numerics
from llama_export.model.stored import stored


@dataclass(frozen=True)
class Formulation:
    """How the same mathematics is written for one kind of program.

    Attributes:
        dtype: the compute dtype; weights of another dtype are cast where they are used.
        reads_positions: positions are read back as numbers, so that work follows the positions
            in use; not for CUDA graphs, where attention covers the whole state under a mask.
        max_fused_rows: products of up to so many rows are one pass over the stored weights (see
            `llama_export.model.products`); 0: no compiler that fuses will see the graph.
        device: whose kernels the graph's operators get, where it has any: those for `cpu` take
            attention over kept keys for any number of new tokens, if the heads fit a vector; those
            for `cuda` for one new token a row, and products with FP8 weights.
        has_contrib: ONNX Runtime will run the graph on the CPU, with operators of its own (see
            `llama_export.model.contrib`).
        numerics: how products with FP8 weights are computed, see `llama_export.model.fp8`.
        has_fp8_units: the device multiplies FP8 by FP8, which `fast` products then use.
        num_shards: processes that run the program together, each with its part of the network.
        group: the name by which the graph calls them, where there are several.
    """

    dtype: torch.dtype
    reads_positions: bool
    max_fused_rows: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    has_contrib: bool = False
    numerics: Numerics = "exact"
    has_fp8_units: bool = False
    num_shards: int = 1
    group: str = ""

    @property
    def is_fused(self) -> bool:
        """Whether a compiler that fuses will see the graph: products, attention and norms."""
        return self.max_fused_rows > 0

    @property
    def has_fp8_kernel(self) -> bool:
        """Whether few rows are multiplied by FP8 weights in a kernel, which converts as units do."""
        return self.is_fused and self.device == "cuda" and self.has_fp8_units

    @property
    def is_sharded(self) -> bool:
        """Whether several processes run the program together."""
        return self.num_shards > 1

    def kept(self, x: Tensor) -> Tensor:
        """The same values, computed once also where a compiler fuses (see `stored`)."""
        return stored(x) if self.is_fused else x
