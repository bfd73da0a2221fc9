"""Operators of ONNX Runtime's own in the network's graph, for programs that it runs on the CPU.

They are placeholders: only ONNX Runtime computes them. Sums are float32 in all of them.

Shape letters: B rows, S new tokens of a row, M positions a cache row holds, N query heads, K
key/value heads, D head width, V out, H in, G groups of a row; `...` the axes of a call's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.onnx import ops

from llama_export.model.attention import State
from llama_export.model.integers import OFFSET, unpack

HEAD_MULTIPLE = 16
"""Head widths that the operator of attention turns are multiples of this."""
GROUPS = (32, 64, 128, 256)
"""Groups of values for which the operator of products has kernels of its own."""
MAX_ROWS = 8
"""Up to so many rows the operator is faster than a product with a weight that was decoded at load."""
_EXACT = 1
"""The accuracy level at which activations stay float32; above it they are rounded to eight bits."""


def takes(codes: Tensor, scale_VG: Tensor) -> bool:
    """Whether ONNX Runtime multiplies codes as they are stored.

    Those of eight bits it would decode whole at every call, where activations are to stay float32. Minima
    are no whole multiples of scales, as it would need them.
    """
    return codes.dtype == torch.uint8 and 2 * codes.shape[1] // scale_VG.shape[1] in GROUPS


def linear(x: Tensor, codes: Tensor, scale_VG: Tensor) -> Tensor:
    """A linear layer [..., H] -> [..., V] over codes of four bits, [V, H / 2]."""
    num_out, num_bytes = codes.shape
    num_groups = scale_VG.shape[1]
    return ops.symbolic(
        "com.microsoft::MatMulNBits",
        (x, _in_order(codes).reshape(num_out, num_groups, -1), scale_VG.float().flatten()),
        {
            "K": 2 * num_bytes,
            "N": num_out,
            "bits": 4,
            "block_size": 2 * num_bytes // num_groups,
            "accuracy_level": _EXACT,
        },
        dtype=x.dtype,
        shape=(*x.shape[:-1], num_out),
        version=1,
    )


def _in_order(codes: Tensor) -> Tensor:
    """The same codes with neighbours in a byte, as the operator reads them.

    Stored, value j of a block lies with value j + 16. This is computed once, when the program is
    loaded; to put the other factor in order would cost as much as the product of a long prompt.
    """
    even, odd = (unpack(codes) + OFFSET).unflatten(-1, (-1, 2)).unbind(-1)
    return (even + 16 * odd).to(torch.uint8)


@dataclass(frozen=True)
class Grouped:
    """Tokens [B, S] that stand one after the other and see their row of the cache up to themselves.

    One operator turns queries and keys, keeps keys and values, and attends over what is in use.

    Attributes:
        positions: all of a row, [M]; from their turns the operator takes those of the tokens.
        last: the position of each row's last token, int32 [B].
        num_seen: how many positions that one sees at most, an int32 scalar.
    """

    positions: Tensor
    last: Tensor
    num_seen: Tensor

    def mix(self, q: Tensor, k: Tensor, v: Tensor, turn: State, state: State) -> Tensor:
        """Attends for q [B, S, N * D], k and v [B, S, K * D], by cosines and sines [M, 1, D]."""
        _, num_kv_heads, _, head_dim = state[0].shape
        cos, sin = (table[:, 0, head_dim // 2 :] for table in turn)
        num_heads = q.shape[2] // head_dim
        mixed, *states = ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            (q, k, v, *state, self.last, self.num_seen, cos, sin),
            {"num_heads": num_heads, "kv_num_heads": num_kv_heads, "do_rotary": 1},
            dtypes=[q.dtype] * 3,
            shapes=[q.shape, *(each.shape for each in state)],
            version=1,
        )
        for old, written in zip(state, states, strict=True):
            old.copy_(written)
        return mixed
