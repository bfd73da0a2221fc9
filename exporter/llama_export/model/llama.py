"""The network: one module whose parameter names are those of the Hugging Face checkpoint.

Shape letters: B rows (sequences), S new tokens of a row, C cached positions in use, M positions a
cache holds, K key/value heads, G query heads per key/value head, D head width, H hidden width,
V vocabulary. Tokens and positions are int32. A state is one layer's (keys, values), [B, K, M, D]
each, written in place; position M-1 is scratch that nobody reads.

Norms, rotations, attention scores and softmax are float32; every other result is rounded to the
compute dtype where the reference implementation (transformers' Llama) rounds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llama_export.checkpoint.config import LlamaConfig
from llama_export.model import rope

State = tuple[Tensor, Tensor]

INV_FREQ = "model.rotary_emb.inv_freq"
"""Name of the table of inverse frequencies among the weights."""


@dataclass(frozen=True)
class Formulation:
    """How the same mathematics is written for one kind of program.

    Attributes:
        dtype: the compute dtype; weights of another dtype are cast where they are used.
        reads_positions: positions are read back as numbers, so that work follows the positions
            in use; not for CUDA graphs, where attention covers the whole state under a mask.
        max_fused_rows: a product of up to so many rows is written as multiply and reduce, which
            a compiler fuses into one pass over the stored weight.
    """

    dtype: torch.dtype
    reads_positions: bool
    max_fused_rows: int = 0


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class Linear(nn.Module):
    """A linear layer [..., in] -> [..., out], fused for few rows (see `Formulation`)."""

    def __init__(self, num_in: int, num_out: int, form: Formulation, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.empty(num_out)) if bias else None
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.weight, self.bias, self.form)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, form: Formulation) -> Tensor:
    num_rows = math.prod(x.shape[:-1])
    if isinstance(num_rows, int) and num_rows <= form.max_fused_rows:
        y = (x[..., None, :].float() * weight.float()).sum(-1)
        return (y if bias is None else y + bias.float()).to(x.dtype)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def write_rows(cache_BKMD: Tensor, new_BSKD: Tensor, positions_BS: Tensor) -> None:
    """Writes token s of row b at its position, in place; positions may be [1, S] for all rows.

    Every axis is indexed, so that the ONNX program scatters without transposing the cache.
    """
    rows = torch.arange(cache_BKMD.shape[0], device=cache_BKMD.device)[:, None, None]
    heads = torch.arange(cache_BKMD.shape[1], device=cache_BKMD.device)
    cache_BKMD.index_put_((rows, heads, positions_BS.long()[:, :, None]), new_BSKD)


def attend(q_BNSD: Tensor, k_BKCD: Tensor, v_BKCD: Tensor, visible_BSC: Tensor | None) -> Tensor:
    """Softmax attention in float32; [B, N, S, D]. `visible` None: every key is visible.

    Query head j*G + i reads key/value head j; the heads of a group are folded into the query
    length, so keys are never repeated. (Ainslie et al. 2023, grouped-query attention.)
    """
    _, N, S, D = q_BNSD.shape
    K = k_BKCD.shape[1]
    q = (q_BNSD.float() * D**-0.5).unflatten(1, (K, N // K)).flatten(2, 3)
    scores = q @ k_BKCD.float().transpose(-1, -2)
    if visible_BSC is not None:
        hidden = ~visible_BSC.repeat(1, N // K, 1)[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    mixed = scores.softmax(-1) @ v_BKCD.float()
    return mixed.unflatten(2, (N // K, S)).flatten(1, 2)


def attend_one(q_BND: Tensor, k_BKCD: Tensor, v_BKCD: Tensor, visible_BC: Tensor | None) -> Tensor:
    """`attend` for one query a row, written as products and sums that a compiler fuses."""
    B, N, D = q_BND.shape
    K = k_BKCD.shape[1]
    q = (q_BND.float() * D**-0.5).reshape(B, K, N // K, 1, D)
    scores = (q * k_BKCD.float()[:, :, None]).sum(-1)
    if visible_BC is not None:
        scores = scores.masked_fill(~visible_BC[:, None, None], float("-inf"))
    weighted = scores.softmax(-1)[..., None] * v_BKCD.float()[:, :, None]
    return weighted.sum(-2).reshape(B, N, D)


@dataclass(frozen=True)
class Span:
    """The positions of one call, shared by all layers.

    Attributes:
        positions_BS: of the new tokens; [1, S] where all rows share them.
        cos, sin: rotations of the positions, [B or 1, S, 1, D].
        visible_BSC: which keys each token sees; None where it sees all `num_keys`.
        num_keys: how many cached positions are read, a number or a symbol of the graph; None
            without a state.
    """

    positions_BS: Tensor
    cos: Tensor
    sin: Tensor
    visible_BSC: Tensor | None
    num_keys: Any


class Attention(nn.Module):
    """Grouped-query attention of one layer, with or without a state."""

    def __init__(self, config: LlamaConfig, form: Formulation) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.form = config.head_dim, form
        hidden, bias = config.hidden_size, config.attention_bias
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = Linear(hidden, q_width, form, bias=bias)
        self.k_proj = Linear(hidden, kv_width, form, bias=bias)
        self.v_proj = Linear(hidden, kv_width, form, bias=bias)
        self.o_proj = Linear(q_width, hidden, form, bias=bias)

    def forward(self, x_BSH: Tensor, span: Span, state: State | None) -> Tensor:
        q = rope.rotate(self._heads(self.q_proj(x_BSH)), span.cos, span.sin)
        k = rope.rotate(self._heads(self.k_proj(x_BSH)), span.cos, span.sin)
        v = self._heads(self.v_proj(x_BSH))
        if state is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            keys, values = state
            write_rows(keys, k, span.positions_BS)
            write_rows(values, v, span.positions_BS)
            k, v = keys[:, :, : span.num_keys], values[:, :, : span.num_keys]
        mixed = self._attend(q.transpose(1, 2), k, v, span.visible_BSC).to(x_BSH.dtype)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        if q.shape[2] == 1 and self.form.max_fused_rows:
            visible_BC = None if visible is None else visible[:, 0]
            return attend_one(q[:, :, 0], k, v, visible_BC)[:, :, None]
        return attend(q, k, v, visible)


class MLP(nn.Module):
    """Gated feed-forward block, SwiGLU (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig, form: Formulation) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, form, bias=bias)
        self.up_proj = Linear(hidden, inner, form, bias=bias)
        self.down_proj = Linear(inner, hidden, form, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: LlamaConfig, form: Formulation) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, form)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, form)

    def forward(self, x: Tensor, span: Span, state: State | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), span, state)
        return x + self.mlp(self.post_attention_layernorm(x))


class RotaryEmbedding(nn.Module):
    """Holds the inverse frequencies, float32 [D/2], as a named tensor beside the weights."""

    inv_freq: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(head_dim // 2))


class Body(nn.Module):
    """Everything below the output head."""

    def __init__(self, config: LlamaConfig, form: Formulation) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, form) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.head_dim)


class Llama(nn.Module):
    """The network, with one method per entry."""

    def __init__(self, config: LlamaConfig, form: Formulation) -> None:
        super().__init__()
        self.form = form
        self.model = Body(config, form)
        # A tied head is the embedding itself: one parameter, one name.
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, form)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, V] of tokens [B, S]."""
        return self._head(self._hidden(tokens))

    def next_token(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after the last of tokens [B, S]."""
        return self._head(self._hidden(tokens)[:, -1])

    def prefill(self, tokens: Tensor, pos: Tensor, states: Sequence[State]) -> Tensor:
        """Logits [B, V] after tokens [B, S] at positions pos to pos + S - 1."""
        num_new, capacity = tokens.shape[1], states[0][0].shape[2]
        positions = pos + torch.arange(num_new, dtype=torch.int32, device=tokens.device)
        num_keys = self._num_keys(pos, num_new, capacity)
        return self._head(self._cached(tokens, positions[None], states, num_keys)[:, -1])

    def decode(self, tokens: Tensor, pos: Tensor, states: Sequence[State]) -> Tensor:
        """Logits [B, V] after one token a row, tokens [B, 1], all at position pos."""
        num_keys = self._num_keys(pos, 1, states[0][0].shape[2])
        return self._head(self._cached(tokens, pos.reshape(1, 1), states, num_keys)[:, -1])

    def decode_rows(self, tokens: Tensor, positions: Tensor, states: Sequence[State]) -> Tensor:
        """Logits [B, V] after one token a row, tokens [B, 1], each at its own position [B]."""
        scratch = states[0][0].shape[2] - 1
        # Idle rows write at the scratch position; they must not widen what the others read.
        furthest = torch.where(positions == scratch, 0, positions).max()
        num_keys = self._num_keys(furthest, 1, scratch + 1)
        return self._head(self._cached(tokens, positions[:, None], states, num_keys)[:, -1])

    def _hidden(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        visible = positions <= positions[:, None]
        return self._layers(tokens, positions[None], visible[None], None, None)

    def _cached(
        self, tokens: Tensor, positions: Tensor, states: Sequence[State], num_keys: Any
    ) -> Tensor:
        slots = torch.arange(num_keys, dtype=torch.int32, device=tokens.device)
        visible = slots <= positions[:, :, None]
        return self._layers(tokens, positions, visible, states, num_keys)

    def _layers(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        states: Sequence[State] | None,
        num_keys: Any,
    ) -> Tensor:
        x = self.model.embed_tokens(tokens).to(self.form.dtype)
        cos, sin = rope.rotations(positions, self.model.rotary_emb.inv_freq, x.dtype)
        span = Span(positions, cos[:, :, None], sin[:, :, None], visible, num_keys)
        for i, layer in enumerate(self.model.layers):
            x = layer(x, span, None if states is None else states[i])
        return self.model.norm(x)

    def _head(self, x: Tensor) -> Tensor:
        if self.lm_head is not None:
            return self.lm_head(x)
        return _linear(x, self.model.embed_tokens.weight, None, self.form)

    def _num_keys(self, pos: Tensor, num_new: int, capacity: int) -> Any:
        if not self.form.reads_positions:
            return capacity
        first = pos.item()
        torch._check(first >= 0)
        torch._check(first + num_new <= capacity)
        return first + num_new
