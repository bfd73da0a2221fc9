"""What an entry's inputs say of its tokens, as contexts of attention: where each stands and what it sees.

Positions, rows, slots and tables are int32; position M-1 of a row and page 0 of a pool are scratch.

Shape letters: B rows (sequences), S new tokens of a row, P packed tokens, M positions a cache row
holds, Q pages of a row's table. States as in `llama_export.model.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llama_export.model.attention import CachedRows, OwnKeys, Paged, State
from llama_export.model.cached import WIDTH_MULTIPLE
from llama_export.model.contrib import HEAD_MULTIPLE, Grouped
from llama_export.model.formulation import Formulation


def whole(tokens: Tensor) -> OwnKeys:
    """Of tokens [B, S] that see what comes before them in their row, and are not kept."""
    order = _arange(tokens.shape[1], tokens)
    visible = _triangle(order)
    return OwnKeys(order[None], visible)


def packed(positions: Tensor, segments: Tensor, rows: Tensor | None = None) -> OwnKeys:
    """Of tokens [P] that see their own segment up to their position; kept in rows, where given."""
    is_same = segments == segments[:, None]
    return OwnKeys(positions, (is_same & (positions <= positions[:, None]))[None], rows)


def prompts(tokens: Tensor, slots: Tensor, lengths: Tensor, capacity: int) -> OwnKeys:
    """Of prompts [B, S] of lengths [B], each kept in the cache row slots[b]; the rest is padding."""
    order = _arange(tokens.shape[1], tokens)
    positions = torch.where(order < lengths[:, None], order, capacity - 1)
    return OwnKeys(positions, _triangle(order).expand(tokens.shape[0], -1, -1), slots[:, None])


def following(
    form: Formulation, tokens: Tensor, pos: Tensor, states: Sequence[State]
) -> CachedRows | Grouped:
    """Of tokens [B, S], in every row at the positions from pos (a scalar) on."""
    num_new = tokens.shape[1]
    # ONNX Runtime 1.31 refuses several tokens of several rows that have a past.
    if states[0][0].shape[0] == 1 and _has_operator(form, states):
        return _grouped(pos, num_new, states)
    positions = (pos + _arange(num_new, tokens))[None]
    return _cached(form, positions, pos, num_new, states)


def step(form: Formulation, pos: Tensor, states: Sequence[State]) -> CachedRows | Grouped:
    """Of one token a row, all at the position pos (a scalar)."""
    if _has_operator(form, states):
        return _grouped(pos, 1, states)
    return _cached(form, pos.reshape(1, 1), pos, 1, states)


def own_positions(form: Formulation, positions: Tensor, states: Sequence[State]) -> CachedRows:
    """Of one token a row, each at its own position [B]."""
    # Idle rows write at the scratch position; they must not widen what the others read.
    scratch = capacity_of(states) - 1
    furthest = torch.where(positions == scratch, 0, positions).max()
    return _cached(form, positions[:, None], furthest, 1, states)


def paged(
    form: Formulation,
    positions: Tensor,
    slots: Tensor,
    rows: Tensor | None,
    table: Tensor,
    states: Sequence[State],
) -> Paged:
    """Of tokens [P] kept at pool slots [P], each over the pages of its row, table [rows, Q]."""
    has_kernel = _has_kernel(form, states, is_step=rows is None)
    return Paged(positions, slots, rows, table, capacity_of(states), has_kernel)


def paged_step(
    form: Formulation, positions: Tensor, table: Tensor, states: Sequence[State]
) -> Paged:
    """Of one token a row of the table [rows, Q]; idle rows have position -1."""
    page_len = capacity_of(states)
    page = table.gather(1, (positions.clamp(min=0) // page_len).long()[:, None])[:, 0]
    slots = page * page_len + positions.clamp(min=0) % page_len
    # Idle rows write into page 0 and see one key, so that nothing is NaN.
    slots = torch.where(positions < 0, 0, slots)
    return paged(form, positions.clamp(min=0), slots, None, table, states)


def start_of(form: Formulation, first: Tensor, num_new: int, capacity: int) -> Any:
    """The first position as a number of the graph, or None in a form that reads none back."""
    if not form.reads_positions:
        return None
    start = first.item()
    torch._check(start >= 0)
    torch._check(start + num_new <= capacity)
    return start


def capacity_of(states: Sequence[State]) -> int:
    """Positions that a cache row holds, or a page of a pool."""
    return states[0][0].shape[2]


def _cached(
    form: Formulation, positions: Tensor, first: Tensor, num_new: int, states: Sequence[State]
) -> CachedRows:
    num_rows, capacity = states[0][0].shape[0], capacity_of(states)
    if _has_kernel(form, states, is_step=num_new == 1):
        return CachedRows(num_rows, positions, capacity, None, is_fused=True, has_kernel=True)
    start = start_of(form, first, num_new, capacity)
    num_keys = capacity if start is None else start + num_new
    visible = _arange(num_keys, positions) <= positions[:, :, None]
    is_fused = form.is_fused and num_new == 1
    return CachedRows(num_rows, positions, num_keys, visible, is_fused)


def _grouped(pos: Tensor, num_new: Any, states: Sequence[State]) -> Grouped:
    num_rows, capacity = states[0][0].shape[0], capacity_of(states)
    num_seen = pos + num_new
    return Grouped(_arange(capacity, pos), (num_seen - 1).expand(num_rows), num_seen)


def _has_operator(form: Formulation, states: Sequence[State]) -> bool:
    return form.has_contrib and states[0][0].shape[3] % HEAD_MULTIPLE == 0


def _has_kernel(form: Formulation, states: Sequence[State], *, is_step: bool) -> bool:
    """Whether `attend_cached` has a kernel for these states, and for one new token a row or more."""
    if form.device == "cuda":
        return form.is_fused and is_step
    return form.is_fused and states[0][0].shape[3] % WIDTH_MULTIPLE == 0


def _triangle(order: Tensor) -> Tensor:
    """[1, S, S]: a token sees those up to itself."""
    return (order <= order[:, None])[None]


def _arange(size: Any, like: Tensor) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=like.device)
