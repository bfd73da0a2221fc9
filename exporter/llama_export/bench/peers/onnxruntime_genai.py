"""onnxruntime-genai, over a model of its own builder.

Integer codes that its operators can hold are the bundle's own, with activations rounded to eight bits as
its builder has it; the embedding, and all of other bundles, is in float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import CompatibilityError
from llama_export.bench.methods import Setup
from llama_export.bench.peers.library import installed, stored_type
from llama_export.bench.peers.matmul_nbits import has_codes, replace_codes
from llama_runtime.places import find_weights
from llama_runtime.weights import bundle_weights

LIBRARY = EXTRA = "onnxruntime-genai"
CONFIG_NAME, MODEL_NAME = "genai_config.json", "model.onnx"
FLOATS = ("-p", "fp32")
CODES = ("-p", "int4", "--extra_options", "accuracy_level=4", "shared_embeddings=false")
"""Words of the builder; the embedding apart, since a shared one has no codes of eight bits."""


def prepare(setup: Setup) -> None:
    """Runs the builder.

    Raises:
        CompatibilityError: the library or `transformers` is not installed, the bundle has no
            weights, or the builder fails.
    """
    installed(LIBRARY, extra=EXTRA)
    from llama_export.bench.peers.hf_folder import write_folder

    source, folder = setup.scratch / f"{LIBRARY}-source", _folder(setup)
    write_folder(setup, source)
    bundle = open_bundle(setup.folder)
    words = ["-i", source, "-o", folder, "-e", "cpu", "-c", setup.scratch / "cache"]
    _run_builder([*map(str, words), *(CODES if has_codes(bundle) else FLOATS)])
    if has_codes(bundle):
        places = find_weights(bundle, weights_dir=setup.weights_dir)
        replace_codes(folder / MODEL_NAME, bundle_weights(bundle.manifest, places))
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text())
    config["model"]["eos_token_id"] = []  # no token ends a text
    session = config["model"]["decoder"]["session_options"]
    session["intra_op_num_threads"] = setup.threads
    path.write_text(json.dumps(config))


def _run_builder(words: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "onnxruntime_genai.models.builder", *words],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CompatibilityError(
            f"its builder fails: {last:.300}",
            where=LIBRARY,
            hint="leave this engine out, or try another version of it",
        )


def open(setup: Setup) -> Method:
    """The model, ready for texts of `setup.positions`."""
    return Method(setup)


class Method:
    """One model, and a generator for every text."""

    def __init__(self, setup: Setup) -> None:
        import onnxruntime_genai

        self._lib = onnxruntime_genai
        self._positions = setup.positions
        self._model = onnxruntime_genai.Model(str(_folder(setup)))
        found = installed(LIBRARY, extra=EXTRA)
        bundle = open_bundle(setup.folder)
        self.label = f"{LIBRARY} {found}, {stored_type(bundle) if has_codes(bundle) else 'f32'}"
        self.versions = {LIBRARY: found}
        self.files = [p for p in _folder(setup).iterdir() if p.name.startswith(MODEL_NAME)]

    def generate(self, prompt: Sequence[int], num_new: int) -> Iterator[int]:
        """Greedy tokens."""
        generator = self._start(prompt)
        for _ in range(num_new):
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [V], float32, after the last of the tokens."""
        return torch.from_numpy(self._start(tokens).get_logits()).float().reshape(-1)

    def _start(self, tokens: Sequence[int]) -> Any:
        """A generator that has read the tokens."""
        options = self._lib.GeneratorParams(self._model)
        options.set_search_options(max_length=self._positions, do_sample=False)
        generator = self._lib.Generator(self._model, options)
        generator.append_tokens(np.array([tokens], np.int32))
        return generator


def _folder(setup: Setup) -> Path:
    return setup.scratch / LIBRARY
