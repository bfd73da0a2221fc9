"""The graph of an ExportedProgram, from the JSON in its archive: nothing is loaded or unpickled."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_artifacts.errors import IntegrityError
from llama_artifacts.signature import Signature, StateSpec, TensorSpec, show
from llama_export.page.graph import Graph, Op
from llama_runtime.programs.pt2_archive import read_archive

# The numbers of torch's serialized scalar types, by the manifest's names.
_DTYPES = {
    1: "u8",
    2: "i8",
    3: "i16",
    4: "i32",
    5: "i64",
    6: "f16",
    7: "f32",
    8: "f64",
    12: "bool",
    13: "bf16",
    29: "f8e4m3",
    30: "f8e5m2",
}
_CHECKS = re.compile(r"torch\.ops\.aten\._assert_.*|_operator\.(ge|gt|le|lt|eq|ne)")
_SYMBOL = re.compile(r"Symbol\('(\w+)'[^)]*\)|Integer\((-?\d+)\)")
# What torch writes for operators that its own passes add.
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
_INNER_ROOT = "_export_root."  # the model's name within the graph of a loop
_TERM = re.compile(r"(Mul|Add)\((-?[\w.]+), (-?[\w.]+)\)")


def read_pt2(path: Path, signature: Signature, *, is_sharded: bool = False) -> Graph:
    """The graph of a weightless program, which calls other processes where it is sharded.

    Raises:
        IntegrityError: not such an archive, or its graph is not what the signature says.
    """
    with zipfile.ZipFile(read_archive(path, is_sharded=is_sharded)) as archive:
        module = json.loads(archive.read("program/models/model.json"))["graph_module"]
    try:
        return _Reader(module, signature).graph()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as cause:
        raise IntegrityError("its graph cannot be read", where=path) from cause


@dataclass(frozen=True)
class _Scope:
    """A graph of the program: the whole, or one that an operator such as a loop runs.

    Attributes:
        values: what the file says of each tensor, by its name in this graph.
        outer: what the inputs of an inner graph are called outside.
        prefix: keeps the names of graphs apart.
        modules: the modules that the graph is within.
    """

    values: Mapping[str, Any]
    outer: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    modules: tuple[str, ...] = ()

    def name(self, name: str) -> str:
        """The name of a value, unique in the program."""
        return self.outer.get(name, f"{self.prefix}{name}")


class _Reader:
    def __init__(self, module: Mapping[str, Any], signature: Signature) -> None:
        self._graph = module["graph"]
        self._results = module["signature"]["output_specs"]
        self._signature = signature
        self._weights: dict[str, str] = {}
        called: list[str] = []
        for spec in module["signature"]["input_specs"]:
            ((kind, value),) = spec.items()
            if kind == "user_input":
                called.append(value["arg"]["as_tensor"]["name"])
            else:  # a parameter, a buffer or a constant
                name = next(value[key] for key in value if key.endswith("_name"))
                self._weights[value["arg"]["name"]] = name
        declared: tuple[TensorSpec | StateSpec, ...] = (*signature.inputs, *signature.states)
        self._called = dict(zip(called, declared, strict=True))
        self._states = {name for name, spec in self._called.items() if spec in signature.states}
        self._symbols = dict(self._find_symbols())
        self._ops: list[Op] = []
        self._writes: dict[int, str] = {}
        self._num_checks = 0

    def graph(self) -> Graph:
        inputs = tuple(
            (name, spec.name, f"{spec.dtype} {show(spec.shape)}")
            for name, spec in self._called.items()
            if name not in self._states
        )
        scope = _Scope(self._graph["tensor_values"])
        for node in self._graph["nodes"]:
            self._add(node, scope)
        outputs = tuple(self._outputs())
        return Graph(inputs, outputs, tuple(self._ops), self._num_checks, self._writes)

    def _add(self, node: Mapping[str, Any], scope: _Scope) -> None:
        """Appends a call, after those of the graphs that it runs."""
        if _CHECKS.fullmatch(node["target"]):
            self._num_checks += 1
            return
        names = [name for item in node["inputs"] for name in _names(item["arg"])]
        reads = [scope.name(name) for name in names]
        for inner in _subgraphs(node["inputs"]):
            reads += self._add_inner(inner, reads[: len(names)], scope)
        if _is_in_place(node["target"]):
            self._writes[len(self._ops)] = reads[0]
        own = _modules(node["metadata"].get("nn_module_stack", ""))
        within = f"{scope.modules[-1]}." if scope.modules else ""
        reads = list(dict.fromkeys(reads))
        self._ops.append(
            Op(
                target=_short(node["target"]),
                modules=(*scope.modules, *(f"{within}{name}" for name in own)),
                reads=tuple(name for name in reads if name not in self._weights),
                outputs=tuple(
                    (scope.name(name), self._shape(scope.values.get(name)))
                    for item in node["outputs"]
                    for name in _names(item)
                ),
                weights=tuple(self._weights[name] for name in reads if name in self._weights),
                states=tuple(self._called[name].name for name in reads if name in self._states),
            )
        )

    def _add_inner(self, inner: Mapping[str, Any], reads: list[str], scope: _Scope) -> list[str]:
        """Appends the calls of an inner graph; returns the names of its results."""
        graph, label = inner["graph"], f"{scope.prefix}{inner['name']}"
        inputs = [name for item in graph["inputs"] for name in _names(item)]
        outer = dict(zip(inputs, reads, strict=True))
        inside = _Scope(graph["tensor_values"], outer, f"{label}/", (*scope.modules, label))
        for node in graph["nodes"]:
            self._add(node, inside)
        return [inside.name(name) for item in graph["outputs"] for name in _names(item)]

    def _outputs(self) -> Iterator[tuple[str, str, str]]:
        results = [
            spec["user_output"]["arg"]["as_tensor"]["name"]
            for spec in self._results
            if "user_output" in spec
        ]
        for spec, value in zip(self._signature.outputs, results, strict=True):
            yield value, spec.name, f"{spec.dtype} {show(spec.shape)}"

    def _find_symbols(self) -> Iterator[tuple[str, str]]:
        """What torch calls a dynamic dimension, and what the manifest calls it."""
        values = self._graph["tensor_values"]
        for name, spec in self._called.items():
            for size, declared in zip(values[name]["sizes"], spec.shape, strict=True):
                match = _SYMBOL.fullmatch(size.get("as_expr", {}).get("expr_str", ""))
                if match is not None and match[1] and isinstance(declared, str):
                    yield match[1], declared

    def _shape(self, value: Mapping[str, Any] | None) -> str:
        if value is None:
            return "scalar"
        dtype = _DTYPES.get(value["dtype"], "?")
        return f"{dtype} {show([self._size(size) for size in value['sizes']])}"

    def _size(self, size: Mapping[str, Any]) -> str:
        if "as_int" in size:
            return str(size["as_int"])
        text = _SYMBOL.sub(
            lambda match: self._symbols.get(match[1], match[1]) if match[1] else match[2],
            size["as_expr"]["expr_str"],
        )
        term = _TERM.fullmatch(text)
        if term is not None:
            return f"{term[2]}{'*' if term[1] == 'Mul' else '+'}{term[3]}"
        return text if re.fullmatch(r"-?\w+", text) else "?"


def _is_in_place(target: str) -> bool:
    return target.startswith("torch.ops.aten.") and target.split(".")[3].endswith("_")


def _short(target: str) -> str:
    """`aten.linear` of `torch.ops.aten.linear.default`."""
    parts = target.removeprefix("torch.ops.").split(".")
    return ".".join(parts[:2]) if target.startswith("torch.ops.") else parts[-1]


def _modules(stack: str) -> tuple[str, ...]:
    names = (item.split(",")[1] for item in stack.split(";") if item.count(",") >= 2)
    names = (f"{name}.".removeprefix(_INNER_ROOT)[:-1] for name in names)
    return tuple(dict.fromkeys(name for name in names if name and name != _NO_MODULE))


def _names(value: Any) -> Iterator[str]:
    """The values that an argument or a result names, in whatever it is wrapped."""
    if isinstance(value, list):
        for item in value:
            yield from _names(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in ("as_tensor", "as_sym_int", "as_sym_float", "as_sym_bool"):
                name = item.get("name", item.get("as_name"))
                if isinstance(name, str):
                    yield name
            elif key == "as_tensors":
                yield from (tensor["name"] for tensor in item)
            elif key != "as_graph":
                yield from _names(item)


def _subgraphs(inputs: Any) -> Iterator[Any]:
    return (item["arg"]["as_graph"] for item in inputs if "as_graph" in item["arg"])
