"""An entry as a callable that checks every input before the program runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from llama_artifacts.errors import InputError, IntegrityError
from llama_artifacts.manifest import Program as ProgramRecord
from llama_artifacts.signature import Signature, check_values, resolve
from llama_runtime.buckets import calls_of_padding
from llama_runtime.cuda_graphs import GraphProgram
from llama_runtime.mirror import Mirror
from llama_runtime.programs.base import Program
from llama_runtime.states import States, as_tensor, check_tensor, extremes, torch_dtype

_CPU = torch.device("cpu")


def bind_inputs(
    signature: Signature, inputs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], dict[str, int]]:
    """The inputs as tensors in the signature's order, and the sizes that they give dimensions.

    Raises:
        InputError: one is missing, unknown, no numbers, or of another shape than declared.
    """
    tensors = {
        spec.name: as_tensor(spec.name, spec.dtype, inputs[spec.name])
        for spec in signature.inputs
        if spec.name in inputs
    }
    shapes = {name: tuple(tensors[name].shape) if name in tensors else () for name in inputs}
    sizes = signature.bind(shapes)
    return [tensors[spec.name] for spec in signature.inputs], sizes


def check_inputs(
    signature: Signature, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int]
) -> None:
    """Refuses bound inputs that a program would misread.

    Raises:
        InputError: another dtype, device or layout than declared, or a value out of its bounds.
    """
    for spec, tensor in zip(signature.inputs, tensors, strict=True):
        check_tensor(spec.name, spec.dtype, None, tensor, _CPU)
        if spec.values is not None:
            check_values(spec, *extremes(tensor), sizes)


class Variant:
    """A program for calls in which some dimensions have given sizes, loaded when one comes."""

    def __init__(self, sizes: Mapping[str, int], load: Callable[[], Program]) -> None:
        self.sizes = sizes
        self._load = load

    @cached_property
    def program(self) -> Program:
        """The program."""
        return self._load()


class Entry:
    """One entry of a loaded bundle; a call is run by the most specific program that fits it.

    Call it with the states (if it has any) and every input by name. Inputs are CPU tensors of the
    declared dtype, or numbers and lists, which are converted; they are uploaded where the program
    runs elsewhere. The result is the output tensor, or a tuple where there are several; results
    are new tensors of the caller's. States are written in place. Calls must not overlap.

    Raises:
        InputError: an input or state is not what the signature declares, or a value (a token, a
            position) is out of its bounds. Nothing has run then.
        IntegrityError: the program ran and gave something else than the signature declares.
    """

    def __init__(
        self,
        record: ProgramRecord,
        program: Program,
        device: torch.device,
        variants: Sequence[Variant] = (),
        mirror: Mirror | None = None,
    ) -> None:
        self._record = record
        self._mirror = mirror
        self.name = record.entry
        self.format = record.format
        self.dtype = record.dtype
        self.signature: Signature = record.signature
        self.device = device
        self._program = program
        # Of those that fit a call, the one that fixes most.
        self._variants = sorted(variants, key=lambda variant: -len(variant.sizes))

    def new_states(self, **sizes: int) -> States:
        """States of this entry, all zero.

        Args:
            sizes: of the states' dynamic dimensions, such as `PoolPages=64` for a pool.

        Raises:
            InputError: a dimension is missing, unknown, or out of its range.
        """
        self._check_sizes(sizes)
        states = States.zeros(self.signature.states, self.device, sizes)
        if self._mirror is not None and self.signature.states:
            self._mirror.add(self._record, states)
        return states

    def __call__(
        self, states: Mapping[str, torch.Tensor] | None = None, /, **inputs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        outputs = self.run(states, inputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def run(
        self, states: Mapping[str, torch.Tensor] | None, inputs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """As a call, but always a list of outputs."""
        tensors, sizes = bind_inputs(self.signature, inputs)
        flat_states = self._checked(states, sizes)
        check_inputs(self.signature, tensors, sizes)
        flat = tensors if self.device == _CPU else [t.to(self.device) for t in tensors]
        outputs = self._fitting(sizes).run(flat, flat_states, sizes)
        self._check_outputs(outputs, sizes)
        return outputs

    def capture(self, states: Mapping[str, torch.Tensor] | None = None, /, **largest: int) -> int:
        """Captures a CUDA graph for every bucket up to these sizes, the largest first.

        Calls capture their buckets themselves; this takes that time before the first of them, and
        lets the largest graph lay out the memory that all share. Writes nothing but scratch.

        Args:
            states: those of the calls to come.
            largest: the largest sizes, such as `Rows=16, Pages=32`.

        Returns:
            How many buckets there are; 0 where calls run eagerly.

        Raises:
            InputError: the entry has no padding, such as `decode`, or a size is out of range.
        """
        calls = calls_of_padding(self.name, self.signature, largest)
        # Where several processes run it, the program is within the one that calls them.
        if not isinstance(getattr(self._program, "program", self._program), GraphProgram):
            return 0
        for inputs in calls:
            self.run(states, inputs)
        return len(calls)

    def _fitting(self, sizes: Mapping[str, int]) -> Program:
        for variant in self._variants:
            if variant.sizes.items() <= sizes.items():
                return variant.program
        return self._program

    def _check_outputs(self, outputs: list[torch.Tensor], sizes: Mapping[str, int]) -> None:
        found = [(output.dtype, tuple(output.shape)) for output in outputs]
        declared = [
            (torch_dtype(spec.dtype), resolve(spec.shape, sizes)) for spec in self.signature.outputs
        ]
        if found != declared:
            raise IntegrityError(
                f"`{self.name}` in {self.format} gave {found}, its signature declares {declared}",
                hint="build the bundle again",
            )

    def _checked(
        self, states: Mapping[str, torch.Tensor] | None, sizes: dict[str, int]
    ) -> list[torch.Tensor]:
        specs = self.signature.states
        if not specs:
            if states is not None and not (isinstance(states, Mapping) and len(states) == 0):
                raise InputError(
                    f"`{self.name}` has no states, got a {type(states).__name__}",
                    where="states",
                    hint="pass inputs by name",
                )
            return []
        if states is None:
            raise InputError(
                f"`{self.name}` needs its states", where="states", hint="pass entry.new_states()"
            )
        if not isinstance(states, States) or (states.specs, states.device) != (specs, self.device):
            states = States(specs, states, self.device)
        self._check_sizes(states.sizes)
        for name, size in states.sizes.items():
            if sizes.setdefault(name, size) != size:
                message = f"expected {name} = {sizes[name]} as in the inputs, got {size}"
                raise InputError(message, where="states")
        return states.tensors()

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        shapes = [spec.shape for spec in self.signature.states]
        needed = {size for shape in shapes for size in shape if isinstance(size, str)}
        if sizes.keys() != needed:
            expected = ", ".join(sorted(needed)) or "no sizes"
            given = ", ".join(sorted(sizes)) or "none"
            raise InputError(f"expected {expected} for new states, got {given}", where="states")
        for name, size in sizes.items():
            dim = self.signature.dim(name)
            if (
                isinstance(size, bool)
                or not isinstance(size, int)
                or not dim.min <= size <= dim.max
            ):
                message = f"expected {name} from {dim.min} to {dim.max}, got {size!r}"
                raise InputError(message, where="states")
