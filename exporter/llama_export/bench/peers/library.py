"""What the adapters of several engines ask: is it installed, and how are its weights stored?"""

from __future__ import annotations

from collections import Counter

from llama_artifacts.bundle import Bundle
from llama_artifacts.errors import CompatibilityError
from llama_artifacts.weights import stored_tensors
from llama_export.checkpoint.layout import MIN, SCALE
from llama_runtime.machine import version

_BLOCKS = {("i8", False): "q8_0", ("u8", False): "q4_0", ("u8", True): "q4_1"}
"""By the dtype of codes, and whether they have minima."""


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


def stored_type(bundle: Bundle) -> str:
    """GGUF's word for how most weights of a bundle are stored, other codes widened."""
    stored = {name: tensor.dtype for name, (_, tensor) in stored_tensors(bundle).items()}
    modules = [name.removesuffix(SCALE) for name in stored if name.endswith(SCALE)]
    kinds = Counter((stored[f"{module}.weight"], f"{module}{MIN}" in stored) for module in modules)
    most = max(kinds, key=kinds.__getitem__, default=None)
    return bundle.manifest.dtype if most is None else _BLOCKS.get(most, bundle.manifest.dtype)
