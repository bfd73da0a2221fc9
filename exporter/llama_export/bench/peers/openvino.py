"""OpenVINO GenAI, over a model that its own GGUF reader makes of the bundle's weights.

The reader knows matrices of float16, Q8_0 and Q4_0. In a file of float16, weights of bf16 keep all their
bits down to magnitudes of 2^-14, and they are bf16 again in the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import CompatibilityError
from llama_export.bench.methods import Setup
from llama_export.bench.peers.library import installed, stored_type

LIBRARY, EXTRA = "openvino-genai", "openvino"
MODEL_FILES = ("openvino_model.xml", "openvino_model.bin")
ATTENTION = {"openvino": "SDPA", "openvino-paged": "PA"}
PRECISION = {"bf16": "bf16", "f16": "f32", "f32": "f32"}
"""Of the arithmetic, by the bundle's dtype."""


def prepare(setup: Setup) -> None:
    """Writes the model into a folder, without a tokenizer.

    Raises:
        CompatibilityError: the library is not installed, the bundle has no weights, or weights
            that the reader does not know.
    """
    installed(LIBRARY, extra=EXTRA)
    manifest = open_bundle(setup.folder).manifest
    if manifest.dtype == "f32" and manifest.quantized is None:
        raise CompatibilityError(
            "expected weights of bf16, f16, int8 or int4, got f32",
            where=setup.method,
            hint="build the bundle with --dtype bf16, or leave this engine out",
        )
    import openvino_genai

    from llama_export.bench.peers.gguf_file import write_gguf

    folder = _folder(setup)
    folder.mkdir()
    path = folder / "model.gguf"
    write_gguf(setup.folder, path, dtype=torch.float16, weights_dir=setup.weights_dir)
    none = openvino_genai.Tokenizer(str(folder))
    openvino_genai.LLMPipeline(str(path), none, "CPU", enable_save_ov_model=True)
    path.unlink()


def open(setup: Setup) -> Method:
    """The model with the attention that the method's name stands for."""
    return Method(setup)


class Method:
    """One pipeline; nothing of a text is kept for the next one."""

    def __init__(self, setup: Setup) -> None:
        import openvino_genai

        self._lib = openvino_genai
        bundle = open_bundle(setup.folder)
        manifest = bundle.manifest
        options: dict[str, Any] = {
            "ATTENTION_BACKEND": ATTENTION[setup.method],
            "INFERENCE_NUM_THREADS": setup.threads,
            "INFERENCE_PRECISION_HINT": PRECISION[manifest.dtype],
        }
        if setup.method == "openvino-paged":
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            scheduler.max_num_batched_tokens = setup.positions
            options["scheduler_config"] = scheduler
        self._pipeline = openvino_genai.LLMPipeline(str(_folder(setup)), "CPU", **options)
        self._executor = ThreadPoolExecutor(1)
        found = installed(LIBRARY, extra=EXTRA)
        self.label = f"{setup.method} ({LIBRARY} {found}), {stored_type(bundle)}"
        self.versions = {LIBRARY: found}
        self.files = [_folder(setup) / name for name in MODEL_FILES]

    def generate(self, prompt: Sequence[int], num_new: int) -> Iterator[int]:
        """Greedy tokens, as the library hands them to its streamer."""
        tokens: SimpleQueue[int | None] = SimpleQueue()
        text = self._executor.submit(
            self._pipeline.generate,
            self._tensor(prompt),
            self._greedy(num_new),
            _streamer(self._lib, tokens),
        )
        text.add_done_callback(lambda _: tokens.put(None))
        yield from iter(tokens.get, None)
        text.result()

    def logits(self, tokens: Sequence[int]) -> None:
        """The library does not tell them."""

    def _tensor(self, tokens: Sequence[int]) -> Any:
        import openvino

        return openvino.Tensor(np.array([tokens], np.int64))

    def _greedy(self, num_new: int) -> Any:
        config = self._lib.GenerationConfig()
        config.max_new_tokens = num_new
        config.do_sample = False
        config.ignore_eos = True
        config.set_eos_token_id(0)  # there has to be one
        config.stop_token_ids = set()
        return config


def _streamer(library: Any, tokens: SimpleQueue[int | None]) -> Any:
    """Puts every token into a queue."""

    class Streamer(library.StreamerBase):  # type: ignore[misc]
        def write(self, token: int | Sequence[int]) -> Any:
            for one in [token] if isinstance(token, int) else token:
                tokens.put(one)
            return library.StreamingStatus.RUNNING

        def end(self) -> None:
            """The queue is closed when the call returns."""

    return Streamer()


def _folder(setup: Setup) -> Path:
    return setup.scratch / setup.method
