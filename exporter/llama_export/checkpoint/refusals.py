"""What a config.json asks for that this model does not compute, refused by the key's name."""

from __future__ import annotations

from typing import Any

from llama_artifacts.errors import CheckpointError
from llama_artifacts.strict_json import printable, shown
from llama_export.checkpoint import hf_keys
from llama_export.checkpoint.fields import Fields


def refuse_other_maths(fields: Fields, notes: list[str]) -> None:
    """Refuses keys that change the maths, unless their value is the neutral one.

    A key that nobody knows is noted and ignored.
    """
    for key, value in fields.values.items():
        if value is None or key in hf_keys.READ or key in hf_keys.HARMLESS or key[:1] == "_":
            continue
        if key in hf_keys.MATHS:
            if not is_neutral(value, hf_keys.MATHS[key]):
                raise changes_maths(fields, key)
        elif key in hf_keys.PER_LAYER:
            _check_per_layer(fields, key)
        else:
            notes.append(f"ignored unknown config key {shown(key)}")
    fields.integer("pretraining_tp")  # a split of the same sums; any count of them is neutral


def _check_per_layer(fields: Fields, key: str) -> None:
    value, neutral = fields.values[key], hf_keys.PER_LAYER[key]
    if not isinstance(value, list):
        raise fields.fail(key, "a list with one entry per layer")
    if not all(is_neutral(entry, (neutral,)) for entry in value):
        raise changes_maths(fields, key)


def refuse_other_architecture(fields: Fields) -> None:
    """Refuses anything but a Llama with an output head."""
    names = fields.values.get("architectures")
    if names is not None and not (
        isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    ):
        raise fields.fail("architectures", "a list of names")
    if names is not None and names[0] not in hf_keys.ARCHITECTURES:
        raise _other(fields, "architectures", f"architecture {quoted(names[0])}")
    model_type = fields.text("model_type")
    if names is None and model_type is None:
        raise _other(fields, "architectures", "a config without architectures and model_type")
    known = hf_keys.MODEL_TYPES if names is not None else hf_keys.MODEL_TYPES[:1]
    if model_type is not None and model_type not in known:
        raise _other(fields, "model_type", f"model_type {quoted(model_type)}")


def _other(fields: Fields, key: str, what: str) -> CheckpointError:
    supported = ", ".join(hf_keys.ARCHITECTURES)
    message = f"{what} is not supported (supported: {supported})"
    return CheckpointError(
        message, where=fields.place(key), hint="choose a Llama-family checkpoint"
    )


def changes_maths(fields: Fields, key: str) -> CheckpointError:
    """The error for a key whose value the model cannot honour."""
    value = printable(fields.values[key])
    message = f"config key '{fields.prefix}{key}' = {value} changes the maths and is not supported"
    hint = "only checkpoints that compute exactly what Llama computes can be exported"
    return CheckpointError(message, where=fields.place(key), hint=hint)


def is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    """Equality in which true is not 1."""
    return value is None or any(
        value == entry and isinstance(value, bool) == isinstance(entry, bool) for entry in neutral
    )


def quoted(text: str) -> str:
    """A name in single quotes, printable and short."""
    return f"'{printable(text)}'"
