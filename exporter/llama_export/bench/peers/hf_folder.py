"""A bundle's weights as a Hugging Face folder, for the converters of other engines."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from llama_artifacts.bundle import open_bundle
from llama_artifacts.dtypes import from_name
from llama_export.bench.methods import Setup
from llama_export.reference import load_model

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def load_bundle(setup: Setup) -> torch.nn.Module:
    """The bundle's network in `transformers`, in the bundle's dtype; codes are decoded.

    Raises:
        CompatibilityError: `transformers` is not installed, or the bundle has no weights.
        ManifestError, IntegrityError: the bundle is damaged.
    """
    manifest = open_bundle(setup.folder).manifest
    dtype = getattr(torch, from_name(manifest.dtype).torch)
    model, _ = load_model(setup.folder, dtype=dtype, weights_dir=setup.weights_dir)
    return model


def write_folder(setup: Setup, folder: Path) -> None:
    """Writes configuration, weights and what there is of a tokenizer.

    Raises:
        CompatibilityError, ManifestError, IntegrityError: as `load_bundle`.
    """
    load_bundle(setup).save_pretrained(folder)  # type: ignore[operator]
    for name in TEXT_FILES:
        if (setup.folder / name).is_file():
            shutil.copy(setup.folder / name, folder)
