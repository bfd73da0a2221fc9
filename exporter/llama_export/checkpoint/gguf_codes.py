"""GGUF's blocks of integers as the codes, scales and minima that a bundle holds, without rounding.

What the blocks mean is given by `ggml-quants.h` of llama.cpp: Q8_0 and Q4_0 are code * d, Q4_1 is
code * d + m. In Q4_K, 256 values share d and d_min, and 32 of them a scale and a minimum of six bits:
code * (d * scale) - (d_min * minimum). Both products are exact in float32.

Shape letters: V rows, N blocks of a row, G groups of 32 values of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from llama_export.checkpoint.gguf_header import GgufTensor
from llama_export.checkpoint.layout import BLOCK, FACTORS, MIN, Codes
from llama_export.checkpoint.source import TensorInfo

Array: TypeAlias = "np.ndarray[Any, Any]"

CODES = {
    "Q8_0": Codes("i8", BLOCK, "f16"),
    "Q4_0": Codes("u8", BLOCK, "f16"),
    "Q4_1": Codes("u8", BLOCK, "f16", has_min=True),
    "Q4_K": Codes("u8", BLOCK, "f32", has_min=True),
}
"""How tensors of a type are kept; those of other types have no such form."""
_HEADS = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4, "Q4_K": 16}
"""Bytes of a block before its codes."""
_BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q4_K": 144}


def kept(stored: Mapping[str, GgufTensor]) -> Iterator[tuple[str, TensorInfo]]:
    """Names, dtypes and shapes of what matrices are kept as, for those that are."""
    for name, tensor in stored.items():
        if len(tensor.shape) == 2 and tensor.type in CODES:
            yield from CODES[tensor.type].tensors(_module(name), tensor.shape).items()


def describe(stored: Mapping[str, GgufTensor]) -> str:
    """How many matrices of each type are kept, and how many are not."""
    matrices = [tensor.type for tensor in stored.values() if len(tensor.shape) == 2]
    text = f"kept as they are stored: {_counts([kind for kind in matrices if kind in CODES])}"
    others = [kind for kind in matrices if kind not in CODES]
    return f"{text}; decoded: {_counts(others)}" if others else text


def source_of(name: str) -> str:
    """The weight that a factor belongs to; of anything else the name itself."""
    ending = next((ending for ending in FACTORS if name.endswith(ending)), None)
    return name if ending is None else name.removesuffix(ending) + ".weight"


def take(rows: Array, kind: str, name: str) -> Array:
    """One part of a matrix, by the ending of its name.

    Args:
        rows: its blocks, bytes [V, N * bytes of a block].
        kind: its type, one of `CODES`.
        name: of the codes, scales or minima.

    Returns:
        Codes, int8 [V, 32 * G] or of four bits uint8 [V, 16 * G]; or factors [V, G].
    """
    blocks = rows.reshape(len(rows), -1, _BLOCK_BYTES[kind])
    head, body = blocks[..., : _HEADS[kind]], blocks[..., _HEADS[kind] :]
    if name.endswith(FACTORS):
        place = int(name.endswith(MIN))
        if kind == "Q4_K":
            return _factor_of_k(head, place)
        return np.ascontiguousarray(head[..., 2 * place : 2 * place + 2]).view(np.float16)[..., 0]
    codes = _halves_together(body) if kind == "Q4_K" else body
    flat = np.ascontiguousarray(codes).reshape(len(rows), -1)
    return flat.view(np.int8) if kind == "Q8_0" else flat


def _halves_together(codes: Array) -> Array:
    """Bytes of Q4_K, 32 for the low and the high halves of two groups, as 16 for each group."""
    pairs = codes.reshape(*codes.shape[:-1], 4, 2, BLOCK // 2)
    first, last = pairs[..., :1, :], pairs[..., 1:, :]
    one, other = (first & 15) | (last << 4), (first >> 4) | (last & 0xF0)
    return np.concatenate((one, other), axis=-2)


def _factor_of_k(head: Array, place: int) -> Array:
    """Scales or negated minima of Q4_K, float32 [V, G].

    Of twelve bytes the first eight hold six bits of a scale or minimum each, of the first four groups;
    their upper two bits and the four of each half of the rest belong to the last four groups.
    """
    factor = np.ascontiguousarray(head[..., 2 * place : 2 * place + 2]).view(np.float16)
    first, rest = head[..., 4 + 4 * place : 8 + 4 * place], head[..., 12:16]
    last = (rest >> 4 if place else rest & 15) | (first >> 2 & 0x30)
    six_bits = np.concatenate((first & 63, last), axis=-1).astype(np.float32)
    products: Array = factor.astype(np.float32) * six_bits
    return (-products if place else products).reshape(len(head), -1)


def _counts(kinds: Collection[str]) -> str:
    counts = Counter(kind.lower() for kind in kinds)
    return ", ".join(f"{counts[kind]} of {kind}" for kind in sorted(counts)) or "none"


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")
