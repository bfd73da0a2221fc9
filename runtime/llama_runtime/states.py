"""The tensors that a program reads and writes in place, allocated from the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from llama_artifacts.dtypes import from_name, from_torch
from llama_artifacts.errors import InputError
from llama_artifacts.signature import StateSpec, show


class States(Mapping[str, torch.Tensor]):
    """One set of states, by name; checked once, when made.

    The mapping cannot be changed, the tensors' contents can. Programs whose declared states are
    equal may share one set. Not safe for two calls at the same time.
    """

    def __init__(
        self,
        specs: tuple[StateSpec, ...],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        if tensors.keys() != {spec.name for spec in specs}:
            raise InputError(
                f"expected the {len(specs)} states {specs[0].name} to {specs[-1].name}, "
                f"got {len(tensors)} others"
            )
        for spec in specs:
            check_tensor(spec.name, spec.dtype, spec.shape, tensors[spec.name], device)
        self.specs = specs
        self._tensors = {spec.name: tensors[spec.name] for spec in specs}

    @classmethod
    def zeros(cls, specs: tuple[StateSpec, ...], device: torch.device) -> States:
        """New states, all zero."""
        tensors = {
            spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
            for spec in specs
        }
        return cls(specs, tensors, device)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in the order of the signature."""
        return list(self._tensors.values())

    def zero_(self) -> None:
        """Sets every state to zero, in place."""
        for tensor in self._tensors.values():
            tensor.zero_()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a manifest's dtype name."""
    dtype: torch.dtype = getattr(torch, from_name(name).torch)
    return dtype


def check_tensor(
    name: str,
    dtype: str,
    shape: tuple[int, ...] | None,
    tensor: torch.Tensor,
    device: torch.device,
) -> None:
    """Refuses a tensor that a program would misread; `shape` None is checked elsewhere.

    Raises:
        InputError: not a tensor, or another dtype, shape, device or layout than declared.
    """
    expected = (
        f"expected {dtype}{'' if shape is None else ' ' + show(shape)} contiguous on {device}"
    )
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{expected}, got a {type(tensor).__name__}", where=name)
    if tensor.dtype != torch_dtype(dtype):
        raise InputError(f"{expected}, got {from_torch(tensor.dtype).name}", where=name)
    if shape is not None and tuple(tensor.shape) != shape:
        raise InputError(f"{expected}, got shape {show(tuple(tensor.shape))}", where=name)
    if tensor.device != device:
        raise InputError(f"{expected}, got one on {tensor.device}", where=name)
    if not tensor.is_contiguous():
        raise InputError(f"{expected}, got strides {tensor.stride()}", where=name)
