"""Keeps timings in the bundle, for its page and for the next one who asks."""

from __future__ import annotations

import json
from pathlib import Path

from llama_artifacts.bundle import put_file
from llama_artifacts.codec import encode
from llama_export.page.timings import FILE_NAME, Timings


def record(folder: Path, timings: Timings) -> None:
    """Writes `bench.json` into a bundle, in place of the one that is there.

    Raises:
        BuildError: the folder cannot be written.
        ManifestError: it holds no sound manifest.
    """
    text = json.dumps(encode(timings), indent=2, sort_keys=True, allow_nan=False) + "\n"
    put_file(folder, FILE_NAME, text.encode())
