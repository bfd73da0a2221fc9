"""The peak of a program's own memory, by the liveness of storages over its exported graph.

Every operator is asked, on tensors without data ("meta"), what it would make of the call's shapes.
So torch itself says which results are views: a storage counts once, however many tensors share it,
from the operator that makes it to the last use of any of them. That is how the graph is executed
by torch's own operators, which drop a value after its last use. Inputs, weights and states belong to
the caller and count nothing, however they are viewed or written in place; what one operator makes
and drops inside itself counts while it runs. Scratch memory that a kernel takes without torch's
knowledge is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llama_artifacts.errors import BuildError
from llama_artifacts.signature import StateSpec, TensorSpec, resolve
from llama_export.footprint.call import Call
from llama_runtime.states import torch_dtype

_ATEN = torch.ops.aten
_CHECKS = (_ATEN._assert_tensor_metadata.default, _ATEN._assert_scalar.default)
"""They make nothing, and a tensor without data has another device than they ask for."""


@dataclass(frozen=True)
class Peak:
    """The most memory that is alive at once.

    Attributes:
        num_bytes: of all storages that the program made and still needs, results among them.
        node: name of the operator that runs then; empty where nothing is made.
    """

    num_bytes: int
    node: str


class ProgramGraph:
    """A program's graph, ready to be measured for any sizes; the program is used up by it."""

    def __init__(self, program: ExportedProgram) -> None:
        moved = move_to_device_pass(program, "meta")
        self._graph: GraphModule = moved.graph_module
        bound = moved.graph_signature
        self._weights = {*bound.inputs_to_parameters, *bound.inputs_to_buffers}

    def peak(self, call: Call) -> Peak:
        """The peak of one call, whose sizes need not be those that the graph was traced with.

        Raises:
            BuildError: the graph cannot be followed for this call.
        """
        signature = call.signature
        declared: list[TensorSpec | StateSpec] = [*signature.inputs, *signature.states]
        called = iter(
            torch.empty(
                resolve(spec.shape, call.sizes), dtype=torch_dtype(spec.dtype), device="meta"
            )
            for spec in declared
        )
        arguments = [
            _like(node.meta["val"]) if node.name in self._weights else next(called)
            for node in self._inputs()
        ]
        try:
            return peak_of(self._graph, arguments, call.position)
        except (
            RuntimeError,
            TypeError,
            ValueError,
            IndexError,
        ) as cause:  # whatever an operator refuses
            reason = next(iter(str(cause).splitlines()), type(cause).__name__)
            shown = ", ".join(f"{name}={size}" for name, size in call.sizes.items()) or "its sizes"
            raise BuildError(
                f"the graph cannot be followed for {shown}: {reason}",
                hint="this is a fault of llama-export; report it",
            ) from cause

    def _inputs(self) -> Iterator[Node]:
        return (node for node in self._graph.graph.nodes if node.op == "placeholder")


def peak_of(graph: GraphModule, arguments: Sequence[Tensor], position: int) -> Peak:
    """The peak of one call of a graph whose operators make tensors without data.

    Args:
        graph: torch's graph, all devices "meta".
        arguments: of its placeholders, on the device "meta"; their storages count nothing.
        position: what `item` reads.
    """
    return _Sweep(graph, arguments, position).run()


def _like(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


class _Made(TorchDispatchMode):
    """Notes every storage that an operator gives, those inside a composed operator among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.storages |= _storages(result)
        return result


def _storages(value: Any) -> dict[int, torch.UntypedStorage]:
    found = (leaf.untyped_storage() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return {storage._cdata: storage for storage in found}


class _Sweep:
    """One pass over the nodes in their order."""

    def __init__(self, graph: GraphModule, arguments: Sequence[Tensor], position: int) -> None:
        self._graph = graph
        self._arguments = iter(arguments)
        self._position = position
        self._values: dict[Node, Any] = {}
        self._holders: Counter[int] = Counter()
        self._outside = _storages(list(arguments))
        # Storages stay referenced, so that no two of a pass have one address.
        self._known: dict[int, torch.UntypedStorage] = dict(self._outside)
        self._live = 0
        self.peak = Peak(0, "")
        self.result: Any = None

    def run(self) -> Peak:
        nodes = list(self._graph.graph.nodes)
        dying = _last_uses(nodes)
        for node in nodes:
            self._step(node)
            for dead in dying.get(node, ()):
                self._drop(dead)
        return self.peak

    def _step(self, node: Node) -> None:
        inside = 0
        if node.op == "placeholder":
            value = next(self._arguments)
        elif node.op == "get_attr":
            value = getattr(self._graph, str(node.target))
        elif node.op == "output":
            self.result = self._taken(node.args[0])
            return
        else:
            value, inside = self._call(node)
        self._hold(node, value)
        if self._live + inside > self.peak.num_bytes:
            self.peak = Peak(self._live + inside, node.name)

    def _call(self, node: Node) -> tuple[Any, int]:
        """What a node gives, and the bytes that live only while it runs."""
        if node.target in _CHECKS:
            return None, 0
        args, kwargs = self._taken((node.args, node.kwargs))
        if node.target is _ATEN.item.default:
            return self._position, 0
        if node.target is torch.ops.higher_order.while_loop:
            return self._loop(*args)
        assert callable(node.target)
        with _Made() as made:
            value = node.target(*args, **kwargs)
        mine = _storages(value)
        inner = {key: made.storages[key] for key in made.storages.keys() - mine.keys()}
        new = inner.keys() - self._known.keys()
        self._known |= inner
        return value, sum(inner[key].nbytes() for key in new)

    def _loop(
        self, _: GraphModule, body: GraphModule, carried: Sequence[Tensor], fixed: Sequence[Tensor]
    ) -> tuple[Any, int]:
        """What a loop carries at its end, and the most that a turn of it adds to that.

        From its second turn on, what the turn before it gave is there too: as large as the result.
        The condition makes a few numbers, which do not count.
        """
        turn = _Sweep(body, [*carried, *fixed], self._position)
        inside = turn.run().num_bytes
        return turn.result, inside

    def _taken(self, argument: Any) -> Any:
        return map_arg(argument, lambda node: self._values[node])

    def _hold(self, node: Node, value: Any) -> None:
        self._values[node] = value
        for key, storage in _storages(value).items():
            if key in self._outside:
                continue
            if not self._holders[key]:
                self._live += storage.nbytes()
                self._known[key] = storage
            self._holders[key] += 1

    def _drop(self, node: Node) -> None:
        for key, storage in _storages(self._values.pop(node)).items():
            if key in self._outside:
                continue
            self._holders[key] -= 1
            if not self._holders[key]:
                self._live -= storage.nbytes()


def _last_uses(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Which values nobody needs after a node; what no node uses ends where it is made."""
    order = {node: index for index, node in enumerate(nodes)}
    dying: dict[Node, list[Node]] = {}
    for node in nodes:
        if node.op == "output":
            continue
        last = max(node.users, key=order.__getitem__, default=node)
        dying.setdefault(last, []).append(node)
    return dying
