"""The eager model in float32, which sees each sequence whole and keeps no state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch

from llama_artifacts.dtypes import from_torch
from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import Manifest
from llama_export.checkpoint.config import LlamaConfig, RopeConfig
from llama_export.checkpoint.layout import ORDER, Codes, coded_modules, expected_tensors
from llama_export.checkpoint.source import TensorInfo
from llama_export.laws.calls import Sequences
from llama_export.laws.spans import Plan, Span
from llama_export.model.formulation import Formulation
from llama_export.model.llama import INV_FREQ, Attention, Llama

Place = tuple[int, int]


def load_model(weights: Mapping[str, torch.Tensor], manifest: Manifest, *, where: Path) -> Llama:
    """The bundle's weights in the network, computing in float32.

    Raises:
        IntegrityError: the weights are not those of the manifest's network.
    """
    form = Formulation(torch.float32, reads_positions=False)
    model = Llama(model_config(manifest), form, coded=coded(weights))
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as cause:
        raise IntegrityError(
            "the weights are not those of the network in the manifest",
            where=where,
            hint="build the bundle again",
        ) from cause
    return model.requires_grad_(False)


def network_weights(
    weights: Mapping[str, torch.Tensor], manifest: Manifest
) -> Mapping[str, torch.Tensor]:
    """A bundle's weights without what only a checkpoint's own files hold beside the network's."""
    if manifest.weights == "copy":
        return weights
    config = model_config(manifest)
    known = {*expected_tensors(config, coded(weights)), INV_FREQ}
    return {name: tensor for name, tensor in weights.items() if name in known}


def coded(weights: Mapping[str, torch.Tensor]) -> dict[str, Codes]:
    """The modules whose weights are codes."""
    return coded_modules(
        {
            name: TensorInfo(from_torch(tensor.dtype).name, tuple(tensor.shape))
            for name, tensor in weights.items()
        }
    )


def model_config(manifest: Manifest) -> LlamaConfig:
    """The network that the manifest describes."""
    model = manifest.model
    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        rope=RopeConfig(theta=1.0),  # the frequencies are among the weights
        max_position=manifest.max_seq,
        tie_word_embeddings=model.tie_word_embeddings,
        attention_bias=model.attention_bias,
        mlp_bias=model.mlp_bias,
    )


def repeat_heads(model: Llama, num_groups: int) -> None:
    """Gives every query head a key/value head of its own: the same network without any groups.

    Query head j * num_groups + i gets a copy of key/value head j, in place.
    """
    for layer in model.model.layers:
        attention = layer.self_attn
        assert isinstance(attention, Attention)
        for linear in (attention.k_proj, attention.v_proj):
            for name, tensor in list(linear.named_parameters(recurse=False)):
                if ORDER.endswith(name):  # of columns
                    continue
                heads = tensor.detach().unflatten(0, (-1, attention.head_dim))
                repeated = heads.repeat_interleave(num_groups, 0).flatten(0, 1)
                setattr(linear, name, torch.nn.Parameter(repeated, requires_grad=False))


class Oracle:
    """What a model makes of sequences, row by row.

    Attributes:
        model: computes in float32.
        sequences: int32 tokens [rows, n], and targets and weights of their own.
        rank: which part of the key/value heads this process keeps, where several share them.
    """

    def __init__(self, model: Llama, sequences: Sequences, rank: int = 0) -> None:
        self.model = model
        self.sequences = sequences
        self.rank = rank

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of the whole network."""
        attention = self.model.model.layers[0].self_attn
        assert isinstance(attention, Attention)
        return attention.k_proj.weight.shape[0] // attention.head_dim

    @property
    def tokens(self) -> torch.Tensor:
        """The sequences' tokens, int32 [rows, n]."""
        return self.sequences.tokens

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [rows, n, V] after every position of any tokens [rows, n]."""
        with torch.no_grad():
            return self.model(tokens)

    @cached_property
    def logits(self) -> torch.Tensor:
        """After every position, [rows, n, V]."""
        return self.read(self.tokens)

    @cached_property
    def hidden(self) -> torch.Tensor:
        """The stream after the final norm, [rows, n, H]."""
        order = torch.arange(self.tokens.shape[1], dtype=torch.int32)
        one = torch.zeros_like(order)
        with torch.no_grad():
            return torch.stack([self.model.hidden_packed(row, order, one) for row in self.tokens])

    @cached_property
    def log_probs(self) -> torch.Tensor:
        """Of the sequences' targets, [rows, n]."""
        return self.logits.log_softmax(-1).gather(2, self.sequences.targets[..., None])[..., 0]

    def expected(self, entry: str, plan: Plan, places: tuple[Place, ...]) -> torch.Tensor:
        """What the entry must answer after these rows and positions of the plan."""
        if entry == "loss_packed":
            return torch.stack([self._loss(call.prompts) for call in plan])
        rows, positions = (list(axis) for axis in zip(*places, strict=True))
        if entry == "hidden_packed":
            return self.hidden[rows, positions]
        if entry == "log_probs_packed":
            return self.log_probs[rows, positions]
        return self.logits[rows, positions]

    def _loss(self, spans: tuple[Span, ...]) -> torch.Tensor:
        loss = torch.zeros(())
        for span in spans:
            part = slice(span.start, span.stop)
            weights = self.sequences.weights[span.row, part]
            loss = loss - (weights * self.log_probs[span.row, part]).sum()
        return loss
