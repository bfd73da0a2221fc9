"""onnxruntime-genai, over a model of its own builder, which computes in float32 on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llama_artifacts.errors import CompatibilityError
from llama_export.bench.methods import Setup
from llama_export.bench.peers.library import installed

LIBRARY = EXTRA = "onnxruntime-genai"
CONFIG_NAME = "genai_config.json"


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
    words = ["-i", source, "-o", folder, "-p", "fp32", "-e", "cpu", "-c", setup.scratch / "cache"]
    done = subprocess.run(
        [sys.executable, "-m", "onnxruntime_genai.models.builder", *map(str, words)],
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
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text())
    config["model"]["eos_token_id"] = []  # no token ends a text
    session = config["model"]["decoder"]["session_options"]
    session["intra_op_num_threads"] = setup.threads
    path.write_text(json.dumps(config))


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
        self.label = f"{LIBRARY} {found}, f32"
        self.versions = {LIBRARY: found}
        self.files = [p for p in _folder(setup).iterdir() if p.name.startswith("model.onnx")]

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
