"""Bundles of packed checkpoints in portable formats, against transformers with the decoded weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig as ReferenceConfig
from transformers import LlamaForCausalLM

import llama_runtime
from llama_export.build import build
from llama_export.recipe import Recipe
from tests.tiny_packed import decoded, write_tiny_packed

pytestmark = pytest.mark.slow  # it builds bundles of its own

KINDS: dict[str, dict[str, Any]] = {
    "shared orders": {"form": "gptq", "is_ordered": True},
    "orders of their own, some layers plain": {
        "form": "gptq",
        "is_ordered": True,
        "order_seed": lambda module: module,
        "is_packed": lambda module: not module.endswith(("v_proj", "up_proj", "lm_head")),
        "quantization": {
            "modules_in_block_to_quantize": [
                "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj",
                "mlp.gate_proj", "mlp.down_proj",
            ]
        },
    },
    "no order": {"form": "awq"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_programs_compute_what_the_decoded_weights_say(kind: str, tmp_path: Path) -> None:
    folder = write_tiny_packed(tmp_path / "m", num_hidden_layers=1, **KINDS[kind])
    recipe = Recipe(
        str(folder), tmp_path / "b", ("prefill",), ("pt2", "onnx"), max_seq=32, dtype="f32"
    )
    bundle = build(recipe).folder
    values = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "float32"}
    del values["quantization_config"]
    model = LlamaForCausalLM(ReferenceConfig(**values, attn_implementation="eager")).eval()
    model.load_state_dict(decoded(folder), strict=True)
    tokens = torch.randint(128, (1, 20), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model(tokens).logits[:, -1]
    for format in ("pt2", "onnx"):
        entry = llama_runtime.load(bundle, format=format).entry("prefill")
        actual = entry(entry.new_states(), tokens=tokens.int(), pos=0)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
