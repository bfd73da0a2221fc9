"""Results that a compiler which fuses must write to memory."""

from __future__ import annotations

from torch import Tensor


def stored(x: Tensor) -> Tensor:
    """The same values, which a compiler writes to memory rather than computes again for each reader.

    Without it the producer of a vector, a norm say, goes into the loop over the rows of the weight
    that the vector multiplies. A result in bfloat16 is also rounded, where the compiler would keep
    float32. Not for a view: Inductor loses its offset.
    """
    x = x.contiguous()
    return x.as_strided(x.size(), x.stride())
