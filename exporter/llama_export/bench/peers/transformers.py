"""`transformers`, eager or compiled, over the bundle's own weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from llama_artifacts.bundle import open_bundle
from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import CompatibilityError
from llama_export.bench.methods import Setup
from llama_export.reference import CONFIG_NAME, load_model, new_cache
from llama_runtime.machine import version
from llama_runtime.places import find_weights

LIBRARY = "transformers"


def prepare(setup: Setup) -> None:
    """Checks that the library is there.

    Raises:
        CompatibilityError: it is not.
    """
    if version(LIBRARY) is None:
        raise CompatibilityError(
            f"expected the module `{LIBRARY}`, which is not installed",
            hint=f"pip install {LIBRARY}",
        )


def open(setup: Setup) -> Method:
    """The model in the bundle's dtype."""
    return Method(setup, is_compiled=setup.method.endswith("-compiled"))


class Method:
    """One text at a time; compiled, its states have room for `setup.positions` from the start."""

    def __init__(self, setup: Setup, *, is_compiled: bool) -> None:
        torch.set_num_threads(setup.threads)
        bundle = open_bundle(setup.folder)
        dtype = getattr(torch, from_name(bundle.manifest.dtype).torch)
        self._model, _ = load_model(
            setup.folder, dtype=dtype, attention="sdpa", weights_dir=setup.weights_dir
        )
        self._positions = setup.positions
        self._forward: Any = self._model.forward
        if is_compiled:
            self._forward = torch.compile(self._model.forward, dynamic=False)
        self._is_compiled = is_compiled
        found = version(LIBRARY) or ""
        self.label = f"{setup.method} {found}"
        self.versions = {LIBRARY: found, "torch": torch.__version__}
        places = find_weights(bundle, weights_dir=setup.weights_dir)
        self.files = [*places.values(), bundle.path(CONFIG_NAME)]

    def generate(self, prompt: Sequence[int], num_new: int) -> Iterator[int]:
        """Greedy tokens."""
        cache = new_cache(self._model, self._positions if self._is_compiled else None)
        tokens, position = torch.tensor([prompt]), 0
        for _ in range(num_new):
            logits = self._step(tokens, position, cache)
            position += tokens.shape[1]
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            yield int(tokens)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [V], float32, after the last of the tokens, by a plain call."""
        with torch.no_grad():
            output = self._model(torch.tensor([tokens]), use_cache=False, logits_to_keep=1)
        return output.logits[0, -1].float()

    def _step(self, tokens: torch.Tensor, position: int, cache: dict[str, Any]) -> torch.Tensor:
        positions = torch.arange(position, position + tokens.shape[1])
        with torch.no_grad():
            output = self._forward(
                tokens, position_ids=positions[None], use_cache=True, logits_to_keep=1, **cache
            )
        return output.logits
