"""`llama-export run`: text or tokens from a bundle, as they come."""

from __future__ import annotations

from llama_runtime.cli.run import command as command
