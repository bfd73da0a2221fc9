"""Attention in its forms: whole sequences, rows of a cache, packed prompts, pages of a pool.

A context says where the new tokens of a call stand, where their keys and values are kept, and what
each of them sees. One context serves every layer of a call.

Shape letters: B rows (sequences), S new tokens of a row, P packed tokens, C keys in reach, M
positions a cache row holds, T steps of a loop, Q pages of a row's table, L positions of a page, K
key/value heads, G query heads per key/value head, N = K * G query heads, D head width; `...` the axes of the call's
tokens, [B, S] or [P].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from llama_export.model.cached import attend_cached

State = tuple[Tensor, Tensor]
"""One layer's keys and values: [B, K, M, D] in rows, [pages, K, L, D] in a pool."""

HIDDEN = float("-inf")


class Context(Protocol):
    """Where the new tokens of a call stand; positions are int32 [...]."""

    @property
    def positions(self) -> Tensor: ...

    def mix(self, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> Tensor:
        """Keeps the new keys and values [..., K, D]; attends for q [..., N, D]; float32 as q."""
        ...


def attend(q_BSND: Tensor, k_BKCD: Tensor, v_BKCD: Tensor, visible_BSC: Tensor) -> Tensor:
    """Softmax attention in float32, [B, S, N, D] (Vaswani et al. 2017).

    Query head j*G + i reads key/value head j (Ainslie et al. 2023, grouped-query attention); the
    heads of a group are folded into the query length, so keys are never repeated.
    """
    _, S, N, D = q_BSND.shape
    K = k_BKCD.shape[1]
    q = (q_BSND.transpose(1, 2).float() * D**-0.5).unflatten(1, (K, N // K)).flatten(2, 3)
    scores = q @ k_BKCD.float().transpose(-1, -2)
    hidden = ~visible_BSC.repeat(1, N // K, 1)[:, None]
    weights = scores.masked_fill(hidden, HIDDEN).softmax(-1)
    mixed = weights @ v_BKCD.float()
    return mixed.unflatten(2, (N // K, S)).flatten(1, 2).transpose(1, 2)


def attend_one(q_BND: Tensor, k_BKCD: Tensor, v_BKCD: Tensor, visible_BC: Tensor | None) -> Tensor:
    """`attend` for one query a row, written as products and sums that a compiler fuses."""
    B, N, D = q_BND.shape
    K = k_BKCD.shape[1]
    q = (q_BND.float() * D**-0.5).reshape(B, K, N // K, 1, D)
    scores = (q * k_BKCD.float()[:, :, None]).sum(-1)
    if visible_BC is not None:
        scores = scores.masked_fill(~visible_BC[:, None, None], HIDDEN)
    # Divided after the sum: one division an element of the result, not one a position.
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    weighted = (weights[..., None] * v_BKCD.float()[:, :, None]).sum(-2)
    return (weighted / weights.sum(-1, keepdim=True)).reshape(B, N, D)


def attend_pages(q_PND: Tensor, k_PQKLD: Tensor, v_PQKLD: Tensor, visible_PQL: Tensor) -> Tensor:
    """`attend` of each token over pages of its own, as products and sums that a compiler fuses."""
    P, N, D = q_PND.shape
    K = k_PQKLD.shape[2]
    q = (q_PND.float() * D**-0.5).reshape(P, 1, K, N // K, 1, D)
    scores = (q * k_PQKLD.float()[:, :, :, None]).sum(-1)  # [P, Q, K, G, L]
    scores = scores.masked_fill(~visible_PQL[:, :, None, None], HIDDEN)
    weights = (scores - scores.amax((1, 4), keepdim=True)).exp()
    mixed = (weights[..., None] * v_PQKLD.float()[:, :, :, None]).sum((1, 4))
    return (mixed / weights.sum((1, 4))[..., None]).reshape(P, N, D)


def attend_two(
    q_BND: Tensor, past: State, own: State, seen_C: Tensor, own_seen_T: Tensor, *, is_fused: bool
) -> Tensor:
    """`attend` for one query a row over keys in two places, [B, K, C, D] and [B, K, T, D].

    The two softmaxes share their maximum and their sum, so that nothing is concatenated.
    """
    B, N, D = q_BND.shape
    K = own[0].shape[1]
    q = (q_BND.float() * D**-0.5).reshape(B, K, N // K, D)
    parts = ((past, seen_C), (own, own_seen_T))
    scores = [
        _dot(q, keys.float(), is_fused).masked_fill(~seen, HIDDEN) for (keys, _), seen in parts
    ]
    largest = torch.maximum(*(score.amax(-1, keepdim=True) for score in scores))
    weights = [(score - largest).exp() for score in scores]
    total = weights[0].sum(-1, keepdim=True) + weights[1].sum(-1, keepdim=True)
    mixed = [
        _weighted(weight, values.float(), is_fused)
        for weight, ((_, values), _) in zip(weights, parts, strict=True)
    ]
    return ((mixed[0] + mixed[1]) / total).reshape(B, N, D)


def _dot(q_BKGD: Tensor, keys_BKCD: Tensor, is_fused: bool) -> Tensor:
    if is_fused:
        return (q_BKGD[:, :, :, None] * keys_BKCD[:, :, None]).sum(-1)
    return q_BKGD @ keys_BKCD.transpose(-1, -2)


def _weighted(weights_BKGC: Tensor, values_BKCD: Tensor, is_fused: bool) -> Tensor:
    if is_fused:
        return (weights_BKGC[..., None] * values_BKCD[:, :, None]).sum(-2)
    return weights_BKGC @ values_BKCD


def write_rows(cache_BKMD: Tensor, new: Tensor, rows: Tensor, positions: Tensor) -> None:
    """Writes new [..., K, D] at each token's row and position, in place.

    Every axis is indexed, so that the ONNX program scatters without transposing the cache.
    """
    heads = torch.arange(cache_BKMD.shape[1], device=cache_BKMD.device)
    index = (rows.long()[..., None], heads, positions.long()[..., None])
    cache_BKMD.index_put_(index, new)


@dataclass(frozen=True)
class OwnKeys:
    """Tokens that see only tokens of the same call: [B, S] whole rows, or [P] packed.

    Attributes:
        positions: of the tokens.
        visible_BSC: which of the call's tokens each token sees; B is 1 where packed.
        rows: the cache row of each token, or None where nothing is kept.
    """

    positions: Tensor
    visible_BSC: Tensor
    rows: Tensor | None = None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> Tensor:
        if state is not None:
            assert self.rows is not None
            write_rows(state[0], k, self.rows, self.positions)
            write_rows(state[1], v, self.rows, self.positions)
        if q.ndim == 3:
            return self._attend(q[None], k[None], v[None])[0]
        return self._attend(q, k, v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k.transpose(1, 2), v.transpose(1, 2), self.visible_BSC)


@dataclass(frozen=True)
class CachedRows:
    """Tokens [B, S] that see their row of the cache up to their position.

    Attributes:
        num_rows: B.
        positions: [B, S], or [1, S] where all rows share them.
        num_keys: how many cached positions are read, a number or a symbol of the graph.
        visible_BSC: which of them each token sees; None where it sees all.
        is_fused: one token a row is attended for in the fused form.
        has_kernel: `attend_cached` takes the heads, and reads only what each token sees.
    """

    num_rows: int
    positions: Tensor
    num_keys: Any
    visible_BSC: Tensor | None
    is_fused: bool
    has_kernel: bool = False

    def mix(self, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> Tensor:
        assert state is not None
        rows = torch.arange(q.shape[0], device=q.device)[:, None]
        for cache, new in zip(state, (k, v), strict=True):
            write_rows(cache, new, rows, self.positions)
        if self.has_kernel:
            mixed = attend_cached(q.flatten(0, 1), *state, *self._places)
            return mixed.unflatten(0, q.shape[:2])
        keys, values = (cache[:, :, : self.num_keys] for cache in state)
        if self.is_fused:
            visible_BC = None if self.visible_BSC is None else self.visible_BSC[:, 0]
            return attend_one(q[:, 0], keys, values, visible_BC)[:, None]
        assert self.visible_BSC is not None
        return attend(q, keys, values, self.visible_BSC)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """The cache as one page a row: a table, and the row and position of each token."""
        device = self.positions.device
        order = torch.arange(self.num_rows, dtype=torch.int32, device=device)[:, None]
        size = (self.num_rows, self.positions.shape[1])
        return order, order.expand(size).flatten(), self.positions.expand(size).flatten()


@dataclass(frozen=True)
class Looped:
    """One token a row in a loop that writes no state, only buffers of its own.

    A loop that carried the states would copy them at every step.

    Attributes:
        positions: [1, 1], shared by the rows.
        past: each layer's keys and values before the loop, [B, K, C, D].
        seen: which of them are seen, [C].
        own: each layer's keys and values of the loop, [B, K, T, D].
        step: the number of the step, an int64 scalar.
        is_fused: written as products and sums that a compiler fuses.
        kept: `own` with this step's token, filled by `mix` layer by layer.
    """

    positions: Tensor
    past: Sequence[State]
    seen: Tensor
    own: Sequence[State]
    step: Tensor
    is_fused: bool
    kept: list[State] = field(default_factory=list)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> Tensor:
        assert state is None
        layer = len(self.kept)
        is_now = self._order == self.step
        keys, values = (
            torch.where(is_now[:, None], new.transpose(1, 2), old)
            for new, old in zip((k, v), self.own[layer], strict=True)
        )
        self.kept.append((keys, values))
        mixed = attend_two(
            q[:, 0],
            self.past[layer],
            (keys, values),
            self.seen,
            self._order <= self.step,
            is_fused=self.is_fused,
        )
        return mixed[:, None]

    @cached_property
    def _order(self) -> Tensor:
        """Numbers of the loop's steps, [T]."""
        return torch.arange(self.own[0][0].shape[2], device=self.step.device)


@dataclass(frozen=True)
class Paged:
    """Tokens [P] that see the pages of their row's table up to their position.

    Attributes:
        positions: of the tokens.
        slots: where each token is kept: page * L + place in the page.
        rows: the table's row of each token; None: token p has row p.
        table: page numbers [rows, Q].
        page_len: positions of a page.
        has_kernel: `attend_cached` takes the heads.
    """

    positions: Tensor
    slots: Tensor
    rows: Tensor | None
    table: Tensor
    page_len: int
    has_kernel: bool = False

    def mix(self, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> Tensor:
        assert state is not None
        keys, values = state
        write_rows(keys, k, *self._places)
        write_rows(values, v, *self._places)
        if self.has_kernel:
            return attend_cached(q, keys, values, self.table, self._rows_of_tokens, self.positions)
        if self.rows is None:
            table = self.table.long()
            return attend_pages(q, keys[table], values[table], self._visible)
        # One product over the pages of all rows, under a mask that keeps the rows apart: a prompt's
        # tokens share their pages, and gathering them for each token costs far more.
        flat = self.table.flatten().long()
        k = keys[flat].transpose(0, 1).flatten(1, 2)[None]
        v = values[flat].transpose(0, 1).flatten(1, 2)[None]
        return attend(q[None], k, v, self._visible_of_all)[0]

    @cached_property
    def _rows_of_tokens(self) -> Tensor:
        if self.rows is not None:
            return self.rows
        return torch.arange(self.table.shape[0], dtype=torch.int32, device=self.table.device)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Page of each token, and place in the page."""
        return self.slots // self.page_len, self.slots % self.page_len

    @cached_property
    def _visible(self) -> Tensor:
        """Which places of its row's pages each token sees, [P, Q, L]."""
        device = self.table.device
        first = torch.arange(self.table.shape[1], dtype=torch.int32, device=device) * self.page_len
        places = torch.arange(self.page_len, dtype=torch.int32, device=device)
        reach = first[:, None] + places
        return reach <= self.positions[:, None, None]

    @cached_property
    def _visible_of_all(self) -> Tensor:
        """Which places of all rows' pages each token sees, [1, P, rows * Q * L]."""
        assert self.rows is not None
        rows = torch.arange(self.table.shape[0], dtype=torch.int32, device=self.table.device)
        is_own = self.rows[:, None] == rows
        return (is_own[:, :, None, None] & self._visible[:, None]).flatten(1)[None]


@dataclass(frozen=True)
class Mixed:
    """Prompt tokens first, then one token of every row, each part in its own context; tokens [P + B]."""

    prompt: Context
    step: Context
    num_prompt: Any

    @property
    def positions(self) -> Tensor:
        return torch.cat((self.prompt.positions, self.step.positions.flatten()))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> Tensor:
        n = self.num_prompt
        first = self.prompt.mix(q[:n], k[:n], v[:n], state)
        if isinstance(self.step, CachedRows):
            second = self.step.mix(q[n:, None], k[n:, None], v[n:, None], state)[:, 0]
        else:
            second = self.step.mix(q[n:], k[n:], v[n:], state)
        return torch.cat((first, second))
