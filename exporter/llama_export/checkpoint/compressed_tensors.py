"""The two schemes of compressed-tensors that are read: FP8, and integers packed into int32.

FP8 weights are E4M3 codes with a scale for each output row or for the whole tensor. What that
scheme says of activations (rounded to FP8 a token at a time, or not at all) is a way to compute,
not a part of the stored model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from llama_export.checkpoint.fields import Fields
from llama_export.checkpoint.refusals import quoted
from llama_export.checkpoint.schemes import (
    Form,
    Fp8Scheme,
    PackedScheme,
    check,
    names,
    refused,
    unsupported,
)

METHOD = "compressed-tensors"
FLOATS = "float-quantized"
INTEGERS: Form = "pack-quantized"

# What each object of a scheme must say: the values that are taken, the first where none is given.
_ALWAYS: dict[str, tuple[Any, ...]] = {
    "kv_cache_scheme": (None,),
    "transform_config": (None, {}),
}
_FP8: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("int", "float"),  # integers where nothing is said, which is then refused
    "symmetric": (True,),
    "group_size": (None,),
    "block_structure": (None,),
}
_WEIGHTS = {**_FP8, "strategy": ("tensor", "channel"), "dynamic": (False,)}
_ACTIVATIONS = {**_FP8, "strategy": ("tensor", "token"), "dynamic": (False, True)}
_PACKED: dict[str, tuple[Any, ...]] = {
    "num_bits": (8, 4),
    "type": ("int",),
    "symmetric": (True, False),
    "strategy": ("tensor", "channel", "group"),
    "block_structure": (None,),
    "dynamic": (False,),
    "actorder": (None, False, True, "group", "dynamic", "weight", "static"),
}
_ORDERED = (True, "group", "dynamic")
"""Values of `actorder` with which columns of a group need not be adjacent."""


def read_compressed_tensors(scheme: Fields) -> Fp8Scheme | PackedScheme:
    """The scheme of a `quantization_config` of that method.

    Raises:
        CheckpointError: names the key whose value is another scheme's.
    """
    format = scheme.text("format") or "unnamed"
    if format not in (FLOATS, INTEGERS):
        raise unsupported(scheme, "format", f"{METHOD} format {quoted(format)}")
    check(scheme, _ALWAYS)
    sparsity = scheme.nested("sparsity_config")
    if sparsity is not None:
        check(sparsity, {"format": (None, "dense")})
    targets, ignore = list[str](), names(scheme, "ignore")
    found: list[PackedScheme] = []
    for group in _groups(scheme):
        check(group, {"format": (None, format), "output_activations": (None,)})
        weights = group.nested("weights")
        if weights is None:
            raise group.fail("weights", "an object")
        if format == FLOATS:
            _check_floats(group, weights)
        else:
            check(group, {"input_activations": (None,)})
            found.append(_packed(weights))
        targets += _targets(group)
    if format == FLOATS:
        return Fp8Scheme(tuple(targets), ignore)
    if len(set(found)) > 1:
        raise unsupported(scheme, "config_groups", "groups of weights that differ")
    return replace(found[0], targets=tuple(targets), ignore=ignore)


def _groups(scheme: Fields) -> Iterator[Fields]:
    groups = scheme.nested("config_groups")
    if groups is None or not groups.values:
        raise scheme.fail("config_groups", "an object of at least one group")
    for name in groups.values:
        group = groups.nested(name)
        if group is None:
            raise groups.fail(name, "an object")
        yield group


def _targets(group: Fields) -> tuple[str, ...]:
    targets = names(group, "targets")
    if not targets:
        raise group.fail("targets", "a list of at least one name")
    return targets


def _check_floats(group: Fields, weights: Fields) -> None:
    check(weights, _WEIGHTS)
    if weights.values.get("type") != "float":
        raise refused(weights, "type", weights.values.get("type", "int"))
    activations = group.nested("input_activations")
    if activations is None:
        return
    check(activations, _ACTIVATIONS)
    for key, value in (("type", "float"), ("dynamic", True), ("strategy", "token")):
        got = activations.values.get(key, _ACTIVATIONS[key][0])
        if got != value:
            raise refused(activations, key, got)


def _packed(weights: Fields) -> PackedScheme:
    check(weights, _PACKED)
    size, strategy = weights.values.get("group_size"), weights.text("strategy")
    if size == -1:
        size = None
    if strategy is None:  # as the library fills it in
        strategy = "tensor" if size is None else "group"
    if strategy == "tensor":
        raise refused(weights, "strategy", strategy)
    if (strategy == "group") != (size is not None):
        raise refused(weights, "group_size", size)
    return PackedScheme(
        (),
        (),
        INTEGERS,
        bits=weights.integer("num_bits") or 8,
        group_size=None if size is None else weights.integer("group_size"),
        is_symmetric=weights.boolean("symmetric") is not False,
        is_ordered=size is not None and weights.values.get("actorder") in _ORDERED,
    )
