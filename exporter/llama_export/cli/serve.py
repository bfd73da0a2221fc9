"""`llama-export serve`: an HTTP server with OpenAI's API over a bundle."""

from __future__ import annotations

from llama_runtime.cli.serve import command as command
