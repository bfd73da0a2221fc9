"""The tensors that a program reads and writes in place, allocated from the manifest."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from llama_artifacts.dtypes import BY_TORCH, from_name
from llama_artifacts.errors import InputError
from llama_artifacts.signature import StateSpec, resolve, show
from llama_runtime.mirror import Mirror

LARGE_BYTES = 4 * 2**20
"""States of so many bytes lie in large pages of memory."""

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class States(Mapping[str, torch.Tensor]):
    """One set of states, by name; checked once, when made.

    The mapping cannot be changed, the tensors' contents can. Programs whose declared states are
    equal may share one set. Not safe for two calls at the same time.

    Attributes:
        mirror: keeps other processes' states as these are; None where there are no others.

    Raises:
        InputError: a state is missing, unknown, not what its spec declares, or shares memory with
            another.
    """

    def __init__(
        self,
        specs: tuple[StateSpec, ...],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        if not isinstance(tensors, Mapping):
            raise InputError(
                f"expected states by name, got a {type(tensors).__name__}", where="states"
            )
        _check_names([spec.name for spec in specs], list(tensors))
        sizes = _sizes(specs, tensors)
        for spec in specs:
            shape = resolve(spec.shape, sizes)
            check_tensor(spec.name, spec.dtype, shape, tensors[spec.name], device)
        _check_apart({spec.name: tensors[spec.name] for spec in specs})
        self.specs = specs
        self.sizes = sizes
        self.device = device
        self.mirror: Mirror | None = None
        self._tensors = {spec.name: tensors[spec.name] for spec in specs}

    @classmethod
    def zeros(
        cls,
        specs: tuple[StateSpec, ...],
        device: torch.device,
        sizes: Mapping[str, int] | None = None,
    ) -> States:
        """New states, all zero; `sizes` are those of dynamic dimensions, if there are any."""
        tensors = {
            spec.name: _zeros(resolve(spec.shape, sizes or {}), torch_dtype(spec.dtype), device)
            for spec in specs
        }
        return cls(specs, tensors, device)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in the order of the signature."""
        return list(self._tensors.values())

    def zero_(self) -> None:
        """Sets every state to zero, in place."""
        if self.mirror is not None:
            self.mirror.zero(self.tensors())
        for tensor in self._tensors.values():
            tensor.zero_()

    def clear_(self, axis: int, places: Sequence[int]) -> None:
        """Sets some places of an axis, such as pages of a pool, to zero in every state."""
        if self.mirror is not None:
            self.mirror.clear(self.tensors(), axis, places)
        index = torch.tensor(places, device=self.device)
        for tensor in self._tensors.values():
            tensor.index_fill_(axis, index, 0)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU in large pages of memory, where the system has them.

    What a step reads lies all over a pool, and each small page would have to be looked up.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and num_bytes >= LARGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system that refuses
            memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def _sizes(specs: tuple[StateSpec, ...], tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sizes of dynamic dimensions, as the first state that has them shows."""
    sizes: dict[str, int] = {}
    for spec in specs:
        shape = getattr(tensors[spec.name], "shape", ())
        for declared, size in zip(spec.shape, shape, strict=False):
            if isinstance(declared, str):
                sizes.setdefault(declared, int(size))
        for declared in spec.shape:
            if isinstance(declared, str):
                sizes.setdefault(declared, 0)
    return sizes


def as_tensor(name: str, dtype: str, value: Any) -> torch.Tensor:
    """A number, or nested lists of them, as a tensor of the dtype; tensors pass unchanged.

    Raises:
        InputError: not numbers, or the dtype cannot hold them exactly (a fraction, a truth value
            or a number beyond the range, for an integer).
    """
    if isinstance(value, torch.Tensor):
        return value
    wanted = torch_dtype(dtype)
    refusal = InputError(f"expected {dtype} numbers, got {value!r:.60}", where=name)
    try:
        tensor = torch.tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as cause:
        raise refusal from cause
    if tensor.numel():
        is_number = tensor.dtype in _INTEGERS or tensor.dtype.is_floating_point
        if not is_number or (not wanted.is_floating_point and not _is_held(tensor, wanted)):
            raise refusal
    return tensor.to(wanted)


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
    if tensor.layout != torch.strided:
        raise InputError(f"{expected}, got layout {tensor.layout}", where=name)
    if tensor.dtype != torch_dtype(dtype):
        raise InputError(f"{expected}, got {_dtype_name(tensor.dtype)}", where=name)
    if shape is not None and tuple(tensor.shape) != shape:
        raise InputError(f"{expected}, got shape {show(tuple(tensor.shape))}", where=name)
    if tensor.device != device:
        raise InputError(f"{expected}, got one on {tensor.device}", where=name)
    if not tensor.is_contiguous():
        raise InputError(f"{expected}, got strides {tensor.stride()}", where=name)


def extremes(tensor: torch.Tensor) -> tuple[int, int]:
    """The smallest and the largest of some integers; of a single one in a tenth of the time."""
    if tensor.numel() == 1:
        return (only := int(tensor)), only
    smallest, largest = tensor.aminmax()
    return int(smallest), int(largest)


def _is_held(tensor: torch.Tensor, wanted: torch.dtype) -> bool:
    if tensor.dtype not in _INTEGERS:
        return False
    limits = torch.iinfo(wanted)
    smallest, largest = extremes(tensor)
    return limits.min <= smallest and largest <= limits.max


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return BY_TORCH[name].name if name in BY_TORCH else name


def _check_names(expected: list[str], given: list[str]) -> None:
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    if missing or unknown:
        raise InputError(
            f"expected {len(expected)} states; missing: {_some(missing)}; unknown: {_some(unknown)}",
            where="states",
            hint="pass entry.new_states()",
        )


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    return str(names[0]) if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _check_apart(tensors: Mapping[str, torch.Tensor]) -> None:
    """Each state is written in place: memory of two would hold the last one's content."""
    extents = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in tensors.items()
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(extents):
        if start and start < end:  # tensors without memory begin at 0
            raise InputError(f"shares memory with `{first}`", where=second)
