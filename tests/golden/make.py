"""Writes `v1`, a tiny bundle of this version of the format with the tokens that it gives.

Run it as `python -m tests.golden.make` and only while the format is new: once a version was released,
its bundle is what every later version must still open, and it is never written again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import llama_runtime
from llama_artifacts.manifest import SCHEMA_MAJOR
from llama_export.build import build
from llama_export.recipe import Recipe
from tests.tiny import write_tiny

FOLDER = Path(__file__).parent / f"v{SCHEMA_MAJOR}"
PROMPT = (1, 9, 40, 77, 12)
NUM_TOKENS = 16
FORMATS = ("pt2", "onnx")
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}


def main() -> None:
    """Builds the bundle and records the greedy tokens, which both formats must agree on."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny(Path(folder) / "tiny", seed=30, **SIZES)
        build(Recipe(str(checkpoint), FOLDER / "bundle", formats=FORMATS, max_seq=32))
    found = {format: replay(FOLDER / "bundle", format) for format in FORMATS}
    tokens, margin = found["pt2"]
    if tokens != found["onnx"][0] or margin < 1e-3:
        raise SystemExit(f"the choice of tokens is not clear enough: {found}")
    record = {"prompt": PROMPT, "tokens": tokens, "least_margin": margin}
    (FOLDER / "tokens.json").write_text(json.dumps(record, indent=2) + "\n")


def replay(bundle: Path, format: str) -> tuple[list[int], float]:
    """Greedy tokens after the prompt, and the least distance of a best logit to the second."""
    session = llama_runtime.load(bundle, format=format).session()
    logits = session.prefill(PROMPT)
    tokens, margins = [], []
    for _ in range(NUM_TOKENS):
        best = logits.flatten().topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        logits = session.decode(tokens[-1])
    return tokens, min(margins)


if __name__ == "__main__":
    main()
