"""The device on which programs run, by its name."""

from __future__ import annotations

import torch

from llama_artifacts.errors import CompatibilityError, InputError
from llama_runtime.shards import Group


def find_device(name: str, group: Group | None = None) -> torch.device:
    """The device of that name.

    Args:
        name: `cpu`, `cuda` or `cuda:N`.
        group: of this process; `cuda` is then the device that it took when it joined.

    Raises:
        InputError: another name.
        CompatibilityError: there is no such device here.
    """
    if name == "cuda" and group is not None:
        name = f"cuda:{torch.cuda.current_device()}"
    try:
        device = torch.device(str(name))
    except RuntimeError as cause:
        raise _unknown(name) from cause
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise CompatibilityError(
                "no CUDA device is here",
                hint="load with device cpu, or install a CUDA build of torch",
            )
        index, count = device.index or 0, torch.cuda.device_count()
        if index >= count:
            raise CompatibilityError(f"no device `{name}`: this machine has {count} CUDA device(s)")
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise _unknown(name)
    return torch.device("cpu")


def _unknown(name: str) -> InputError:
    message = f"expected cpu, cuda or cuda:N, got `{name}`"
    return InputError(message, where="device", hint="where none is named, programs run on the CPU")
