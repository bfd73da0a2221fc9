"""The exponential in the C++ that Inductor writes for a CPU, in programs of bf16.

Its own is a call of a library, exact to one unit of float32's last place. Twenty such units, which
need no call, are a thousandth of what rounding the result to bf16 changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor.codegen.cpp import CppVecOverrides

_OVERRIDES: Any = CppVecOverrides


@contextlib.contextmanager
def short_exponentials(dtype: torch.dtype) -> Iterator[None]:
    """Writes the short one, if the program is of bf16; NaN stays NaN."""
    original = _OVERRIDES.exp
    if dtype == torch.bfloat16:
        _OVERRIDES.exp = staticmethod(_short)
    try:
        yield
    finally:
        _OVERRIDES.exp = staticmethod(original)


def _short(x: Any) -> str:
    return f"decltype({x})::blendv({x}.exp_u20(), {x}, {x} != {x})"
