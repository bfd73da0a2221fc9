"""Counts the launches of our kernels in the graphs that AOTInductor would compile, and what they write.

As a script; it prints them by entry. Programs are traced and their operators replaced as for a
device, then brought into the form that Inductor takes, for which no device is needed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import torch
from torch._functorch.aot_autograd import aot_export_module
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
)
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from llama_export.lower.cuda import with_kernels
from llama_export.trace import trace
from tests.exporter.test_cuda_kernels import CUDA, job


class AnyDevice:
    """For Triton, which asks for a device when torch wants to know what a kernel writes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


ENTRIES = ("decode", "decode_paged")


def launches(entry: str) -> Counter[str]:
    module = with_kernels(trace(job(entry, CUDA))).graph_module
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    compiled, _ = aot_export_module(module, inputs, trace_joint=False)
    found: Counter[str] = Counter()
    for node in compiled.graph.nodes:
        if node.target is triton_kernel_wrapper_functional:
            kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            written = " ".join(sorted(node.kwargs["tensors_to_clone"]))
            found[f"{kernel.fn.__name__} writes {written}"] += 1
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    driver.set_active(AnyDevice())
    sys.stdout.write(json.dumps({entry: launches(entry) for entry in ENTRIES}))
