"""A program's graph as the page shows it: operators within modules, equal layers only once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

_LAYER = re.compile(r"(.*\.)([0-9]+)")
_ANY = "*"


@dataclass(frozen=True)
class Op:
    """One call of an operator.

    Attributes:
        target: the operator, such as `aten.linear`.
        modules: the modules that it belongs to by full name, outermost first, the root aside.
        reads: names of the values that it takes from other operators or from the program's inputs.
        outputs: name, and `dtype [shape]` where the file says it, of each value it makes.
        weights: names of the weights that it takes.
        states: names of the states that it takes.
    """

    target: str
    modules: tuple[str, ...]
    reads: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]
    weights: tuple[str, ...] = ()
    states: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """The operators of a program in the order in which they run.

    Attributes:
        inputs, outputs: for each the value, its name as declared, and `dtype [shape]`.
        num_checks: assertions, which are left out.
        writes: for the operators that write in place, by index: the values written.
    """

    inputs: tuple[tuple[str, str, str], ...]
    outputs: tuple[tuple[str, str, str], ...]
    ops: tuple[Op, ...]
    num_checks: int = 0
    writes: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """Layers that follow each other and compute the same: the first stands for all."""

    prefix: str
    first: int
    last: int

    @property
    def module(self) -> str:
        """The name of the one module that is shown."""
        if self.first == self.last:
            return f"{self.prefix}{self.first}"
        return f"{self.prefix}{self.first}-{self.last}"


def to_dict(graph: Graph) -> dict[str, Any]:
    """The graph for the page's script.

    `nodes` are inputs, operators and outputs, in order; `sources` are indices of nodes; `path` is
    the modules' names, outermost first; `repeats` says how many equal layers a module stands for.
    """
    runs = _runs(graph)
    kept, stand_in = _folded(graph, runs)
    nodes: list[dict[str, Any]] = [
        {"kind": "input", "label": name, "path": [], "sources": [], "out": [shape]}
        for _, name, shape in graph.inputs
    ]
    producer = {value: index for index, (value, _, _) in enumerate(graph.inputs)}
    place: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        shown = stand_in.get(index, index)
        if shown == index:
            place[index] = len(nodes)
            nodes.append(_node(op, _sources(op.reads, producer), kept[index]))
        for name, _ in op.outputs:
            producer[name] = place[shown]
        if index in graph.writes:
            producer[graph.writes[index]] = place[shown]
    for value, name, shape in graph.outputs:
        sources = _sources([value], producer)
        nodes.append(
            {"kind": "output", "label": name, "path": [], "sources": sources, "out": [shape]}
        )
    repeats = {run.module: run.last - run.first + 1 for run in runs if run.last > run.first}
    return {
        "nodes": nodes,
        "repeats": repeats,
        "num_ops": len(graph.ops),
        "num_checks": graph.num_checks,
    }


def _node(op: Op, sources: list[int], modules: Sequence[str]) -> dict[str, Any]:
    node = {
        "kind": "op",
        "label": op.target,
        "path": list(modules),
        "sources": sources,
        "out": [shape for _, shape in op.outputs],
        "weights": list(op.weights),
        "states": list(op.states),
    }
    return {key: value for key, value in node.items() if value or key in ("path", "sources")}


def _sources(names: Iterable[str], producer: Mapping[str, int]) -> list[int]:
    return sorted({producer[name] for name in names if name in producer})


def _folded(graph: Graph, runs: Sequence[Run]) -> tuple[dict[int, tuple[str, ...]], dict[int, int]]:
    """The modules of each operator that is shown, and which one stands for each of the others."""
    layers = _by_layer(graph)
    stand_in: dict[int, int] = {}
    kept = {index: op.modules for index, op in enumerate(graph.ops)}
    for run in runs:
        first = layers[run.prefix, run.first]
        for index in first:
            old = f"{run.prefix}{run.first}"
            kept[index] = tuple(
                run.module + name[len(old) :] if _is_within(name, old) else name
                for name in kept[index]
            )
        for number in range(run.first + 1, run.last + 1):
            stand_in |= dict(zip(layers[run.prefix, number], first, strict=True))
    return kept, stand_in


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _by_layer(graph: Graph) -> dict[tuple[str, int], list[int]]:
    layers: dict[tuple[str, int], list[int]] = {}
    for index, op in enumerate(graph.ops):
        match = next(filter(None, map(_LAYER.fullmatch, op.modules)), None)
        if match is not None:
            layers.setdefault((match[1], int(match[2])), []).append(index)
    return layers


def _runs(graph: Graph) -> list[Run]:
    """The layers, with neighbours that compute the same together."""
    prints = {
        layer: tuple(_print(graph.ops[index], layer) for index in indices)
        for layer, indices in _by_layer(graph).items()
    }
    runs: list[Run] = []
    for prefix, group in groupby(sorted(prints), key=lambda layer: layer[0]):
        for _, number in group:
            last = runs[-1] if runs else None
            is_next = last is not None and (last.prefix, last.last + 1) == (prefix, number)
            if last is not None and is_next and prints[prefix, last.last] == prints[prefix, number]:
                runs[-1] = replace(last, last=number)
            else:
                runs.append(Run(prefix, number, number))
    return runs


def _print(op: Op, layer: tuple[str, int]) -> tuple[Any, ...]:
    """What is the same of an operator and of its counterpart in an equal layer."""
    own = f"{layer[0]}{layer[1]}"
    modules = tuple(_ANY + name[len(own) :] for name in op.modules)
    weights = tuple(name.replace(own, _ANY) for name in op.weights)
    shapes = tuple(shape for _, shape in op.outputs)
    return op.target, modules, weights, shapes, len(op.states), len(op.reads)
