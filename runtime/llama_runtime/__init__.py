"""Replays bundles of exported Llama programs, without any model code.

bundle = llama_runtime.load("smollm2-135m")
for piece in bundle.generate("Why is the sky blue?", max_new=64):
    print(piece, end="")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_runtime.engine import Engine, Request
    from llama_runtime.entry import Entry
    from llama_runtime.generate import Generation, TokenStream
    from llama_runtime.loader import LoadedBundle, load
    from llama_runtime.sampling import SamplingParams
    from llama_runtime.session import Session
    from llama_runtime.states import States
    from llama_runtime.tokenizer import Tokenizer
    from llama_runtime.trainable import TrainableEntry

__all__ = [
    "Engine",
    "Entry",
    "Generation",
    "LoadedBundle",
    "Request",
    "SamplingParams",
    "Session",
    "States",
    "TokenStream",
    "Tokenizer",
    "TrainableEntry",
    "load",
]

# Imported on first use, so that the parts without torch stay quick to import.
_MODULES = {
    "Engine": "engine",
    "Entry": "entry",
    "Generation": "generate",
    "LoadedBundle": "loader",
    "Request": "engine",
    "SamplingParams": "sampling",
    "Session": "session",
    "States": "states",
    "TokenStream": "generate",
    "Tokenizer": "tokenizer",
    "TrainableEntry": "trainable",
    "load": "loader",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
