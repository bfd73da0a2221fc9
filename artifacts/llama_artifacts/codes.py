"""Integers that a bundle keeps as its checkpoint held them, by the headers of its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from llama_artifacts.bundle import Bundle
from llama_artifacts.weights import stored_tensors

SCALE, MIN = ".weight_scale", ".weight_min"
_KINDS = {"i8": ("int8", 1), "u8": ("int4", 2)}
"""By the dtype of codes: what they are called, and how many there are in a byte."""


def kept_codes(bundle: Bundle) -> dict[str, int]:
    """How many matrices are stored in which way, the most common first.

    Empty where the build made the integers itself (`Manifest.quantized`), or the weights are
    elsewhere.

    Raises:
        IntegrityError: a file of weights breaks the format.
    """
    manifest = bundle.manifest
    bound = {
        name
        for program in manifest.programs
        if program.numerics is None  # not FP8
        for name in program.constants
    }
    if manifest.quantized is not None or not any(name.endswith(SCALE) for name in bound):
        return {}
    stored = {name: tensor for name, (_, tensor) in stored_tensors(bundle).items()}
    counts: Counter[str] = Counter()
    for name, scale in stored.items():
        module = name.removesuffix(SCALE)
        weight = stored.get(f"{module}.weight")
        if module == name or weight is None or weight.dtype not in _KINDS:
            continue
        kind, per_byte = _KINDS[weight.dtype]
        size = weight.shape[1] * per_byte // scale.shape[1]
        minima = " and minima" if f"{module}{MIN}" in stored else ""
        counts[f"{kind} in groups of {size} with {scale.dtype} scales{minima}"] += 1
    return dict(counts.most_common())


def show_codes(codes: Mapping[str, int]) -> str:
    """The same as a line."""
    return "; ".join(f"{count} x {kind}" for kind, count in codes.items())
