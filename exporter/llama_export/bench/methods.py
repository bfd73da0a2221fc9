"""What can be measured: the bundle in one of its formats, and its peers, by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llama_artifacts.manifest import Format

if TYPE_CHECKING:
    import torch

PEERS = {
    "transformers": "the reference, eager",
    "transformers-compiled": "the same through torch.compile, with states of a fixed size",
    "llama.cpp": "through llama-cpp-python, from a GGUF file of the same weights and type",
    "onnxruntime-genai": "with the bundle's codes, activations of eight bits; else in float32",
    "openvino": "OpenVINO GenAI, attention over whole states",
    "openvino-paged": "OpenVINO GenAI, attention over pages, as it does by default",
    "ctranslate2": "in float32, all that it has for unquantised weights on a CPU",
}
"""The engines a bundle can be compared with, and what each is."""

_MODULES = {
    "bundle": "bundle",
    "transformers": "transformers",
    "transformers-compiled": "transformers",
    "llama.cpp": "llama_cpp",
    "onnxruntime-genai": "onnxruntime_genai",
    "openvino": "openvino",
    "openvino-paged": "openvino",
    "ctranslate2": "ctranslate2",
}


@dataclass(frozen=True)
class Setup:
    """What an engine is opened with.

    Attributes:
        method: a name of `PEERS`, or `bundle`.
        folder: the bundle.
        scratch: a folder for files that the engine needs beside the bundle.
        threads: CPU threads.
        positions: positions that a text needs at most.
        format: of the bundle's programs; None: the best that fits.
        weights_dir: the checkpoint's folder, for a bundle that refers to its weights.
    """

    method: str
    folder: Path
    scratch: Path
    threads: int
    positions: int
    format: Format | None = None
    weights_dir: Path | None = None


class Method(Protocol):
    """An engine with a model in it.

    Attributes:
        label: for people, such as `aoti` or `transformers 5.24.0`.
        versions: of what ran, by package.
        files: those that it needs to run.
    """

    label: str
    versions: dict[str, str]
    files: Sequence[Path]

    def generate(self, prompt: Sequence[int], num_new: int) -> Iterator[int]:
        """Exactly so many greedy tokens after a prompt, each as soon as it is known."""
        ...

    def logits(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Logits [V], float32, after the last of the tokens; None where the engine keeps them."""
        ...


class Adapter(Protocol):
    """The module of an engine."""

    def prepare(self, setup: Setup) -> None:
        """Writes into `setup.scratch` what the engine needs, before anything is measured.

        Raises:
            CompatibilityError: the engine is not installed, or cannot run this bundle.
        """
        ...

    def open(self, setup: Setup) -> Method:
        """The engine, ready for its first call."""
        ...


def adapter(method: str) -> Adapter:
    """The module of a method; its engine is imported when it is opened."""
    module = importlib.import_module(f"llama_export.bench.peers.{_MODULES[method]}")
    found: Adapter = module
    return found
