"""What the adapters of several engines ask: is it installed, and how are its weights stored?"""

from __future__ import annotations

from llama_artifacts.errors import CompatibilityError
from llama_artifacts.manifest import Manifest
from llama_runtime.machine import version

_BLOCKS = {"int8": "q8_0", "int4": "q4_0"}


def installed(package: str, *, extra: str) -> str:
    """The version of a package.

    Raises:
        CompatibilityError: it is not installed.
    """
    found = version(package)
    if found is None:
        raise CompatibilityError(
            f"expected the package `{package}`, which is not installed",
            hint=f"pip install 'llama-export[{extra}]'",
        )
    return found


def stored_type(manifest: Manifest) -> str:
    """GGUF's word for how most weights of a bundle are stored, FP8 widened."""
    if manifest.quantized is None:
        return manifest.dtype
    return _BLOCKS[manifest.quantized.kind]
