"""The draws of `sample`, written once more in another way, to hold the programs against.

The generator is Threefry-2x32 with 20 rounds (Salmon et al. 2011) on unsigned 32-bit words. Step i
draws with the key threefry(key, (0, i)); token v of row b with the two words of
threefry(step's key, (0, b * V + v)), one xor the other.
"""

from __future__ import annotations

import numpy as np
import torch

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


def threefry(key: tuple[int, int], counter: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two words for each counter (0, counter); uint32."""
    words = [np.uint32(key[0]), np.uint32(key[1])]
    words.append(words[0] ^ words[1] ^ _PARITY)
    with np.errstate(over="ignore"):
        x = np.zeros_like(counter) + words[0]
        y = counter + words[1]
        for number in range(20):
            turn = np.uint32(_ROTATIONS[number % 8])
            x = x + y
            y = ((y << turn) | (y >> (np.uint32(32) - turn))) ^ x
            if number % 4 == 3:
                group = number // 4 + 1
                x = x + words[group % 3]
                y = y + words[(group + 1) % 3] + np.uint32(group)
    return x, y


def noise(key: tuple[int, int], step: int, num_rows: int, vocab_size: int) -> torch.Tensor:
    """The Gumbel noise of one step, float32 [rows, V]."""
    first, second = threefry(key, np.array([step], dtype=np.uint32))
    counter = np.arange(num_rows * vocab_size, dtype=np.uint32)
    high, low = threefry((int(first[0]), int(second[0])), counter)
    uniform = ((high ^ low) >> np.uint32(9)).astype(np.float64) / 2**23
    uniform = np.maximum(uniform, np.finfo(np.float32).tiny)
    gumbel = -np.log(-np.log(uniform))
    return torch.from_numpy(gumbel.astype(np.float32)).reshape(num_rows, vocab_size)
