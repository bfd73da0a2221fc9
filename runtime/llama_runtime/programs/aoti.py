"""AOTInductor packages: native code, with the bundle's weights as user-managed constants."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from llama_artifacts.errors import IntegrityError
from llama_runtime.programs.base import Loading

# The package loader unpacks and links; two at once have been seen to fail.
_LOADING = threading.Lock()


class AotiProgram:
    """See `Program`. Keeps the weights alive, since the native code holds bare pointers."""

    def __init__(self, loading: Loading) -> None:
        index = loading.device.index if loading.device.type == "cuda" else -1
        with _LOADING:
            try:
                model = aoti_load_package(
                    str(loading.path), device_index=-1 if index is None else index
                )
            except RuntimeError as cause:
                raise IntegrityError(
                    f"cannot be loaded: {str(cause).splitlines()[0]}",
                    where=loading.path,
                    hint="build the bundle again on this machine",
                ) from cause
        self._weights = {name: loading.weights[name] for name in loading.program.constants}
        names = set(model.get_constant_fqns())
        if names != self._weights.keys():
            odd = sorted(names ^ self._weights.keys())[0]
            raise IntegrityError(
                f"its constants are not the manifest's: `{odd}`", where=loading.path
            )
        model.load_constants(self._weights, check_full_update=True, user_managed=True)
        self._run = model.loader.boxed_run

    def run(
        self, inputs: list[torch.Tensor], states: list[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[torch.Tensor]:
        return list(self._run([*inputs, *states]))
