"""Bitcasts of whole vectors in the C++ that Inductor writes for a CPU.

As of torch 2.13 it writes them as a loop over the elements, which its own flags forbid the compiler
to vectorise; that makes reading FP8 weights by their bits several times slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor.codegen.cpp import CppVecOverrides
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
from torch._inductor.virtualized import V

_OVERRIDES: Any = CppVecOverrides
_by_element: Any = _OVERRIDES.to_dtype_bitcast


@contextlib.contextmanager
def vector_bitcasts() -> Iterator[None]:
    """Copies the bytes of a vector instead, which compilers turn into no code at all."""
    _OVERRIDES.to_dtype_bitcast = staticmethod(_whole)
    try:
        yield
    finally:
        _OVERRIDES.to_dtype_bitcast = staticmethod(_by_element)


def _whole(x: Any, dtype: torch.dtype, src_dtype: torch.dtype) -> Any:
    num_vectors = V.kernel._get_num_vectors(dtype)
    if num_vectors != V.kernel._get_num_vectors(x.dtype):
        return _by_element(x, dtype, src_dtype)
    kind = f"at::vec::Vectorized<{DTYPE_TO_CPP[dtype]}>"
    if num_vectors > 1:
        kind = f"at::vec::VectorizedN<{DTYPE_TO_CPP[dtype]}, {num_vectors}>"
    same = f"static_assert(sizeof({kind}) == sizeof({x}));"
    return f"[&](){{ {same} {kind} to; std::memcpy(&to, &{x}, sizeof(to)); return to; }}()"
