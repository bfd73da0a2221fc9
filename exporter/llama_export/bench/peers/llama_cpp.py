"""llama.cpp through `llama-cpp-python`, over a GGUF file of the bundle's weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import CompatibilityError
from llama_export.bench.methods import Setup
from llama_export.bench.peers.library import installed, stored_type

LIBRARY, EXTRA = "llama-cpp-python", "llama-cpp"
FILE_NAME = "llama.cpp.gguf"
Logits = np.ndarray[Any, np.dtype[np.float32]]


def prepare(setup: Setup) -> None:
    """Writes the file.

    Raises:
        CompatibilityError: the library is not installed, or the bundle has no weights.
    """
    installed(LIBRARY, extra=EXTRA)
    from llama_export.bench.peers.gguf_file import write_gguf

    write_gguf(setup.folder, setup.scratch / FILE_NAME, weights_dir=setup.weights_dir)


def open(setup: Setup) -> Method:
    """The model in a context of `setup.positions`."""
    return Method(setup)


class Method:
    """One context, emptied for every text; calls go to the library's C interface.

    Raises:
        CompatibilityError: the library refuses the file.
    """

    def __init__(self, setup: Setup) -> None:
        import llama_cpp

        self._lib = llama_cpp
        bundle = open_bundle(setup.folder)
        manifest = bundle.manifest
        self._size = manifest.model.vocab_size
        path = setup.scratch / FILE_NAME
        self._model = llama_cpp.llama_model_load_from_file(
            bytes(path), llama_cpp.llama_model_default_params()
        )
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = setup.positions
        options.n_threads = options.n_threads_batch = setup.threads
        self._context = self._model and llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise CompatibilityError(
                f"{LIBRARY} refuses the file",
                where=path,
                hint="leave this engine out, or try another version of it",
            )
        found = installed(LIBRARY, extra=EXTRA)
        self.label = f"llama.cpp ({LIBRARY} {found}), {stored_type(bundle)}"
        self.versions = {LIBRARY: found}
        self.files = [path]

    def generate(self, prompt: Sequence[int], num_new: int) -> Iterator[int]:
        """Greedy tokens."""
        tokens = prompt
        for number in range(num_new):
            token = int(self._step(tokens, is_first=number == 0).argmax())
            tokens = [token]
            yield token

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [V], float32, after the last of the tokens."""
        return torch.from_numpy(self._step(tokens, is_first=True).copy())

    def _step(self, tokens: Sequence[int], *, is_first: bool) -> Logits:
        """Logits [V] after the tokens, in the context's own memory until the next call."""
        if is_first:
            self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        array = (self._lib.llama_token * len(tokens))(*tokens)
        status = self._lib.llama_decode(
            self._context, self._lib.llama_batch_get_one(array, len(tokens))
        )
        if status:
            raise CompatibilityError(f"{LIBRARY} answers a call with status {status}")
        found = self._lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(found, shape=(self._size,))
