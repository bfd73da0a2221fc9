"""Measures a bundle that refers to its weights: the serving entries of a preset, from headers alone.

    python -m tests.benchmarks.reference_bundle [--preset NAME] [--folder DIR]

The hub is stood in for: headers come from the preset's config, and the digest of the weights, which
only the hub could tell, is made up. Everything else is what `build --weights reference` does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from llama_artifacts.manifest import File, Source
from llama_artifacts.summary import show_bytes
from llama_export import presets
from llama_export.build import build
from llama_export.checkpoint import hub
from llama_export.checkpoint.hf import HfCheckpoint
from llama_export.recipe import Recipe
from tests.end_to_end.test_without_weights import write_headers

FORMATS = ("pt2", "onnx")


def main() -> None:
    """Builds the bundle and prints what it weighs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama-3.1-8b-instruct", choices=presets.names())
    parser.add_argument("--folder", type=Path, help="where to build; a temporary folder")
    options = parser.parse_args()
    preset = presets.find(options.preset)
    assert preset is not None
    source = Source("hub", preset.repository, preset.revision)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        headers = write_headers(Path(scratch) / "headers", preset.config)

        def opened(model: str, **settings: object) -> HfCheckpoint:
            return HfCheckpoint.open(headers, source=source, name=preset.name, **settings)  # type: ignore[arg-type]

        recipe = Recipe(
            preset.name,
            Path(scratch) / "bundle",
            ("serving",),
            FORMATS,
            preset.max_seq,
            weights="reference",
        )
        started = time.perf_counter()
        with (
            mock.patch("llama_export.blueprint.open_checkpoint", opened),
            mock.patch.object(hub, "describe", return_value=File(16 * 10**9, "0" * 64)),
        ):
            result = build(recipe)
        rows = [(made.label, made.program.format, made.bytes) for made in result.programs]
        for label, format, num_bytes in rows:
            sys.stdout.write(f"{label:16} {format:5} {show_bytes(num_bytes):>10}\n")
        seconds = time.perf_counter() - started
        sys.stdout.write(
            f"{len(rows)} programs, {show_bytes(result.bundle_bytes)}, {seconds:.0f} s\n"
        )


if __name__ == "__main__":
    main()
