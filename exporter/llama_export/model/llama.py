"""The network: one module whose parameter names are those of the Hugging Face checkpoint.

Shape letters: B rows (sequences), S new tokens of a row, P packed tokens, M positions a cache row
holds, K key/value heads, N query heads, D head width, H hidden width, V vocabulary; `...` the axes
of the call's tokens, [B, S] or [P]. Tokens, positions, rows, slots and tables are int32. States are
written in place; position M-1 of a row and page 0 of a pool are scratch that nobody reads.

Norms, rotations, attention scores and softmax are float32; every other result is rounded to the
compute dtype where the reference implementation (transformers' Llama) rounds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llama_artifacts.manifest import Numerics
from llama_export.checkpoint.config import LlamaConfig
from llama_export.checkpoint.layout import Codes
from llama_export.model import fp8, generation, integers, rope
from llama_export.model.attention import (
    CachedRows,
    Context,
    Mixed,
    OwnKeys,
    Paged,
    State,
)
from llama_export.model.cached import WIDTH_MULTIPLE
from llama_export.model.generation import drawn, likeliest
from llama_export.model.products import products
from llama_export.model.stored import stored

INV_FREQ = "model.rotary_emb.inv_freq"
"""Name of the table of inverse frequencies among the weights."""

Turn = tuple[Tensor, Tensor]
"""Cosines and sines [..., 1, D] of the angles of a call's tokens."""


@dataclass(frozen=True)
class Formulation:
    """How the same mathematics is written for one kind of program.

    Attributes:
        dtype: the compute dtype; weights of another dtype are cast where they are used.
        reads_positions: positions are read back as numbers, so that work follows the positions
            in use; not for CUDA graphs, where attention covers the whole state under a mask.
        max_fused_rows: a product of up to so many rows is written as multiply and reduce, which
            a compiler fuses into one pass over the stored weight; 0 also for attention.
        numerics: how products with FP8 weights are computed, see `llama_export.model.fp8`.
        has_fp8_units: the device multiplies FP8 by FP8, which `fast` products then use.
    """

    dtype: torch.dtype
    reads_positions: bool
    max_fused_rows: int = 0
    numerics: Numerics = "exact"
    has_fp8_units: bool = False

    @property
    def is_fused(self) -> bool:
        """Whether a compiler that fuses will see the graph."""
        return self.max_fused_rows > 0

    def kept(self, x: Tensor) -> Tensor:
        """The same values, computed once also where a compiler fuses (see `stored`)."""
        return stored(x) if self.is_fused else x


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
    """A linear layer [..., in] -> [..., out], fused for few rows (see `Formulation`).

    `weight_scale` [out, groups] is there where the weight is codes, and multiplies each group of a row.
    """

    def __init__(self, num_in: int, num_out: int, form: Formulation, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.empty(num_out)) if bias else None
        self.weight_scale: nn.Parameter | None = None
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return together(x, self)[0]

    def hold(self, codes: Codes) -> None:
        """Makes room for a weight of codes and its scales."""
        weight, scale = codes.shape(self.weight.shape), codes.scale_shape(self.weight.shape)
        self.weight, self.weight_scale = (
            nn.Parameter(torch.empty(shape), requires_grad=False) for shape in (weight, scale)
        )

    @property
    def has_integers(self) -> bool:
        """Whether the weight is codes of small integers (see `llama_export.model.integers`)."""
        return self.weight_scale is not None and self.weight.dtype in integers.DTYPES

    def finish(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Adds the bias to a product in float32, and rounds."""
        return (y if self.bias is None else y + self.bias.float()).to(dtype)

    def apart(self, x: Tensor) -> Tensor:
        """The layer by itself, in the form that many rows or FP8 weights have."""
        scale, form, bias = self.weight_scale, self.form, self.bias
        if scale is not None and self.has_integers:
            return integers.linear(x, self.weight, scale, bias)
        if scale is not None:
            return fp8.linear(x, self.weight, scale, bias, form=form, is_fused=_is_fused(x, form))
        return F.linear(x, self.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class Embedding(Linear):
    """Rows of a table [vocabulary, hidden]; as a tied head, the linear layer of that weight."""

    def rows(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., hidden] of tokens [...], in the compute dtype."""
        found = F.embedding(tokens, self.weight)
        if self.weight_scale is None:
            return found.to(self.form.dtype)
        return integers.decode(found, F.embedding(tokens, self.weight_scale), self.form.dtype)


def _is_fused(x: Tensor, form: Formulation) -> bool:
    num_rows = math.prod(x.shape[:-1])
    return isinstance(num_rows, int) and num_rows <= form.max_fused_rows


def together(x: Tensor, *layers: Linear) -> list[Tensor]:
    """Linear layers of the same x [..., in], as one pass over their weights for few rows."""
    scales = [layer.weight_scale for layer in layers if layer.weight_scale is not None]
    has_kernel = not scales or all(layer.has_integers for layer in layers)
    if not has_kernel or not _is_fused(x, layers[0].form):
        return [layer.apart(x) for layer in layers]
    weights, rows = [layer.weight for layer in layers], x.flatten(0, -2)
    y = products(rows if scales else rows.float(), weights, scales).unflatten(0, x.shape[:-1])
    parts = y.split([weight.shape[0] for weight in weights], dim=-1)
    return [layer.finish(part, x.dtype) for layer, part in zip(layers, parts, strict=True)]


class Attention(nn.Module):
    """Grouped-query attention of one layer in the context of a call."""

    def __init__(self, config: LlamaConfig, form: Formulation) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.form = form
        hidden, bias = config.hidden_size, config.attention_bias
        q_width = config.num_heads * self.head_dim
        kv_width = config.num_kv_heads * self.head_dim
        self.q_proj = Linear(hidden, q_width, form, bias=bias)
        self.k_proj = Linear(hidden, kv_width, form, bias=bias)
        self.v_proj = Linear(hidden, kv_width, form, bias=bias)
        self.o_proj = Linear(q_width, hidden, form, bias=bias)

    def forward(self, x: Tensor, turn: Turn, context: Context, state: State | None) -> Tensor:
        q, k, v = map(self._heads, together(x, self.q_proj, self.k_proj, self.v_proj))
        q, k = self.form.kept(rope.rotate(q, *turn)), rope.rotate(k, *turn)
        mixed = context.mix(q, k, v, state).to(x.dtype)
        return self.o_proj(self.form.kept(mixed.flatten(-2)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """Gated feed-forward block, SwiGLU (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig, form: Formulation) -> None:
        super().__init__()
        self.form = form
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, form, bias=bias)
        self.up_proj = Linear(hidden, inner, form, bias=bias)
        self.down_proj = Linear(inner, hidden, form, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = together(x, self.gate_proj, self.up_proj)
        return self.down_proj(self.form.kept(F.silu(gate) * up))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: LlamaConfig, form: Formulation) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, form)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, form)
        self.form = form

    def forward(self, x: Tensor, turn: Turn, context: Context, state: State | None) -> Tensor:
        kept = self.form.kept
        x = kept(x + self.self_attn(kept(self.input_layernorm(x)), turn, context, state))
        return kept(x + self.mlp(kept(self.post_attention_layernorm(x))))


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
        self.embed_tokens = Embedding(config.hidden_size, config.vocab_size, form)
        self.layers = nn.ModuleList(Layer(config, form) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.head_dim)


class Llama(nn.Module):
    """The network, with one method per entry."""

    def __init__(
        self, config: LlamaConfig, form: Formulation, *, coded: Mapping[str, Codes] | None = None
    ) -> None:
        super().__init__()
        self.form = form
        self.model = Body(config, form)
        # A tied head is the embedding itself: one parameter, one name.
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, form)
        )
        for name, codes in (coded or {}).items():
            linear: Any = self.get_submodule(name)
            linear.hold(codes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, V] of tokens [B, S]."""
        return self._head(self._hidden(tokens, _whole(tokens)))

    def next_token(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after the last of tokens [B, S]."""
        return self._head(self._hidden(tokens, _whole(tokens))[:, -1])

    def prefill(self, tokens: Tensor, pos: Tensor, states: Sequence[State]) -> Tensor:
        """Logits [B, V] after tokens [B, S] at positions pos to pos + S - 1."""
        num_new = tokens.shape[1]
        positions = (pos + _arange(num_new, tokens))[None]
        context = self._rows(positions, pos, num_new, states)
        return self._head(self._hidden(tokens, context, states)[:, -1])

    def decode(self, tokens: Tensor, pos: Tensor, states: Sequence[State]) -> Tensor:
        """Logits [B, V] after one token a row, tokens [B, 1], all at position pos."""
        context = self._rows(pos.reshape(1, 1), pos, 1, states)
        return self._head(self._hidden(tokens, context, states)[:, -1])

    def decode_rows(self, tokens: Tensor, positions: Tensor, states: Sequence[State]) -> Tensor:
        """Logits [B, V] after one token a row, tokens [B, 1], each at its own position [B]."""
        context = self._own_positions(positions, states)
        return self._head(self._hidden(tokens, context, states)[:, -1])

    def prefill_slots(
        self, tokens: Tensor, slots: Tensor, lengths: Tensor, states: Sequence[State]
    ) -> Tensor:
        """Logits [M, V] after token lengths[m]-1; prompt m of tokens [M, S] fills row slots[m]."""
        order = _arange(tokens.shape[1], tokens)
        scratch = _capacity(states) - 1
        positions = torch.where(order < lengths[:, None], order, scratch)
        visible = (order <= order[:, None])[None]
        context = OwnKeys(positions, visible.expand(tokens.shape[0], -1, -1), slots[:, None])
        x = self._hidden(tokens, context, states)
        return self._head(x[torch.arange(tokens.shape[0], device=x.device), lengths.long() - 1])

    def prefill_packed(
        self,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        segments: Tensor,
        last: Tensor,
        states: Sequence[State],
    ) -> Tensor:
        """Logits [B, V] at packed index last[b]; token p of [P] is kept at rows[p], positions[p]."""
        context = OwnKeys(positions, _same_segment(positions, segments), rows)
        return self._head(self._hidden(tokens, context, states)[last.long()])

    def step_packed(
        self,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        segments: Tensor,
        last: Tensor,
        step_tokens: Tensor,
        step_positions: Tensor,
        states: Sequence[State],
    ) -> Tensor:
        """Logits [2 * B, V]: `prefill_packed` and `decode_rows` in one call, prompts first."""
        prompt = OwnKeys(positions, _same_segment(positions, segments), rows)
        step = self._own_positions(step_positions, states)
        return self._mixed_step(
            tokens, last, step_tokens, Mixed(prompt, step, tokens.shape[0]), states
        )

    def decode_paged(
        self, tokens: Tensor, positions: Tensor, table: Tensor, states: Sequence[State]
    ) -> Tensor:
        """Logits [rows, V] after one token a row, tokens [rows, 1]; row r has pages table[r]."""
        context = self._paged_step(positions, table, states)
        return self._head(self._hidden(tokens[:, 0], context, states))

    def prefill_paged(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        slots: Tensor,
        last: Tensor,
        table: Tensor,
        states: Sequence[State],
    ) -> Tensor:
        """Logits [rows, V] at packed index last[r]; token p of [P] is kept at pool slot slots[p]."""
        context = self._paged(positions, slots, rows, table, states)
        return self._head(self._hidden(tokens, context, states)[last.long()])

    def step_paged(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        slots: Tensor,
        last: Tensor,
        table: Tensor,
        step_tokens: Tensor,
        step_positions: Tensor,
        states: Sequence[State],
    ) -> Tensor:
        """Logits [2 * rows, V]: `prefill_paged` and `decode_paged` in one call, prompts first."""
        prompt = self._paged(positions, slots, rows, table, states)
        step = self._paged_step(step_positions, table, states)
        return self._mixed_step(
            tokens, last, step_tokens, Mixed(prompt, step, tokens.shape[0]), states
        )

    def generate(
        self, token: Tensor, pos: Tensor, states: Sequence[State], *, steps: int
    ) -> Tensor:
        """Greedy tokens [B, steps] after token [B, 1] at position pos."""
        return self._generate(token, pos, states, steps, choose=likeliest)[0]

    def sample(
        self,
        token: Tensor,
        pos: Tensor,
        key: Tensor,
        temperature: Tensor,
        states: Sequence[State],
        *,
        steps: int,
    ) -> Tensor:
        """Tokens [B, steps] drawn from softmax(logits / temperature), key int64 [2].

        Step i draws with key number i of `threefry.split`, row b and token t with word b * V + t
        of its bits. A temperature below 1e-5 is greedy.
        """
        settings = (key, temperature)
        return self._generate(token, pos, states, steps, choose=drawn, settings=settings)[0]

    def generate_until(
        self, token: Tensor, pos: Tensor, eos: Tensor, states: Sequence[State], *, max_new: int
    ) -> tuple[Tensor, Tensor]:
        """Greedy tokens [B, max_new], zero after each row's eos, and their count [B].

        Ends when every row has produced eos, which counts as a token of its row.
        """
        return self._generate(token, pos, states, max_new, choose=likeliest, end=eos)

    def step_logits(self, token: Tensor, context: Context) -> Tensor:
        """Logits [B, V] after one token a row [B, 1], in a loop's context."""
        return self._head(self._hidden(token, context)[:, -1])

    def hidden_packed(self, tokens: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """The stream [P, H] after the final norm; a token sees its own segment up to itself."""
        return self._hidden(tokens, OwnKeys(positions, _same_segment(positions, segments)))

    def log_probs_packed(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, targets: Tensor
    ) -> Tensor:
        """Log-probability of targets[p] (int64) after token p, float32 [P]."""
        logits = self._head(self.hidden_packed(tokens, positions, segments)).float()
        return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    def loss_packed(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        """Sum of weights[p] * -log p(targets[p]), a float32 scalar; differentiable."""
        return -(weights * self.log_probs_packed(tokens, positions, segments, targets)).sum()

    def _hidden(
        self, tokens: Tensor, context: Context, states: Sequence[State] | None = None
    ) -> Tensor:
        x = self.model.embed_tokens.rows(tokens)
        cos, sin = rope.rotations(context.positions, self.model.rotary_emb.inv_freq, x.dtype)
        turn = self.form.kept(cos[..., None, :]), self.form.kept(sin[..., None, :])
        for i, layer in enumerate(self.model.layers):
            x = layer(x, turn, context, None if states is None else states[i])
        return self.form.kept(self.model.norm(x))

    def _head(self, x: Tensor) -> Tensor:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return head(x)

    def _generate(
        self, token: Tensor, pos: Tensor, states: Sequence[State], num_steps: int, **choice: Any
    ) -> tuple[Tensor, Tensor]:
        start = self._start(pos, num_steps, _capacity(states))
        # One key too many, hidden, so that there is a past at position 0.
        num_past = _capacity(states) if start is None else start + 1
        return generation.generate(
            self, token, pos, num_past, states, num_steps=num_steps, **choice
        )

    def _mixed_step(
        self,
        tokens: Tensor,
        last: Tensor,
        step_tokens: Tensor,
        context: Mixed,
        states: Sequence[State],
    ) -> Tensor:
        x = self._hidden(torch.cat((tokens, step_tokens[:, 0])), context, states)
        num_prompt = tokens.shape[0]
        return self._head(torch.cat((x[:num_prompt][last.long()], x[num_prompt:])))

    def _rows(
        self, positions: Tensor, first: Tensor, num_new: int, states: Sequence[State]
    ) -> CachedRows:
        num_rows, capacity = states[0][0].shape[0], _capacity(states)
        if self._has_kernel(states):
            return CachedRows(num_rows, positions, capacity, None, is_fused=True, has_kernel=True)
        num_keys = self._num_keys(first, num_new, capacity)
        visible = _arange(num_keys, positions) <= positions[:, :, None]
        is_fused = self.form.is_fused and num_new == 1
        return CachedRows(num_rows, positions, num_keys, visible, is_fused)

    def _own_positions(self, positions: Tensor, states: Sequence[State]) -> CachedRows:
        # Idle rows write at the scratch position; they must not widen what the others read.
        scratch = _capacity(states) - 1
        furthest = torch.where(positions == scratch, 0, positions).max()
        return self._rows(positions[:, None], furthest, 1, states)

    def _paged_step(self, positions: Tensor, table: Tensor, states: Sequence[State]) -> Paged:
        page_len = _page_len(states)
        page = table.gather(1, (positions.clamp(min=0) // page_len).long()[:, None])[:, 0]
        slots = page * page_len + positions.clamp(min=0) % page_len
        # Idle rows, at position -1, write into page 0 and see one key, so that nothing is NaN.
        slots = torch.where(positions < 0, 0, slots)
        return self._paged(positions.clamp(min=0), slots, None, table, states)

    def _paged(
        self,
        positions: Tensor,
        slots: Tensor,
        rows: Tensor | None,
        table: Tensor,
        states: Sequence[State],
    ) -> Paged:
        has_kernel = self._has_kernel(states)
        return Paged(positions, slots, rows, table, _page_len(states), has_kernel)

    def _has_kernel(self, states: Sequence[State]) -> bool:
        return self.form.is_fused and states[0][0].shape[3] % WIDTH_MULTIPLE == 0

    def _num_keys(self, first: Tensor, num_new: int, capacity: int) -> Any:
        start = self._start(first, num_new, capacity)
        return capacity if start is None else start + num_new

    def _start(self, first: Tensor, num_new: int, capacity: int) -> Any:
        """The position as a number, or None in a form that reads none back."""
        if not self.form.reads_positions:
            return None
        start = first.item()
        torch._check(start >= 0)
        torch._check(start + num_new <= capacity)
        return start


def _arange(size: Any, like: Tensor) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=like.device)


def _capacity(states: Sequence[State]) -> int:
    return states[0][0].shape[2]


def _page_len(states: Sequence[State]) -> int:
    return states[0][0].shape[2]


def _whole(tokens: Tensor) -> OwnKeys:
    order = _arange(tokens.shape[1], tokens)
    visible = (order <= order[:, None])[None]
    return OwnKeys(order[None], visible)


def _same_segment(positions: Tensor, segments: Tensor) -> Tensor:
    """[1, P, P]: a token sees its own segment up to its own position."""
    is_same = segments == segments[:, None]
    return (is_same & (positions <= positions[:, None]))[None]
