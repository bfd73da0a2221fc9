"""`python -m llama_export`."""

from __future__ import annotations

from llama_export.cli import main

if __name__ == "__main__":
    main()
