"""The network: one module whose parameter names are those of the Hugging Face checkpoint.

Shape letters: B rows (sequences), S new tokens of a row, P packed tokens, M positions a cache row
holds, K key/value heads, N query heads, D head width, H hidden width, V vocabulary; `...` the axes
of the call's tokens, [B, S] or [P]. Tokens, positions, rows, slots and tables are int32. States are
written in place; position M-1 of a row and page 0 of a pool are scratch that nobody reads.

Norms, rotations, attention scores and softmax are float32; every other result is rounded to the
compute dtype where the reference implementation (transformers' Llama) rounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llama_export.checkpoint.config import LlamaConfig
from llama_export.checkpoint.layout import Codes
from llama_export.model import collectives, contexts, generation, rope
from llama_export.model.attention import Context, Mixed, State
from llama_export.model.contexts import capacity_of
from llama_export.model.contrib import Grouped
from llama_export.model.formulation import Formulation
from llama_export.model.generation import drawn, likeliest
from llama_export.model.linear import Embedding, Linear, RMSNorm, Summed, together

INV_FREQ = "model.rotary_emb.inv_freq"
"""Name of the table of inverse frequencies among the weights."""

Turn = tuple[Tensor, Tensor]
"""Cosines and sines [..., 1, D] of the angles of a call's tokens."""

Choice = Callable[[Tensor], Tensor]
"""Of a tensor with all tokens, those that the last layer goes on with."""


def _all(x: Tensor) -> Tensor:
    return x


def _last(x: Tensor) -> Tensor:
    return x[:, -1:]


def _closing(form: Formulation) -> type[Linear]:
    """The kind of the layer that ends a block, whose inputs are divided where the network is."""
    return Summed if form.is_sharded else Linear


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
        self.o_proj = _closing(form)(q_width, hidden, form, bias=bias)

    def forward(
        self,
        x: Tensor,
        turn: Turn,
        context: Context | Grouped,
        state: State | None,
        asked: Choice,
    ) -> Tensor:
        q, k, v = together(x, self.q_proj, self.k_proj, self.v_proj)
        if isinstance(context, Grouped):
            assert state is not None
            return self.o_proj(asked(context.mix(q, k, v, turn, state)))
        q, k, v = map(self._heads, (q, k, v))
        q, k = self.form.kept(rope.rotate(q, *turn)), rope.rotate(k, *turn)
        mixed = asked(context.mix(q, k, v, state)).to(x.dtype)
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
        self.down_proj = _closing(form)(inner, hidden, form, bias=bias)

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

    def forward(
        self,
        x: Tensor,
        turn: Turn,
        context: Context | Grouped,
        state: State | None,
        asked: Choice,
    ) -> Tensor:
        kept = self.form.kept
        mixed = self.self_attn(kept(self.input_layernorm(x)), turn, context, state, asked)
        x = kept(asked(x) + mixed)
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
        vocab_size = config.vocab_size * form.num_shards  # whole in every process
        self.embed_tokens = Embedding(config.hidden_size, vocab_size, form)
        self.layers = nn.ModuleList(Layer(config, form) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.head_dim)


class Llama(nn.Module):
    """The network, with one method per entry.

    Where several processes run it together, the configuration is that of one of them
    (`llama_export.shards.shard`), inputs and outputs are those of the whole, and states its own.
    """

    def __init__(
        self, config: LlamaConfig, form: Formulation, *, coded: Mapping[str, Codes] | None = None
    ) -> None:
        super().__init__()
        self.form = form
        self.model = Body(config, form)
        # A tied head is the embedding itself: one parameter, one name; or it is a part of it.
        self.lm_head = (
            None
            if config.tie_word_embeddings and not form.is_sharded
            else Linear(config.hidden_size, config.vocab_size, form)
        )
        for name, codes in (coded or {}).items():
            linear: Any = self.get_submodule(name)
            linear.hold(codes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, V] of tokens [B, S]."""
        return self._head(self._hidden(tokens, contexts.whole(tokens)))

    def next_token(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after the last of tokens [B, S]."""
        return self._head(self._hidden(tokens, contexts.whole(tokens), asked=_last)[:, -1])

    def prefill(self, tokens: Tensor, pos: Tensor, states: Sequence[State]) -> Tensor:
        """Logits [B, V] after tokens [B, S] at positions pos to pos + S - 1."""
        context = contexts.following(self.form, tokens, pos, states)
        return self._head(self._hidden(tokens, context, states, _last)[:, -1])

    def decode(self, tokens: Tensor, pos: Tensor, states: Sequence[State]) -> Tensor:
        """Logits [B, V] after one token a row, tokens [B, 1], all at position pos."""
        context = contexts.step(self.form, pos, states)
        return self._head(self._hidden(tokens, context, states)[:, -1])

    def decode_rows(self, tokens: Tensor, positions: Tensor, states: Sequence[State]) -> Tensor:
        """Logits [B, V] after one token a row, tokens [B, 1], each at its own position [B]."""
        context = contexts.own_positions(self.form, positions, states)
        return self._head(self._hidden(tokens, context, states)[:, -1])

    def prefill_slots(
        self, tokens: Tensor, slots: Tensor, lengths: Tensor, states: Sequence[State]
    ) -> Tensor:
        """Logits [M, V] after token lengths[m]-1; prompt m of tokens [M, S] fills row slots[m]."""
        context = contexts.prompts(tokens, slots, lengths, capacity_of(states))
        order = torch.arange(tokens.shape[0], device=tokens.device)
        last = (lengths.long() - 1)[:, None]
        x = self._hidden(tokens, context, states, lambda x: x[order[:, None], last])
        return self._head(x[:, 0])

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
        context = contexts.packed(positions, segments, rows)
        return self._head(self._hidden(tokens, context, states, lambda x: x[last.long()]))

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
        prompt = contexts.packed(positions, segments, rows)
        step = contexts.own_positions(self.form, step_positions, states)
        return self._mixed_step(
            tokens, last, step_tokens, Mixed(prompt, step, tokens.shape[0]), states
        )

    def decode_paged(
        self, tokens: Tensor, positions: Tensor, table: Tensor, states: Sequence[State]
    ) -> Tensor:
        """Logits [rows, V] after one token a row, tokens [rows, 1]; row r has pages table[r]."""
        context = contexts.paged_step(self.form, positions, table, states)
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
        context = contexts.paged(self.form, positions, slots, rows, table, states)
        return self._head(self._hidden(tokens, context, states, lambda x: x[last.long()]))

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
        prompt = contexts.paged(self.form, positions, slots, rows, table, states)
        step = contexts.paged_step(self.form, step_positions, table, states)
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
        return self._hidden(tokens, contexts.packed(positions, segments))

    def log_probs_packed(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, targets: Tensor
    ) -> Tensor:
        """Log-probability of targets[p] (int64) after token p, float32 [P]."""
        logits = self._own_logits(self.hidden_packed(tokens, positions, segments)).float()
        if self.form.is_sharded:
            return collectives.log_probs(logits, targets, self.form)
        return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    def loss_packed(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        """Sum of weights[p] * -log p(targets[p]), a float32 scalar; differentiable."""
        return -(weights * self.log_probs_packed(tokens, positions, segments, targets)).sum()

    def _hidden(
        self,
        tokens: Tensor,
        context: Context | Grouped,
        states: Sequence[State] | None = None,
        asked: Choice = _all,
    ) -> Tensor:
        """The stream of the tokens that are asked for, which the last layer finishes alone."""
        x = self.model.embed_tokens.rows(tokens)
        cos, sin = rope.rotations(context.positions, self.model.rotary_emb.inv_freq, x.dtype)
        turn = self.form.kept(cos[..., None, :]), self.form.kept(sin[..., None, :])
        end = len(self.model.layers) - 1
        for i, layer in enumerate(self.model.layers):
            state = None if states is None else states[i]
            x = layer(x, turn, context, state, asked if i == end else _all)
        return self.form.kept(self.model.norm(x))

    def _head(self, x: Tensor) -> Tensor:
        logits = self._own_logits(x)
        return collectives.gathered(logits, self.form) if self.form.is_sharded else logits

    def _own_logits(self, x: Tensor) -> Tensor:
        """Logits of this process's part of the vocabulary."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return head(x)

    def _generate(
        self, token: Tensor, pos: Tensor, states: Sequence[State], num_steps: int, **choice: Any
    ) -> tuple[Tensor, Tensor]:
        start = contexts.start_of(self.form, pos, num_steps, capacity_of(states))
        # One key too many, hidden, so that there is a past at position 0.
        num_past = capacity_of(states) if start is None else start + 1
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
        num_prompt = tokens.shape[0]

        def asked(x: Tensor) -> Tensor:
            return torch.cat((x[:num_prompt][last.long()], x[num_prompt:]))

        every = torch.cat((tokens, step_tokens[:, 0]))
        return self._head(self._hidden(every, context, states, asked))
