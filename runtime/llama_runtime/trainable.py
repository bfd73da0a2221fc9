"""A program as a module with parameters: for gradients, and for steps of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llama_artifacts.errors import CompatibilityError
from llama_artifacts.manifest import Cut
from llama_runtime.entry import bind_inputs, check_inputs
from llama_runtime.programs.base import LOADING, Loading
from llama_runtime.programs.pt2 import load_module
from llama_runtime.shards import GROUP


class TrainableEntry(torch.nn.Module):
    """One entry as a module that autograd sees into.

    Its parameters are copies of the bundle's weights, in their stored dtypes, under the
    checkpoint's names, and ask for gradients; so `state_dict()` can be stored and read as a
    checkpoint's tensors. Nothing that is done to them reaches the bundle, or other entries of it.
    What is no parameter (the table of rotary frequencies) is a buffer.

    Call it with every input by name, as an `Entry`, and get the output, or a tuple where there are
    several, with their graph. A forward pass keeps what the backward pass needs: memory grows with
    the tokens of the call. `train()` and `eval()` change nothing: the network has no dropout.

    In a group, every process makes the same calls, forward and backward: each gets the same output, the
    gradients of its own parts, and for what is whole everywhere the same gradient.

    Raises:
        CompatibilityError: the program has states, or binds weights that cannot be trained.
        InputError: when called, as an `Entry` is.
    """

    def __init__(self, loading: Loading, cuts: Mapping[str, Cut] | None = None) -> None:
        super().__init__()
        self.name = loading.program.entry
        self.signature = loading.program.signature
        _check(loading)
        cuts = (cuts or {}) if loading.program.shards > 1 else {}
        _check_cuts(loading, cuts)
        with LOADING:
            graph = load_module(loading, is_trainable=True)
        # The graph runs on the same submodules that this module registers, under the same names.
        self._graph = (graph,)
        for name, child in graph.named_children():
            self.add_module(name, child)
        if loading.program.shards > 1:
            for name, parameter in self.named_parameters():
                settings = (loading.program.shards, name in cuts)
                parameter.register_hook(lambda grad, own=settings: _shared_gradient(grad, *own))
        self._device = loading.device

    def forward(self, **inputs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """See the class."""
        tensors, sizes = bind_inputs(self.signature, inputs)
        check_inputs(self.signature, tensors, sizes)
        outputs = self._graph[0](*(tensor.to(self._device) for tensor in tensors))
        return outputs if isinstance(outputs, torch.Tensor) else _unpacked(outputs)


def _shared_gradient(grad: torch.Tensor, num_shards: int, is_part: bool) -> torch.Tensor:
    """The gradient of the output that all processes have.

    Each of them computes the output and goes back from it, and the gradient of a sum over processes
    is the sum of theirs: a part comes out as many times as there are processes. What is whole comes
    out as each process's share of that.
    """
    if not is_part:
        collectives: Any = torch.ops._c10d_functional
        grad = collectives.wait_tensor(collectives.all_reduce(grad.contiguous(), "sum", GROUP))
    return grad / num_shards


def _unpacked(outputs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _check(loading: Loading) -> None:
    program = loading.program
    if program.signature.states:
        raise CompatibilityError(
            f"`{program.entry}` writes its states in place, which has no gradient",
            where=loading.path,
            hint="train an entry without states, such as `loss_packed`",
        )
    for name, tensor in loading.constants().items():
        if tensor.dtype.itemsize == 1:
            raise CompatibilityError(
                f"`{name}` is {str(tensor.dtype).removeprefix('torch.')}: "
                "weights of eight bits and less cannot be trained",
                where=loading.path,
                hint="build the bundle from the checkpoint in bf16 or f32",
            )


def _check_cuts(loading: Loading, cuts: Mapping[str, Cut]) -> None:
    """A part of a tensor that is also bound whole would become another parameter."""
    tied = [name for name, cut in cuts.items() if cut.tensor != name]
    if tied:
        raise CompatibilityError(
            f"`{tied[0]}` is tied to `{cuts[tied[0]].tensor}`, which every process has whole",
            where=loading.path,
            hint="train it in one process, with programs of one shard",
        )
