"""Where the tensors of a bundle's weights are, by the headers of the files that it holds."""

from __future__ import annotations

from pathlib import Path

from llama_artifacts.bundle import Bundle
from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import WEIGHTS_NAME
from llama_artifacts.safetensors import StoredTensor, read_header


def stored_tensors(bundle: Bundle) -> dict[str, tuple[Path, StoredTensor]]:
    """Every tensor of the weights files in a bundle by name; none of files that are elsewhere.

    Of two tensors of a name, that of the bundle's own file counts.

    Raises:
        IntegrityError: a file breaks the format.
    """
    manifest = bundle.manifest
    held = manifest.weights_headers.keys() - manifest.referenced.keys()
    found: dict[str, tuple[Path, StoredTensor]] = {}
    for name in sorted(held, key=lambda name: (name == WEIGHTS_NAME, name)):
        path = bundle.path(name)
        tensors = read_header(path, error=IntegrityError).tensors
        found |= {tensor: (path, stored) for tensor, stored in tensors.items()}
    return found
