"""Writes `manifest-v1.schema.json` beside this file; with `--check` only tells whether it is right."""

from __future__ import annotations

import sys
from pathlib import Path

from llama_artifacts.manifest import SCHEMA_MAJOR
from llama_artifacts.schema import to_json

PATH = Path(__file__).with_name(f"manifest-v{SCHEMA_MAJOR}.schema.json")


def main() -> None:
    """Writes the schema, or with `--check` exits with 1 if the file holds another."""
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit("usage: python artifacts/schema/generate.py [--check]")
    if not sys.argv[1:]:
        PATH.write_bytes(to_json())
    elif not PATH.is_file() or PATH.read_bytes() != to_json():
        sys.exit(f"{PATH}: not what the dataclasses say; run python artifacts/schema/generate.py")


if __name__ == "__main__":
    main()
