"""ExportedPrograms, run by torch's own operators."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass

from llama_artifacts.errors import IntegrityError
from llama_runtime.programs.base import Loading

_HINT = "build the bundle again"


class Pt2Program:
    """See `Program`."""

    def __init__(self, loading: Loading) -> None:
        _refuse_pickles(loading.path)
        program = torch.export.load(loading.path)
        if program.state_dict.keys() != set(loading.program.constants):
            odd = sorted(program.state_dict.keys() ^ set(loading.program.constants))[0]
            raise IntegrityError(
                f"its constants are not the manifest's: `{odd}`", where=loading.path
            )
        if loading.device.type != "cpu":
            program = move_to_device_pass(program, str(loading.device))
        for name, old in program.state_dict.items():
            tensor = loading.weights[name]
            if isinstance(old, torch.nn.Parameter):
                tensor = torch.nn.Parameter(tensor, requires_grad=False)
            program.state_dict[name] = tensor
        self._module = program.module(check_guards=False)

    def run(
        self, inputs: list[torch.Tensor], states: list[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[torch.Tensor]:
        arguments: list[Any] = list(inputs)
        if states:
            arguments.append(list(zip(states[::2], states[1::2], strict=True)))
        with torch.no_grad():
            output = self._module(*arguments)
        return list(output) if isinstance(output, (tuple, list)) else [output]


def _refuse_pickles(path: Path) -> None:
    """An archive can name pickled payloads, which would run code when loaded."""
    try:
        with zipfile.ZipFile(path) as archive:
            for item in archive.infolist():
                if item.filename.endswith("sample_inputs/model.pt") and item.file_size:
                    raise IntegrityError("holds pickled example inputs", where=path, hint=_HINT)
                if item.filename.endswith("_config.json"):
                    payloads = json.loads(archive.read(item))["config"].values()
                    if any(payload["use_pickle"] for payload in payloads):
                        raise IntegrityError("holds a pickled tensor", where=path, hint=_HINT)
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise IntegrityError("not an ExportedProgram archive", where=path, hint=_HINT) from cause
