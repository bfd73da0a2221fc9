"""CTranslate2, over the bundle's weights as its own converter stores them.

The weights stay in the bundle's dtype on the disk; the engine computes in float32, the only kind of
unquantised arithmetic that it has on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from llama_artifacts.bundle import open_bundle
from llama_artifacts.dtypes import from_name
from llama_export.bench.methods import Setup
from llama_export.bench.peers.library import installed

LIBRARY = EXTRA = "ctranslate2"


def prepare(setup: Setup) -> None:
    """Converts the weights, with numbers for a vocabulary.

    Raises:
        CompatibilityError: the library or `transformers` is not installed, or the bundle has no
            weights.
    """
    installed(LIBRARY, extra=EXTRA)
    from ctranslate2.converters.transformers import LlamaLoader

    from llama_export.bench.peers.hf_folder import load_bundle

    manifest = open_bundle(setup.folder).manifest
    spec = LlamaLoader().get_model_spec(load_bundle(setup))
    spec.register_vocabulary(_words(range(manifest.model.vocab_size)))
    config = spec.config
    config.bos_token = config.eos_token = config.unk_token = "0"
    config.layer_norm_epsilon = manifest.model.rms_norm_eps
    spec.validate()
    spec.optimize(quantization=from_name(manifest.dtype).torch)
    folder = _folder(setup)
    folder.mkdir()
    spec.save(str(folder))


def open(setup: Setup) -> Method:
    """The model in float32."""
    return Method(setup)


class Method:
    """One generator."""

    def __init__(self, setup: Setup) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(
            str(_folder(setup)),
            device="cpu",
            compute_type="float32",
            inter_threads=1,
            intra_threads=setup.threads,
        )
        found = installed(LIBRARY, extra=EXTRA)
        self.label = f"{LIBRARY} {found}, f32"
        self.versions = {LIBRARY: found}
        self.files = sorted(_folder(setup).iterdir())

    def generate(self, prompt: Sequence[int], num_new: int) -> Iterator[int]:
        """Greedy tokens; no token ends a text."""
        steps = self._generator.generate_tokens(
            _words(prompt), max_length=num_new, sampling_topk=1, end_token=[]
        )
        for step in steps:
            yield step.token_id

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [V], float32, after the last of the tokens."""
        logits = np.array(self._generator.forward_batch([_words(tokens)]))
        return torch.from_numpy(logits[0, -1]).float()


def _words(tokens: Sequence[int]) -> list[str]:
    return [str(token) for token in tokens]


def _folder(setup: Setup) -> Path:
    return setup.scratch / LIBRARY
