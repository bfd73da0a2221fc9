"""Random numbers from a key and a counter, in integer arithmetic that every format has.

Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). A
key is int64 [2] of two 32-bit words, most significant first: a seed below 2**64 is the key
(seed >> 32, seed & 0xFFFFFFFF). `split` and `bits` give what `jax.random.split` and
`jax.random.bits` give for the same key under JAX's default, partitionable layout.

Words are held in int64 and masked to 32 bits, since few runtimes have unsigned integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_NUM_GROUPS = 5  # of four rounds each
_MANTISSA_BITS = 23

Words = tuple[Tensor, Tensor]
"""Two words, each int64 of values below 2**32."""


def threefry2x32(key: Words, counter: Words) -> Words:
    """The block function; key and counter broadcast against each other."""
    first, second = key
    schedule = (first, second, first ^ second ^ _PARITY)
    x, y = (counter[0] + first) & MASK, (counter[1] + second) & MASK
    for group in range(_NUM_GROUPS):
        for distance in _ROTATIONS[group % 2]:
            x = (x + y) & MASK
            y = _rotated(y, distance) ^ x
        x = (x + schedule[(group + 1) % 3]) & MASK
        y = (y + schedule[(group + 2) % 3] + (group + 1)) & MASK
    return x, y


def split(key: Words, index: Tensor) -> Words:
    """Key number `index` (int64, any shape) of those that `key` is split into."""
    return threefry2x32(key, (torch.zeros_like(index), index))


def bits(key: Words, shape: tuple[Any, Any]) -> Tensor:
    """32 random bits per element of [rows, columns], int64; fewer than 2**32 elements."""
    num_rows, num_columns = shape
    device = key[0].device
    rows = torch.arange(num_rows, dtype=torch.int64, device=device)[:, None] * num_columns
    counter = rows + torch.arange(num_columns, dtype=torch.int64, device=device)
    high, low = threefry2x32(key, (torch.zeros_like(counter), counter))
    return high ^ low


def gumbel(random_bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float32: -log(-log u), u in [smallest normal, 1) on a grid of 2**-23.

    The argmax of logits + noise is a draw from their softmax (Gumbel 1954).
    """
    uniform = (random_bits >> (32 - _MANTISSA_BITS)).float() * 2.0**-_MANTISSA_BITS
    uniform = uniform.clamp(min=torch.finfo(torch.float32).tiny)
    return -(-uniform.log()).log()


def _rotated(word: Tensor, distance: int) -> Tensor:
    return ((word << distance) & MASK) | (word >> (32 - distance))
