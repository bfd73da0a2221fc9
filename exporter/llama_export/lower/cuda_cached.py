"""The kernel of `llama_export::attend_cached` on a CUDA device, in Triton.

A long context of few tokens is too little work for a GPU where one program of the grid reads all of
it. So the places of a row are cut into splits (Dao, Haziza, Massa and Sizov 2023, Flash-Decoding):
each gives its largest score, the sum of its weights and its weighted values, and a second kernel
merges them. All query heads of a key/value head are attended for at once, so each key is read once.

Every number that decides what is launched is a size: the grid is that of the widest table, nothing is
read back, and a split that begins past its token's position reads no key. Splits have one length,
whatever the call, so that a token's result depends neither on other tokens nor on padding.

Shape letters: P tokens, N query heads, K key/value heads, G = N / K, D head width, C pages of L
positions, R rows of a table of Q pages, S splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

SPLIT = 256
"""Places of a split: a thousand programs for one token of eight heads at 32,768, and partial results
that weigh a sixtieth of the keys and values that they come from, for four query heads of 128."""

_LEAST = 16  # sides of the matrices that tensor cores take are multiples of this
_TILE_BYTES = 8192  # of keys that are read at once
_MERGED = 32  # splits that are merged at once


@triton.jit
def _attend(
    q, keys, values, table, rows, positions, tops, totals, mixed, num_splits, num_columns,
    SCALE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
    SPLIT_LEN: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One split of one token's places, for the G query heads of one key/value head."""
    token, shared, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = split * SPLIT_LEN
    position = tl.load(positions + token)
    end = tl.minimum(first + SPLIT_LEN, position + 1)
    pages = table + tl.load(rows + token).to(tl.int64) * num_columns
    dtype = q.dtype.element_ty
    head, part = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    own = token * (K * G) + shared * G + head
    is_own = (head < G)[:, None] & (part < D)[None, :]
    query = tl.load(q + own[:, None] * D + part[None, :], mask=is_own, other=0.0)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_C):
        place = start + tl.arange(0, BLOCK_C)
        is_seen = place < end
        page = tl.load(pages + place // L, mask=is_seen, other=0).to(tl.int64)
        where = ((page * K + shared) * L + place % L) * D
        is_key = (part < D)[:, None] & is_seen[None, :]
        key = tl.load(keys + where[None, :] + part[:, None], mask=is_key, other=0.0)
        scores = tl.dot(query, key.to(dtype), input_precision="ieee") * SCALE
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_top[:, None])
        fading = tl.exp(top - new_top)
        total = total * fading + tl.sum(weights, axis=1)
        is_value = is_seen[:, None] & (part < D)[None, :]
        value = tl.load(values + where[:, None] + part[None, :], mask=is_value, other=0.0)
        sums = tl.dot(
            weights.to(dtype), value.to(dtype), sums * fading[:, None], input_precision="ieee"
        )
        top = new_top
    kept = own.to(tl.int64) * num_splits + split
    # No early return for a split past the position, whose loop is empty: torch, which reads from the
    # compiled kernel what it writes, would have to take it that it writes all it is given.
    is_kept = (head < G) & (first <= position)
    tl.store(tops + kept, top, mask=is_kept)
    tl.store(totals + kept, total, mask=is_kept)
    tl.store(mixed + kept[:, None] * D + part[None, :], sums, mask=is_own & is_kept[:, None])


@triton.jit
def _merge(
    tops, totals, mixed, positions, y, num_splits,
    N: tl.constexpr, D: tl.constexpr, SPLIT_LEN: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The splits of one token and query head that have places up to its position."""
    token = tl.program_id(0)
    own = (token * N + tl.program_id(1)).to(tl.int64)
    used = tl.load(positions + token) // SPLIT_LEN + 1
    part = tl.arange(0, BLOCK_D)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, used, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        kept = own * num_splits + split
        is_used = split < used
        tops_of = tl.load(tops + kept, mask=is_used, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(tops_of, axis=0))
        fading = tl.exp(top - new_top)
        weights = tl.exp(tops_of - new_top)
        totals_of = tl.load(totals + kept, mask=is_used, other=0.0)
        total = total * fading + tl.sum(weights * totals_of, axis=0)
        is_there = is_used[:, None] & (part < D)[None, :]
        values = tl.load(mixed + kept[:, None] * D + part[None, :], mask=is_there, other=0.0)
        sums = sums * fading + tl.sum(weights[:, None] * values, axis=0)
        top = new_top
    tl.store(y + own * D + part, sums / total, mask=part < D)


@triton_op("llama_export::cuda_attend_cached", mutates_args=())
def cuda_attend_cached(
    q_PND: Tensor,
    keys_CKLD: Tensor,
    values_CKLD: Tensor,
    table_RQ: Tensor,
    rows_P: Tensor,
    positions_P: Tensor,
    split_len: int,
) -> Tensor:
    """As `llama_export::attend_cached`, in splits of `split_len` places; float32 [P, N, D].

    Where q and the keys are both bf16 (or f16), weights are rounded to it before they multiply values.
    """
    (P, N, D), (_, K, L, _) = q_PND.shape, keys_CKLD.shape
    Q = table_RQ.shape[1]
    S = (Q * L + split_len - 1) // split_len
    q = (q_PND if q_PND.dtype == keys_CKLD.dtype else q_PND.float()).contiguous()
    tops, totals = (q.new_empty((P, N, S), dtype=torch.float32) for _ in range(2))
    mixed = q.new_empty((P, N, S, D), dtype=torch.float32)
    y = q.new_empty((P, N, D), dtype=torch.float32)
    block_d = max(_LEAST, triton.next_power_of_2(D))
    block_c = _TILE_BYTES // (block_d * q.element_size())
    wrap_triton(_attend)[(P, K, S)](
        q,
        keys_CKLD.contiguous(),
        values_CKLD.contiguous(),
        table_RQ.contiguous(),
        rows_P.contiguous(),
        positions_P.contiguous(),
        tops,
        totals,
        mixed,
        S,
        Q,
        SCALE=D**-0.5,
        K=K,
        G=N // K,
        D=D,
        L=L,
        SPLIT_LEN=split_len,
        BLOCK_G=max(_LEAST, triton.next_power_of_2(N // K)),
        BLOCK_D=block_d,
        BLOCK_C=min(64, max(_LEAST, block_c)),
    )
    wrap_triton(_merge)[(P, N)](
        tops,
        totals,
        mixed,
        positions_P.contiguous(),
        y,
        S,
        N=N,
        D=D,
        SPLIT_LEN=split_len,
        BLOCK_S=_MERGED,
        BLOCK_D=block_d,
    )
    return y
