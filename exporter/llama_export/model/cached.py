"""Attention over kept keys and values: an operator of the graph of native code.

Shape letters: P tokens, N query heads, K key/value heads, G = N / K, D head width, C pages of L
positions, R rows of a table of Q pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH_MULTIPLE = 16
"""Head widths that the kernel takes are multiples of this, the floats of the widest vector."""


@torch.library.custom_op("llama_export::attend_cached", mutates_args=())
def attend_cached(
    q_PND: Tensor,
    keys_CKLD: Tensor,
    values_CKLD: Tensor,
    table_RQ: Tensor,
    rows_P: Tensor,
    positions_P: Tensor,
) -> Tensor:
    """Softmax attention of each token over places 0 to its position in its row, float32 [P, N, D].

    Place p of row r is position p % L of page table[r, p // L]. Query head j*G + i reads key/value
    head j. The operator has a kernel of its own in native code (`llama_export.lower.cached`), which
    reads no place after the position; what it computes is this.
    """
    (P, N, D), (_, K, L, _) = q_PND.shape, keys_CKLD.shape
    pages = table_RQ[rows_P.long()].long()
    keys, values = (
        state[pages].transpose(1, 2).flatten(2, 3).float() for state in (keys_CKLD, values_CKLD)
    )
    q = (q_PND.float() * D**-0.5).unflatten(1, (K, N // K))
    places = torch.arange(pages.shape[1] * L, device=q.device)
    hidden = (places > positions_P[:, None])[:, None, None]
    weights = (q @ keys.transpose(-1, -2)).masked_fill(hidden, float("-inf")).softmax(-1)
    # A product with the zero of a hidden place would let what is there through, if it is not finite.
    seen = values.masked_fill(hidden[:, 0, :, :, None], 0)
    return (weights @ seen).reshape(P, N, D)


@attend_cached.register_fake
def _(
    q_PND: Tensor,
    keys_CKLD: Tensor,
    values_CKLD: Tensor,
    table_RQ: Tensor,
    rows_P: Tensor,
    positions_P: Tensor,
) -> Tensor:
    return torch.empty_like(q_PND, dtype=torch.float32)
