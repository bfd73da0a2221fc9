"""Gives the operators of a program for CUDA their kernels, which AOTInductor compiles into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

import llama_export.lower.cuda_cached
import llama_export.lower.cuda_products
import llama_export.model.cached
import llama_export.model.products  # noqa: F401  # operators
from llama_export.lower.cuda_cached import SPLIT

_ops: Any = torch.ops.llama_export


def with_kernels(program: ExportedProgram) -> ExportedProgram:
    """The same program, changed in place: each operator of ours becomes a call of its kernel."""
    changes: dict[Any, Callable[[Node], None]] = {
        _ops.products.default: _products,
        _ops.fp8_products.default: _fp8_products,
        _ops.attend_cached.default: _attend_cached,
    }
    for module in program.graph_module.modules():  # bodies of loops among them
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.target in changes:
                    changes[node.target](node)
            module.recompile()
    return program


def _products(node: Node) -> None:
    x, weights, scales, minima, is_rounded = node.args
    node.target = _ops.cuda_products.default
    node.args = (x, weights, scales, minima, is_rounded, False, _most_rows(x))


def _fp8_products(node: Node) -> None:
    x, weights, scales, is_exact, is_rounded = node.args
    node.target = _ops.cuda_products.default
    node.args = (x, weights, scales, [], is_rounded, is_exact, _most_rows(x))


def _attend_cached(node: Node) -> None:
    node.target = _ops.cuda_attend_cached.default
    node.args = (*node.args, SPLIT)


def _most_rows(x: Any) -> int:
    """The largest number of rows, which is known: else the operator would not be in the graph."""
    rows = x.meta["val"].shape[0]
    if isinstance(rows, int):
        return rows
    return int(rows.node.shape_env.bound_sympy(rows.node.expr).upper)
