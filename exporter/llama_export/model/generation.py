"""A whole generation as one loop, which becomes one operator of the exported graph.

Shape letters: B rows, T steps, C keys before the loop, V vocabulary, K key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop_op
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from llama_export.model import threefry
from llama_export.model.attention import Looped, State, write_rows

if TYPE_CHECKING:
    from llama_export.model.llama import Llama

MIN_TEMPERATURE = 1e-5
"""Sampling at less than this is greedy."""

Choice = Callable[..., Tensor]
"""Makes the tokens [B] of the number of the step, logits [B, V] and settings."""


class Progress(NamedTuple):
    """What the loop carries: how far it is, and keys and values of its own.

    Attributes:
        step: number of the next step, int64.
        done: rows that have given the end, bool [B].
        lengths: tokens of each row, int32 [B].
        token: the last of each row, int32 [B, 1].
        tokens: all of them, int32 [B, T].
        own: each layer's keys and values, [B, K, T, D].
    """

    step: Tensor
    done: Tensor
    lengths: Tensor
    token: Tensor
    tokens: Tensor
    own: list[State]


class Fixed(NamedTuple):
    """What the loop reads.

    Attributes:
        pos: position of the first token that is fed.
        end: the token that ends a row.
        past: each layer's keys and values before the loop, [B, K, C, D].
        seen: which of them are seen, bool [C].
        settings: of the choice.
        weights: the network's, by name.
    """

    pos: Tensor
    end: Tensor
    past: list[State]
    seen: Tensor
    settings: tuple[Tensor, ...]
    weights: dict[str, Tensor]


def likeliest(_: Tensor, logits: Tensor) -> Tensor:
    """The greedy choice."""
    return logits.argmax(-1)


def drawn(step: Tensor, logits: Tensor, key: Tensor, temperature: Tensor) -> Tensor:
    """A draw from softmax(logits / temperature): Gumbel-max with the step's key."""
    words = threefry.split((key[0], key[1]), step)
    noise = threefry.gumbel(threefry.bits(words, (logits.shape[0], logits.shape[1])))
    scores = logits.float() / temperature.clamp(min=MIN_TEMPERATURE) + noise
    return torch.where(temperature < MIN_TEMPERATURE, logits.float(), scores).argmax(-1)


def generate(
    model: Llama,
    token: Tensor,
    pos: Tensor,
    num_past: Any,
    states: Sequence[State],
    *,
    num_steps: int,
    choose: Choice,
    settings: tuple[Tensor, ...] = (),
    end: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens [B, num_steps] after token [B, 1] at pos, and count [B] int32.

    The loop carries its own keys and values, since states would be copied at every step; the
    states [B, K, M, D] are written once, after it. What a row computes after its end goes to scratch.

    Args:
        model: the network.
        token: fed first.
        pos: its position.
        num_past: how many cached positions are read, at least one; those from pos on are hidden.
        states: written in place.
        num_steps: the most steps.
        choose: the next tokens.
        settings: tensors that `choose` takes.
        end: the token that ends a row, or None.
    """
    fixed = Fixed(
        pos=pos,
        end=token.new_full((), -1) if end is None else end,
        past=[(keys[:, :, :num_past], values[:, :, :num_past]) for keys, values in states],
        seen=torch.arange(num_past, dtype=torch.int32, device=token.device) < pos,
        settings=settings,
        weights={**dict(model.named_parameters()), **dict(model.named_buffers())},
    )

    def is_going(progress: Progress, _: Fixed) -> Tensor:
        return (progress.step < num_steps) & ~progress.done.all()

    def advance(progress: Progress, fixed: Fixed) -> Progress:
        step, done = progress.step, progress.done
        positions = (fixed.pos + step).int().reshape(1, 1)
        context = Looped(positions, fixed.past, fixed.seen, progress.own, step, model.form.is_fused)
        with _reparametrize_module(model, fixed.weights):
            logits = model.step_logits(progress.token, context)
        token = choose(step, logits, *fixed.settings).int()[:, None]
        is_now = torch.arange(num_steps, device=token.device) == step
        return Progress(
            step=step + 1,
            done=done | (token[:, 0] == fixed.end),
            lengths=progress.lengths + (~done).int(),
            token=token,
            tokens=torch.where(is_now & ~done[:, None], token, progress.tokens),
            own=context.kept,
        )

    progress = _loop(is_going, advance, _beginning(token, states, num_steps), fixed)
    _keep(progress, pos, states)
    return progress.tokens, progress.lengths


def _beginning(token: Tensor, states: Sequence[State], num_steps: int) -> Progress:
    """Before the first step, with room for the keys and values of all of them."""
    (num_rows, num_heads, _, head_dim), device = states[0][0].shape, token.device
    size = (num_rows, num_heads, num_steps, head_dim)
    return Progress(
        step=torch.zeros((), dtype=torch.int64, device=device),
        done=torch.zeros(num_rows, dtype=torch.bool, device=device),
        lengths=torch.zeros(num_rows, dtype=torch.int32, device=device),
        token=token.clone(),
        tokens=torch.zeros(num_rows, num_steps, dtype=torch.int32, device=device),
        own=[(keys.new_zeros(size), values.new_zeros(size)) for keys, values in states],
    )


def _keep(progress: Progress, pos: Tensor, states: Sequence[State]) -> None:
    """Writes the loop's own keys and values into the states; past a row's end, to scratch."""
    num_rows, num_steps = progress.tokens.shape
    device, scratch = progress.tokens.device, states[0][0].shape[2] - 1
    order = torch.arange(num_steps, device=device)
    positions = torch.where(order < progress.lengths[:, None], pos + order, scratch)
    rows = torch.arange(num_rows, device=device)[:, None]
    for state, own in zip(states, progress.own, strict=True):
        for cache, new in zip(state, own, strict=True):
            write_rows(cache, new.transpose(1, 2), rows, positions)


def _loop(
    is_going: Callable[[Progress, Fixed], Tensor],
    advance: Callable[[Progress, Fixed], Progress],
    progress: Progress,
    fixed: Fixed,
) -> Progress:
    """`advance` for as long as `is_going`; both read their arguments alone and write into none.

    The operator is called as it is: torch's own function around it finds out what its arguments
    read by compiling them, which takes three times as long as the trace.
    """
    if not torch.compiler.is_exporting():
        while is_going(progress, fixed):
            progress = advance(progress, fixed)
        return progress
    carried, carried_spec = tree_flatten(progress)
    constant, spec = tree_flatten(fixed)

    def call(function: Callable[[Progress, Fixed], Any], flat: Sequence[Tensor]) -> Any:
        first, rest = flat[: len(carried)], flat[len(carried) :]
        return function(tree_unflatten(first, carried_spec), tree_unflatten(rest, spec))

    operator: Any = while_loop_op
    results = operator(
        lambda *flat: call(is_going, flat),
        lambda *flat: tuple(tree_flatten(call(advance, flat))[0]),
        tuple(carried),
        tuple(constant),
    )
    last: Progress = tree_unflatten(results, carried_spec)
    return last
