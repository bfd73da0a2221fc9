"""What a bundle tells whoever runs its calls in other processes, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from llama_artifacts import manifest
    from llama_runtime.programs.base import Program
    from llama_runtime.states import States


class Mirror(Protocol):
    """Told of everything that programs and states of a bundle go through, before it happens.

    States are known by their tensors, as `add` was given them: what is written into them by other
    ways than programs, `zero` and `clear` stays in this process.
    """

    def load(self, record: manifest.Program, load: Callable[[], Program]) -> Program:
        """A program is loaded, by `load`; returns what runs its calls everywhere."""
        ...

    def add(self, record: manifest.Program, states: States) -> None:
        """New states for a program, all zero."""
        ...

    def zero(self, tensors: Sequence[torch.Tensor]) -> None:
        """States become zero."""
        ...

    def clear(self, tensors: Sequence[torch.Tensor], axis: int, places: Sequence[int]) -> None:
        """Places of an axis of each state become zero."""
        ...
