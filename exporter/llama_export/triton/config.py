"""The configuration of one Triton model, as the text of its `config.pbtxt`.

The fields are those of the message `inference.ModelConfig` of Triton's `model_config.proto`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llama_artifacts.signature import Shape, TensorSpec
from llama_export.triton.plan import TYPES, Options, TritonModel, tensor_name

START, END, CORRELATION_ID = "START", "END", "CORRID"
_MICROSECONDS = 1_000_000


class Word(str):
    """The name of an enumerated value, which the text format does not quote."""

    __slots__ = ()


def config_text(model: TritonModel, options: Options) -> str:
    """The whole `config.pbtxt`: the same model gives the same text."""
    return "".join(f"{line}\n" for line in _lines(_config(model, options), ""))


def dims(shape: Shape) -> list[int]:
    """A declared shape as Triton's `dims`: -1 where a call chooses; a scalar is one element."""
    return [size if isinstance(size, int) else -1 for size in shape] or [1]


def _config(model: TritonModel, options: Options) -> dict[str, Any]:
    config: dict[str, Any] = {
        "name": model.name,
        "backend": model.backend,
        "max_batch_size": 0,  # rows are a dimension of their own, which Triton must not add
        "input": [
            _tensor(model, spec, tensor_name(model, program, spec.name), is_input=True)
            for program in model.programs
            for spec in program.signature.inputs
        ],
        "output": [
            _tensor(model, spec, tensor_name(model, program, spec.name), is_input=False)
            for program in model.programs
            for spec in program.signature.outputs
        ],
        "instance_group": [
            {"count": 1, "kind": Word("KIND_GPU" if model.device == "cuda" else "KIND_CPU")}
        ],
    }
    if model.states:
        config["sequence_batching"] = _sequences(options)
    if model.backend == "python":
        config["parameters"] = [
            {"key": key, "value": {"string_value": value}}
            for key, value in _parameters(model).items()
        ]
    return config


def _tensor(model: TritonModel, spec: TensorSpec, name: str, *, is_input: bool) -> dict[str, Any]:
    tensor: dict[str, Any] = {
        "name": name,
        "data_type": Word(TYPES[spec.dtype]),
        "dims": dims(spec.shape),
    }
    if model.backend == "onnxruntime" and not spec.shape:
        tensor["reshape"] = {"shape": []}  # the program's own scalar
    if is_input and model.states:
        tensor["optional"] = True  # a request brings those of one entry
    return tensor


def _sequences(options: Options) -> dict[str, Any]:
    flag = {"bool_false_true": [False, True]}
    return {
        "max_sequence_idle_microseconds": options.max_idle_s * _MICROSECONDS,
        "oldest": {"max_candidate_sequences": options.max_sequences},
        "control_input": [
            {"name": START, "control": [{"kind": Word("CONTROL_SEQUENCE_START"), **flag}]},
            {"name": END, "control": [{"kind": Word("CONTROL_SEQUENCE_END"), **flag}]},
            {
                "name": CORRELATION_ID,
                "control": [
                    {"kind": Word("CONTROL_SEQUENCE_CORRID"), "data_type": Word("TYPE_UINT64")}
                ],
            },
        ],
    }


def _parameters(model: TritonModel) -> dict[str, str]:
    chosen = {} if model.format is None else {"format": model.format}
    return {
        "entries": json.dumps([program.entry for program in model.programs]),
        "sizes": json.dumps(dict(model.sizes), sort_keys=True),
        **chosen,
    }


def _lines(message: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in message.items():
        items = value if isinstance(value, list) else [value]
        if items and not isinstance(items[0], dict):
            text = _scalar(value) if not isinstance(value, list) else _list(value)
            yield f"{indent}{name}: {text}"
            continue
        if not items:
            yield f"{indent}{name}: []"
        for item in items:
            yield f"{indent}{name} {{"
            yield from _lines(item, f"{indent}  ")
            yield f"{indent}}}"


def _list(values: list[Any]) -> str:
    return f"[{', '.join(map(_scalar, values))}]"


def _scalar(value: Any) -> str:
    if isinstance(value, Word):
        return value
    # Strings, numbers and truth values are written as in JSON.
    return json.dumps(value)
