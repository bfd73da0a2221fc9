"""What the processes of one network tell each other, as operators of the exported graph.

Every process runs the same graph, so a graph knows how many there are, and nothing of its own
number. The group is a name in the graph; `llama_runtime.shards` registers it.

Shape letters: P packed tokens, V the vocabulary of one process; `...` the axes of a call's tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llama_export.model.formulation import Formulation

_ops: Any = torch.ops._c10d_functional


def summed(x: Tensor, form: Formulation) -> Tensor:
    """The sum over the processes."""
    return _reduced(x, "sum", form)


def gathered(x: Tensor, form: Formulation) -> Tensor:
    """The parts [..., V] of all processes side by side, in order of their numbers."""
    stacked = _done(_ops.all_gather_into_tensor(x.contiguous(), form.num_shards, form.group))
    return stacked.unflatten(0, (form.num_shards, -1)).movedim(0, -2).flatten(-2)


def log_probs(logits_PV: Tensor, targets_P: Tensor, form: Formulation) -> Tensor:
    """Log-probabilities [P] of targets, where each process has the logits of its part alone.

    The largest logit, the sum of exponentials and the target's logit go between the processes, not
    the logits (Shoeybi et al. 2019, section 3).
    """
    V = logits_PV.shape[-1]
    largest_P = _reduced(logits_PV.detach().amax(-1), "max", form)
    place_P = targets_P - _rank(logits_PV.device, form) * V
    is_own = (place_P >= 0) & (place_P < V)
    own_P = logits_PV.gather(-1, place_P.clamp(0, V - 1)[:, None])[:, 0] - largest_P
    total_P = (logits_PV - largest_P[:, None]).exp().sum(-1)
    both = summed(torch.stack((total_P, own_P.masked_fill(~is_own, 0))), form)
    return both[1] - both[0].log()


def _rank(device: torch.device, form: Formulation) -> Tensor:
    """The process's number, int64 [1]: each gets its own element of 0, 1, 2, ..."""
    order = torch.arange(form.num_shards, device=device)
    return _done(_ops.reduce_scatter_tensor(order, "max", form.num_shards, form.group))


def _reduced(x: Tensor, how: str, form: Formulation) -> Tensor:
    return _done(_ops.all_reduce(x.contiguous(), how, form.group))


def _done(x: Tensor) -> Tensor:
    result: Tensor = _ops.wait_tensor(x)
    return result
