"""What `transformers` makes of the same GGUF file: its reader, its network, its tokenizer.

It is imported on first use: it takes seconds, and quick runs that leave these tests out import
this file all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8_192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
"""SmolLM2-135M as it was published, so that a wrong reading of the file's fields shows."""

NUM_PARAMETERS = 134_515_008


@dataclass(frozen=True)
class Oracle:
    """The reference network in one dtype."""

    model: Any

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Float32 logits [S, V] of one sequence."""
        return self.model(torch.tensor([tokens])).logits[0].float()

    @torch.no_grad()
    def greedy(self, prompt: list[int], *, max_new: int) -> list[int]:
        """The new tokens only."""
        tokens = torch.tensor([prompt])
        output = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=max_new,
        )
        return output[0, len(prompt) :].tolist()


def load_oracle(gguf: Path, dtype: torch.dtype) -> Oracle:
    """Reads the file with `transformers` alone.

    Its own `from_pretrained(gguf_file=...)` wants one more package, `accelerate`, only to place
    the tensors.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), "the head is tied, the rest is there"
    model.tie_weights()
    # `model.to` would round the rotary frequencies too, which a checkpoint loaded in bf16 keeps.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return Oracle(model)


def load_tokenizer(gguf: Path) -> Any:
    """The tokenizer that `transformers` converts from the file, with the file's chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
