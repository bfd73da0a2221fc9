"""The quantised schemes that are read; all others are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llama_artifacts.errors import CheckpointError
from llama_export.checkpoint.compressed_tensors import METHOD, read_compressed_tensors
from llama_export.checkpoint.fields import Fields
from llama_export.checkpoint.gptq import read_awq, read_gptq
from llama_export.checkpoint.refusals import quoted
from llama_export.checkpoint.schemes import Fp8Scheme, PackedScheme, unsupported

_READERS: dict[str, Callable[[Fields], Fp8Scheme | PackedScheme]] = {
    METHOD: read_compressed_tensors,
    "gptq": read_gptq,
    "awq": read_awq,
}


def read_scheme(fields: Fields) -> Fp8Scheme | PackedScheme | None:
    """The scheme of a config.json; None where it is not quantised.

    Raises:
        CheckpointError: any other scheme, by its name, or a scheme that changes what it means.
    """
    if fields.values.get("quantization") is not None:
        raise unsupported(fields, "quantization", "config key 'quantization' (MLX)")
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


def _scheme(scheme: Fields) -> Fp8Scheme | PackedScheme:
    method = scheme.text("quant_method") or "unnamed"
    if method not in _READERS:
        raise unsupported(scheme, "quant_method", f"quant_method {quoted(method)}")
    return _READERS[method](scheme)
