"""What every checkpoint reader offers to the rest of the exporter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llama_artifacts.manifest import File, Source
from llama_artifacts.safetensors import StoredTensor
from llama_export.checkpoint.config import LlamaConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: its dtype as stored (`bf16`, `f32`, ..., or GGUF's `q4_1`) and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor, the safetensors file it lies in, and its name there."""

    path: Path
    name: str
    tensor: StoredTensor


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

    @property
    def has_data(self) -> bool:
        """Whether `read` can be called; not where only headers were asked for and had."""
        ...

    def stored(self, name: str) -> Stored | None:
        """Where the tensor's bytes are, as `read` gives them, under this name; None: nowhere."""
        ...

    def describe(self, path: Path) -> File:
        """Size and digest of a whole file that `stored` names, also where only its header is here.

        Raises:
            CheckpointError: the digest cannot be had.
        """
        ...

    def assets(self) -> dict[str, bytes]:
        """Tokenizer, template and config files that travel with the bundle, by file name."""
        ...
