"""The schemes of GPTQ and AWQ checkpoints, whose codes of four (or eight) bits lie in int32.

Keys as GPTQModel, AutoGPTQ, AutoAWQ and transformers write them. How the weights were found
(`damp_percent`, `true_sequential`, the data) is of no matter to what they are.
"""

from __future__ import annotations

import re
from typing import Any

from llama_export.checkpoint.fields import Fields
from llama_export.checkpoint.refusals import quoted
from llama_export.checkpoint.schemes import LINEAR, PATTERN, PackedScheme, check, names, unsupported

_HEAD = "lm_head"

# The values that are taken, the first where none is given.
_GPTQ: dict[str, tuple[Any, ...]] = {
    "bits": (4, 8),
    "adapter": (None, {}),
    "block_name_to_quantize": (None, "model.layers"),
    "dynamic": (None, {}),
    "is_marlin_format": (False,),
    "pack_dtype": ("int32",),
    "rotation": (None,),
}
_AWQ: dict[str, tuple[Any, ...]] = {"bits": (4,), "w_bit": (4,)}
_AWQ_LLM = "llm-awq"
"""A `backend` that packs int16."""
_DEFAULT_GROUP_SIZE = 128


def read_gptq(scheme: Fields) -> PackedScheme:
    """The scheme of a `quantization_config` of GPTQ.

    Raises:
        CheckpointError: names the key whose value is not supported, or malformed.
    """
    check(scheme, _GPTQ)
    formats = {scheme.text(key) for key in ("checkpoint_format", "format")} - {None} or {"gptq"}
    format = formats.pop() or ""
    if format not in ("gptq", "gptq_v2") or formats:
        raise unsupported(scheme, "checkpoint_format", f"gptq format {quoted(format)}")
    meta = scheme.nested("meta")
    is_static = any(found and found.boolean("static_groups") for found in (scheme, meta))
    quantizer = None if meta is None else meta.values.get("quantizer")
    group_size = _group_size(scheme, "group_size", default=None)
    return PackedScheme(
        _block_modules(scheme) + ((_HEAD,) if scheme.boolean(_HEAD) else ()),
        () if scheme.boolean(_HEAD) else (_HEAD,),
        "gptq",
        bits=scheme.required_integer("bits"),
        group_size=group_size,
        is_symmetric=scheme.boolean("sym") is not False,
        is_ordered=bool(scheme.boolean("desc_act")) and group_size is not None and not is_static,
        zero_offset=int(format == "gptq"),
        has_borrows=_is_of_gptqmodel(quantizer),
    )


def read_awq(scheme: Fields) -> PackedScheme:
    """The scheme of a `quantization_config` of AWQ.

    Raises:
        CheckpointError: names the key whose value is not supported, or malformed.
    """
    check(scheme, _AWQ)
    for key in ("version", "format"):
        version = scheme.text(key) or "gemm"
        if version.lower() != "gemm":
            raise unsupported(scheme, key, f"awq version {quoted(version)}")
    if scheme.values.get("backend") == _AWQ_LLM:
        raise unsupported(scheme, "backend", f"awq backend '{_AWQ_LLM}'")
    key = "q_group_size" if scheme.values.get("q_group_size") is not None else "group_size"
    kept = names(scheme, "modules_to_not_convert")  # parts of modules' names
    return PackedScheme(
        (LINEAR,),
        (_HEAD, *(f"{PATTERN}.*{re.escape(part)}" for part in kept)),
        "awq",
        bits=4,
        group_size=_group_size(scheme, key, default=_DEFAULT_GROUP_SIZE),
        is_symmetric=scheme.boolean("zero_point") is False,
    )


def _group_size(scheme: Fields, key: str, *, default: int | None) -> int | None:
    value = scheme.values.get(key)
    if value == -1:
        return None
    if value is None and default is not None:
        return default
    return scheme.required_integer(key, hint="-1 stands for whole rows")


def _block_modules(scheme: Fields) -> tuple[str, ...]:
    """Targets: every layer, or those that a list names within a block, perhaps in lists."""
    key = "modules_in_block_to_quantize"
    listed = scheme.values.get(key)
    if listed is None:
        return (LINEAR,)
    flat: list[Any] = []
    for entry in listed if isinstance(listed, list) else [None]:
        flat += entry if isinstance(entry, list) else [entry]
    if not flat or not all(isinstance(name, str) for name in flat):
        raise scheme.fail(key, "a list of names, or of lists of names")
    block = re.escape("model.layers.") + r"\d+\."
    return tuple(f"{PATTERN}{block}{re.escape(name)}$" for name in flat)


def _is_of_gptqmodel(quantizer: object) -> bool:
    parts = quantizer if isinstance(quantizer, list) else [quantizer]
    return any(isinstance(part, str) and part.startswith("gptqmodel") for part in parts)
