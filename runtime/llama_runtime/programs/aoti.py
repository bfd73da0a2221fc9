"""AOTInductor packages: native code, with the bundle's weights as user-managed constants."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# What torch._inductor.aoti_load_package wraps; importing the whole compiler takes a second.
from torch._C._aoti import AOTIModelPackageLoader

from llama_artifacts.errors import IntegrityError
from llama_runtime.programs.base import Loading


class AotiProgram:
    """See `Program`. Keeps the weights alive, since the native code holds bare pointers."""

    def __init__(self, loading: Loading) -> None:
        index = -1 if loading.device.index is None else loading.device.index
        self._weights = loading.constants()
        try:
            # The third says that no events of its own are recorded, which no graph may hold.
            loader = AOTIModelPackageLoader(
                str(loading.path), "model", loading.uses_graphs, 1, index
            )
        except RuntimeError as cause:
            raise IntegrityError(
                f"cannot be loaded: {str(cause).splitlines()[0]}",
                where=loading.path,
                hint="build the bundle again on this machine",
            ) from cause
        loading.check_constants(loader.get_constant_fqns())
        # The active buffer, every constant given, the memory ours, no copy to another device.
        loader.load_constants(self._weights, False, True, True, False)
        self._run = loader.boxed_run

    def run(
        self, inputs: list[torch.Tensor], states: list[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[torch.Tensor]:
        # Below autograd, where torch has kernels of collectives that are written in Python: tensors
        # that they see are let go of under Python's lock, which this call holds.
        with torch._C._AutoDispatchBelowAutograd():
            return list(self._run([*inputs, *states]))
