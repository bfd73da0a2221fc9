"""Libraries that only some commands need, and what to install where one is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llama_artifacts.errors import CompatibilityError


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around the imports of what an extra of the distribution brings.

    Raises:
        CompatibilityError: one of the modules is not installed; the hint installs the extra.
    """
    try:
        yield
    except ModuleNotFoundError as cause:
        raise CompatibilityError(
            f"expected the module `{cause.name}`, which is not installed",
            hint=f"pip install 'llama-export[{extra}]'",
        ) from cause
