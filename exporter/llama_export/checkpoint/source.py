"""What every checkpoint reader offers to the rest of the exporter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llama_artifacts.manifest import Source
from llama_export.checkpoint.config import LlamaConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: its dtype as stored (`bf16`, `f32`, ..., or GGUF's `q4_1`) and shape."""

    dtype: str
    shape: tuple[int, ...]


class Checkpoint(Protocol):
    """A model on disk, opened by header only.

    Tensor names are those of the Hugging Face Llama checkpoint, whatever the file calls them.
    Opening checks config and tensor table against each other (every tensor used, none missing,
    every shape right); no tensor data is read before `read`.
    """

    name: str
    source: Source
    config: LlamaConfig
    dtype: str  # the compute dtype the checkpoint suggests: "bf16", "f16" or "f32"
    tensors: Mapping[str, TensorInfo]
    stop_tokens: tuple[int, ...]
    notes: tuple[str, ...]  # one-line remarks: assumed values, ignored tensors

    def read(self, name: str) -> torch.Tensor:
        """One tensor whole, in its stored dtype; a quantised GGUF tensor as float32."""
        ...

    def assets(self) -> dict[str, bytes]:
        """Tokenizer, template and config files that travel with the bundle, by file name."""
        ...
