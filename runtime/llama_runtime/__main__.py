"""`python -m llama_runtime`."""

from __future__ import annotations

from llama_runtime.cli import main

if __name__ == "__main__":
    main()
