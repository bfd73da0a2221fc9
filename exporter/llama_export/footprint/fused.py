"""The peak of a compiled program's own memory, by the liveness of the buffers in its schedule.

AOTInductor fuses: what one loop makes and the same loop reads needs no memory. So the program is
given to Inductor as a build does it, up to the schedule of its loops, and no code is generated. The
schedule says which buffers are left; their sizes are formulas over the call's dimensions. A loop may
write over a buffer of the same size that it reads last, as in a softmax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._inductor import aoti_compile_and_package, ir
from torch._inductor import config as inductor_config
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    NopKernelSchedulerNode,
    OutputNode,
    SchedulerBuffer,
)
from torch._inductor.virtualized import V
from torch.export import ExportedProgram

from llama_artifacts.errors import BuildError
from llama_artifacts.signature import Signature, StateSpec, TensorSpec
from llama_export.footprint.call import Call
from llama_export.trace import as_kind

_OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    "cpp.dynamic_threads": True,
    "fx_graph_cache": False,
}
"""As in a build, as far as the schedule depends on them."""


@dataclass(frozen=True)
class Step:
    """One loop or library call.

    Attributes:
        name: Inductor's.
        made: bytes of the buffers that it allocates.
        inside: the schedule of its body, if it is a loop of the program itself, and None.
        carried: bytes of what such a body hands from turn to turn.
        freed: bytes of the buffers that nothing needs after it.
    """

    name: str
    made: sympy.Expr
    freed: sympy.Expr
    inside: tuple[Step, ...] = ()
    carried: sympy.Expr | int = 0


@dataclass(frozen=True)
class Schedule:
    """A program's steps in order, and which of its symbols is which dimension.

    A symbol that is no dimension is a position that the program reads back as a number.
    """

    steps: tuple[Step, ...]
    dims: Mapping[sympy.Symbol, str]

    def peak(self, call: Call) -> int:
        """Most bytes alive at once in one call, results among them."""
        sizes = call.all_sizes

        def number(expression: sympy.Expr | int) -> int:
            expression = sympy.sympify(expression)
            values = {
                symbol: sizes[self.dims[symbol]] if symbol in self.dims else call.position
                for symbol in expression.free_symbols
            }
            return int(expression.subs(values))

        def most(steps: Sequence[Step]) -> int:
            live = highest = 0
            for step in steps:
                live += number(step.made)
                inside = number(step.carried) + most(step.inside) if step.inside else 0
                highest = max(highest, live + inside)
                live -= number(step.freed)
            return highest

        return most(self.steps)


class _Scheduled(Exception):  # noqa: N818 - ends a compilation that has told what was asked
    pass


def schedule(program: ExportedProgram, signature: Signature) -> Schedule:
    """Inductor's schedule of a program for its own device; the program is used up.

    Args:
        program: traced on fake weights.
        signature: of the program.

    Raises:
        BuildError: Inductor cannot compile it.
    """
    # Compiling reads no constant up to here, but it refuses fake ones.
    for name, fake in program.state_dict.items():
        program.state_dict[name] = as_kind(fake, torch.empty(fake.shape, dtype=fake.dtype))
    reader = _Reader(signature)
    with inductor_config.patch(_OPTIONS | {"_post_fusion_custom_pass": reader}):
        try:
            aoti_compile_and_package(program, package_path="unused.pt2")
        except (RuntimeError, _Scheduled) as cause:  # Inductor's own types derive from it
            if reader.schedule is None:
                reason = next(iter(str(cause).splitlines()), "no reason")
                raise BuildError(f"Inductor cannot compile it: {reason}") from cause
    assert reader.schedule is not None
    return reader.schedule


class _Reader:
    """Takes the schedule where Inductor would let it be changed, and ends the compilation."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._bodies: list[tuple[Step, ...]] = []
        self._depth = 0
        self.schedule: Schedule | None = None

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        steps = self._steps(nodes)
        if self._depth:
            self._bodies.append(steps)
            return nodes
        self.schedule = Schedule(steps, self._dims())
        raise _Scheduled

    def _dims(self) -> dict[sympy.Symbol, str]:
        boxes = [box for box in V.graph.graph_inputs.values() if isinstance(box, ir.TensorBox)]
        declared: list[TensorSpec | StateSpec] = [
            *self._signature.inputs,
            *self._signature.states,
        ]
        assert len(boxes) == len(declared), (len(boxes), len(declared))
        return {
            size: name
            for box, spec in zip(boxes, declared, strict=True)
            for size, name in zip(box.get_size(), spec.shape, strict=True)
            if isinstance(name, str)
        }

    def _steps(self, nodes: Sequence[BaseSchedulerNode]) -> tuple[Step, ...]:
        plan = _Plan(nodes)
        return tuple(
            Step(
                node.get_name(),
                sympy.Add(*plan.made[index]),
                sympy.Add(*plan.freed[index]),
                *self._body(node),
            )
            for index, node in enumerate(nodes)
        )

    def _body(self, node: BaseSchedulerNode) -> tuple[tuple[Step, ...], sympy.Expr | int]:
        loop = node.node
        if not isinstance(loop, ir.WhileLoop):
            return (), 0
        assert loop.body_subgraph is not None
        assert loop.carried_inputs is not None
        graph = loop.body_subgraph.graph
        assert graph is not None
        self._depth += 1
        with V.set_graph_handler(graph):
            graph._update_scheduler()
        self._depth -= 1
        carried = sympy.Add(*map(_num_bytes, loop.carried_inputs))
        return self._bodies.pop(), carried


class _Plan:
    """Which buffers each node of a schedule allocates, and which end with it."""

    def __init__(self, nodes: Sequence[BaseSchedulerNode]) -> None:
        self._nodes = nodes
        self._place = {
            part.get_name(): index for index, node in enumerate(nodes) for part in node.get_nodes()
        }
        self._buffers = {
            buffer.get_name(): buffer for node in nodes for buffer in node.get_outputs()
        }
        self.made: list[list[sympy.Expr]] = [[] for _ in nodes]
        self.freed: list[list[sympy.Expr]] = [[] for _ in nodes]
        starts, ends = self._spans()
        left: dict[str, sympy.Expr] = {}
        for name, start in starts.items():
            if start == ends[name] and len(nodes[start].get_nodes()) > 1:
                continue  # made and read by one fused loop
            size = _num_bytes(self._buffers[name].node)
            heir = self._overwritten(size, start, ends, left)
            if heir is None:
                self.made[start].append(size)
            else:  # its memory goes over, so it does not end
                self.freed[start].remove(left.pop(heir))
            left[name] = size
            if ends[name] < len(nodes):
                self.freed[ends[name]].append(size)

    def _spans(self) -> tuple[dict[str, int], dict[str, int]]:
        """First and last node of every buffer that has memory of its own; results never end."""
        starts: dict[str, int] = {}
        ends: dict[str, int] = {}
        for index, node in enumerate(self._nodes):
            for buffer in node.get_outputs():
                owner = self._owner(buffer)
                if owner is None:
                    continue
                starts.setdefault(owner, index)
                uses = [self._index(user.node) for user in buffer.users if not user.is_weak]
                ends[owner] = max(index, ends.get(owner, 0), *uses)
        return starts, ends

    def _owner(self, buffer: SchedulerBuffer) -> str | None:
        """The buffer whose memory this one is; None: it has none, or that of an argument."""
        layout = buffer.node.maybe_get_layout() if buffer.node is not None else None
        if isinstance(layout, ir.NonOwningLayout):
            return str(layout.view.get_name())
        if isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
            name = V.graph.scheduler.mutation_real_name.get(buffer.get_name(), "")
            return name if name in self._buffers else None
        return buffer.get_name() if isinstance(layout, ir.Layout) else None

    def _index(self, user: BaseSchedulerNode | OutputNode) -> int:
        return self._place.get(user.get_name(), len(self._nodes))

    def _overwritten(
        self, size: sympy.Expr, place: int, ends: Mapping[str, int], left: Mapping[str, sympy.Expr]
    ) -> str | None:
        """A buffer of this size that a loop reads last, element by element, or None."""
        node = self._nodes[place]
        if node.is_extern() or isinstance(node, NopKernelSchedulerNode):
            return None
        order = [part.get_name() for part in node.get_nodes()]
        for name, other in left.items():
            buffer = self._buffers[name]
            uses = [user for user in buffer.users if self._index(user.node) == place]
            if other != size or ends[name] != place or not uses:
                continue
            # Of several parts of a fused loop that read it, the last one decides.
            last = max(uses, key=lambda user: order.index(user.get_name()))
            if last.can_inplace and not isinstance(buffer.defining_op, NopKernelSchedulerNode):
                return name
        return None


def _num_bytes(node: Any) -> sympy.Expr:
    layout = node.get_layout()
    return layout.storage_size() * layout.dtype.itemsize
