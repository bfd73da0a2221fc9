"""One of several processes: gradients of a loss over its parts, against those of the whole network.

Run by `torchrun`: `BUNDLE`. Prints, as rank 0, the largest difference over processes and parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed

import llama_runtime
from llama_runtime import shards

INPUTS = {
    "tokens": [5, 6, 7, 9, 8],
    "positions": [0, 1, 2, 0, 1],
    "segments": [0, 0, 0, 1, 1],
    "targets": [6, 7, 2, 8, 127],
    "weights": [1.0, 0.5, 1.0, 2.0, 1.0],
}


def main(folder: Path) -> None:
    """Runs backward in both, and compares."""
    torch.set_num_threads(1)
    with shards.joined(timeout=120) as group:
        bundle = llama_runtime.load(folder, group=group)
        cuts = bundle.manifest.cuts
        part = bundle.trainable("loss_packed")
        whole = llama_runtime.load(folder).trainable("loss_packed")
        for model in (part, whole):
            loss = model(**INPUTS)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
        expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
        worst = torch.zeros(())
        for name, parameter in part.named_parameters():
            grad = _expected(name, expected)
            if name in cuts:
                axis = 0 if cuts[name].axis == "rows" else 1
                grad = grad.chunk(group.size, axis)[group.rank]
            assert parameter.grad is not None
            worst = torch.maximum(worst, (parameter.grad - grad).abs().max())
        distributed.all_reduce(worst, distributed.ReduceOp.MAX)
        if group.rank == 0:
            sys.stdout.write(str(float(worst)))


def _expected(name: str, grads: dict[str, torch.Tensor | None]) -> torch.Tensor:
    grad = grads[name]
    assert grad is not None
    return grad


if __name__ == "__main__":
    main(Path(sys.argv[1]))
