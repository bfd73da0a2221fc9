"""The one quantised scheme that is read, FP8 as compressed-tensors writes it; the others refused.

Weights are E4M3 codes with a scale for each output row or for the whole tensor. What the scheme
says of activations (rounded to FP8 a token at a time, or not at all) is a way to compute, not a part
of the stored model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llama_artifacts.errors import CheckpointError
from llama_artifacts.strict_json import printable, shown
from llama_export.checkpoint.fields import Fields
from llama_export.checkpoint.refusals import is_neutral, quoted

METHOD, FORMAT = "compressed-tensors", "float-quantized"
SUPPORTED = f"{METHOD} {FORMAT} (FP8 dynamic)"
LINEAR = "Linear"
"""The target that stands for every linear layer."""

_PATTERN = "re:"
_HINT = "use the unquantised or FP8-dynamic checkpoint of the same model, or a GGUF file"

# What each object of the scheme must say: the values that are taken, the first where none is given.
_ALWAYS: dict[str, tuple[Any, ...]] = {
    "kv_cache_scheme": (None,),
    "transform_config": (None, {}),
}
_GROUP: dict[str, tuple[Any, ...]] = {"format": (None, FORMAT), "output_activations": (None,)}
_FP8: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("int", "float"),  # integers where nothing is said, which `_check` then refuses
    "symmetric": (True,),
    "group_size": (None,),
    "block_structure": (None,),
}
_WEIGHTS = {**_FP8, "strategy": ("tensor", "channel"), "dynamic": (False,)}
_ACTIVATIONS = {**_FP8, "strategy": ("tensor", "token"), "dynamic": (False, True)}


@dataclass(frozen=True)
class Fp8Scheme:
    """Which linear layers a checkpoint stores as FP8.

    Attributes:
        targets: `Linear` for all of them, names of modules, or `re:` and a pattern that a name
            begins with.
        ignore: the same; what it names is not FP8 although it is a target.
    """

    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    def covers(self, module: str) -> bool:
        """Whether the linear layer of that name is FP8."""
        return _is_named(module, self.targets) and not _is_named(module, self.ignore)


def read_scheme(fields: Fields) -> Fp8Scheme | None:
    """The scheme of a config.json; None where it is not quantised.

    Raises:
        CheckpointError: any other scheme than FP8 with dynamic activations, by its name.
    """
    if fields.values.get("quantization") is not None:
        message = "config key 'quantization' (MLX) is not supported"
        raise CheckpointError(message, where=fields.place("quantization"), hint=_HINT)
    found = [_scheme(nested) for nested in _schemes(fields)]
    if len(set(found)) > 1:
        message = "quantization_config and compression_config differ; expected one of them"
        raise CheckpointError(message, where=fields.place("compression_config"))
    return found[0] if found else None


def _schemes(fields: Fields) -> Iterator[Fields]:
    for key in ("quantization_config", "compression_config"):
        nested = fields.nested(key)
        if nested is not None:
            yield nested


def _scheme(scheme: Fields) -> Fp8Scheme:
    method = scheme.text("quant_method") or "unnamed"
    if method != METHOD:
        raise _unsupported(scheme, "quant_method", f"quant_method {quoted(method)}")
    format = scheme.text("format") or "unnamed"
    if format != FORMAT:
        raise _unsupported(scheme, "format", f"{METHOD} format {quoted(format)}")
    _check(scheme, _ALWAYS)
    sparsity = scheme.nested("sparsity_config")
    if sparsity is not None:
        _check(sparsity, {"format": (None, "dense")})
    groups = scheme.nested("config_groups")
    if groups is None or not groups.values:
        raise scheme.fail("config_groups", "an object of at least one group")
    targets: list[str] = []
    for name in groups.values:
        group = groups.nested(name)
        if group is None:
            raise groups.fail(name, "an object")
        targets += _group_targets(group)
    return Fp8Scheme(tuple(targets), _patterns(scheme, "ignore"))


def _group_targets(group: Fields) -> tuple[str, ...]:
    _check(group, _GROUP)
    weights, activations = group.nested("weights"), group.nested("input_activations")
    if weights is None:
        raise group.fail("weights", "an object")
    _check(weights, _WEIGHTS)
    if weights.values.get("type") != "float":
        raise _refused(weights, "type", weights.values.get("type", "int"))
    if activations is not None:
        _check_activations(activations)
    targets = _patterns(group, "targets")
    if not targets:
        raise group.fail("targets", "a list of at least one name")
    return targets


def _check_activations(activations: Fields) -> None:
    _check(activations, _ACTIVATIONS)
    for key, value in (("type", "float"), ("dynamic", True), ("strategy", "token")):
        got = activations.values.get(key, _ACTIVATIONS[key][0])
        if got != value:
            raise _refused(activations, key, got)


def _check(fields: Fields, taken: dict[str, tuple[Any, ...]]) -> None:
    for key, values in taken.items():
        value = fields.values.get(key, values[0])
        if value is None and None not in values:
            value = values[0]
        if value is not None and not is_neutral(value, values):
            raise _refused(fields, key, value)


def _patterns(fields: Fields, key: str) -> tuple[str, ...]:
    value = fields.values.get(key)
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.fail(key, "a list of names")
    for name in names:
        if name.startswith(_PATTERN):
            try:
                re.compile(name.removeprefix(_PATTERN))
            except re.error as cause:
                message = f"{shown(name)} is no regular expression: {cause}"
                raise CheckpointError(message, where=fields.place(key)) from cause
    return tuple(names)


def _is_named(module: str, names: tuple[str, ...]) -> bool:
    for name in names:
        if name in (LINEAR, module):
            return True
        if name.startswith(_PATTERN) and re.match(name.removeprefix(_PATTERN), module):
            return True
    return False


def _refused(fields: Fields, key: str, value: object) -> CheckpointError:
    return _unsupported(fields, key, f"config key '{fields.prefix}{key}' = {printable(value)}")


def _unsupported(fields: Fields, key: str, what: str) -> CheckpointError:
    message = f"{what} is not supported; supported: {SUPPORTED}"
    return CheckpointError(message, where=fields.place(key), hint=_HINT)
