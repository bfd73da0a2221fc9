"""Replays bundles of exported Llama programs, without any model code.

bundle = llama_runtime.load("smollm2-135m")
for piece in bundle.generate("Why is the sky blue?", max_new=64):
    print(piece, end="")
"""

from __future__ import annotations

from llama_runtime.entry import Entry
from llama_runtime.generate import Generation, TokenStream
from llama_runtime.loader import LoadedBundle, load
from llama_runtime.sampling import SamplingParams
from llama_runtime.session import Session
from llama_runtime.states import States
from llama_runtime.tokenizer import Tokenizer

__all__ = [
    "Entry",
    "Generation",
    "LoadedBundle",
    "SamplingParams",
    "Session",
    "States",
    "TokenStream",
    "Tokenizer",
    "load",
]
