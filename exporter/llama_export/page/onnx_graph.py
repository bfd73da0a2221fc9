"""The graph of an ONNX program, without its weights.

An ONNX graph does not name modules, but the weights are named after them: an operator belongs
where the weights that it reads belong, and else where the latest of its inputs that are of a module
was made. A weight that is read again when its module is past, as a tied head's is, tells nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from llama_artifacts.dtypes import BY_ONNX
from llama_artifacts.errors import IntegrityError
from llama_artifacts.signature import Signature, show
from llama_export.page.graph import Graph, Op

_LAYER = re.compile(r"(.*?\.[0-9]+)\.(.*)")


def read_onnx(path: Path, signature: Signature) -> Graph:
    """The graph of a program whose weights are outside.

    Raises:
        IntegrityError: not an ONNX model, or its outputs are not the signature's.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, ValueError, OSError) as cause:
        raise IntegrityError("not an ONNX model", where=path) from cause
    graph = model.graph
    outputs = [value.name for value in graph.output]
    wanted = [spec.name for spec in signature.outputs]
    if missing := [name for name in wanted if name not in outputs]:
        raise IntegrityError(f"expected the output `{missing[0]}`, got none", where=path)
    return _Reader(graph, signature).graph()


class _Reader:
    def __init__(self, graph: Any, signature: Signature) -> None:
        self._graph = graph
        self._signature = signature
        self._weights = {
            tensor.name
            for tensor in graph.initializer
            if any(entry.key == "location" for entry in tensor.external_data)
        }
        self._states = {f"state.{spec.name}": spec.name for spec in signature.states}
        # Where values were made, later ones with higher numbers, and the modules in order.
        self._made: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._begun: list[str] = []
        self._shapes = {
            value.name: _shape(value.type.tensor_type)
            for value in (*graph.value_info, *graph.output)
        }

    def graph(self) -> Graph:
        ops = [self._op(node) for node in self._graph.node]
        inputs, outputs = (
            tuple((spec.name, spec.name, f"{spec.dtype} {show(spec.shape)}") for spec in specs)
            for specs in (self._signature.inputs, self._signature.outputs)
        )
        return Graph(inputs, outputs, tuple(ops))

    def _op(self, node: Any) -> Op:
        weights = tuple(name for name in node.input if name in self._weights)
        modules = self._place(node, weights)
        if modules:
            self._made |= dict.fromkeys(node.output, (len(self._made), modules))
        return Op(
            target=node.op_type,
            modules=modules,
            reads=tuple(name for name in node.input if name and name not in self._weights),
            outputs=tuple((name, self._shapes.get(name, "")) for name in node.output if name),
            weights=weights,
            states=tuple(self._states[name] for name in node.input if name in self._states),
        )

    def _place(self, node: Any, weights: tuple[str, ...]) -> tuple[str, ...]:
        if not weights:
            before = [self._made[name] for name in node.input if name in self._made]
            return max(before)[1][:1] if before else ()
        modules = _modules(weights[0])
        if modules[0] in self._begun and modules[0] != self._begun[-1]:
            return ()
        self._begun.append(modules[0])
        return modules


def _modules(weight: str) -> tuple[str, ...]:
    """`model.layers.0` and `model.layers.0.mlp.up_proj` of `model.layers.0.mlp.up_proj.weight`."""
    module = weight.rpartition(".")[0]
    match = _LAYER.fullmatch(module)
    return (module,) if match is None else (match[1], module)


def _shape(kind: Any) -> str:
    from onnx import TensorProto

    row = BY_ONNX.get(TensorProto.DataType.Name(kind.elem_type))
    sizes = [dim.dim_param or str(dim.dim_value) for dim in kind.shape.dim]
    return f"{row.name if row else '?'} {show(sizes)}"
