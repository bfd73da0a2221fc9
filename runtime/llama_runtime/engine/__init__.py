"""Many texts at once over one pool of pages: requests join and leave the batch at every step."""

from __future__ import annotations

from llama_runtime.engine.engine import Engine, Stats
from llama_runtime.engine.request import Output, Request

__all__ = ["Engine", "Output", "Request", "Stats"]
