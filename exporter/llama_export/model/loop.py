"""A loop that becomes one operator of the exported graph, and the flat tuples that it carries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

from llama_export.model.attention import State

Carried = tuple[Tensor, ...]


def loop(
    is_going: Callable[..., Tensor], advance: Callable[..., Carried], carried: Carried
) -> Carried:
    """`advance` on the carried tensors for as long as `is_going` says so.

    Neither may write into a tensor; what is returned must not be a tensor that came in.
    """
    if torch.compiler.is_exporting():
        results: Carried = while_loop(is_going, advance, carried)
        return results
    while is_going(*carried):
        carried = advance(*carried)
    return carried


def flat(states: Iterable[State]) -> list[Tensor]:
    """Keys and values of every layer, one after the other."""
    return [tensor for state in states for tensor in state]


def pairs(tensors: Sequence[Tensor]) -> list[State]:
    """The inverse of `flat`."""
    return list(zip(tensors[::2], tensors[1::2], strict=True))
