"""Calls of kernels of our own in the code that Inductor writes.

A kernel is C++ that is compiled into the program with Inductor's own, so that nothing has to be
found or linked when the program runs. Its source depends on dtypes and fixed sizes alone: calls that
have the same source share one function.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP

Call = Sequence[tuple[str, str]]
"""Types and names of a function's parameters."""


def headers(*names: str) -> str:
    """The text of headers in `kernels`, which need nothing but each other and Inductor's own."""
    folder = files("llama_export.lower") / "kernels"
    return "".join((folder / f"{name}.h").read_text(encoding="utf-8") for name in names)


class Kernel(ir.ExternKernelOut):
    """One call of a kernel: its inputs, then `counts` (numbers or symbols), then the result.

    Inputs are made contiguous.
    """

    def __init__(
        self,
        inputs: Sequence[ir.TensorBox],
        size: Sequence[Any],
        counts: Sequence[Any] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        realized = [ir.ExternKernel.realize_input(node) for node in inputs]
        nodes = [ir.ExternKernel.require_contiguous(node) for node in realized]
        layout = ir.FixedLayout(inputs[0].get_device_or_error(), dtype, list(size))
        super().__init__(layout, nodes, constant_args=tuple(counts))

    @abstractmethod
    def source(
        self, dtypes: Sequence[str], sizes: Sequence[Sequence[Any]]
    ) -> tuple[str, Call, str]:
        """What the function needs before it, its parameters, and its body, for inputs of these dtypes."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call, and the function if no earlier call has the same source."""
        nodes: list[Any] = list(self.inputs)
        dtypes = [DTYPE_TO_CPP[node.get_dtype()] for node in nodes]
        before, parameters, body = self.source(dtypes, [node.get_size() for node in nodes])
        signature = ", ".join(f"{kind} {name}" for kind, name in parameters)
        key = f"{before}({signature}){body}"
        name = wrapper.src_to_kernel.get(key)
        if name is None:
            name = f"llama_{type(self).__name__.lower()}_{wrapper.next_kernel_suffix()}"
            wrapper.src_to_kernel[key] = name
            head = f'extern "C" void {name}({signature})'
            text = f"#include <torch/csrc/inductor/cpp_prefix.h>\n{before}\n{head}\n{body}"
            wrapper.define_kernel(name, text, gpu=False, cpp_definition=f"{head};\n")
        arguments = [node.codegen_reference() for node in nodes]
        arguments += [wrapper.codegen_sizevar(count) for count in self.constant_args]
        wrapper.generate_kernel_call(
            name,
            [*arguments, self.get_name()],
            triton=False,
            arg_types=[kind for kind, _ in parameters],
        )
