"""An entry becomes an ExportedProgram, on fake tensors: no weight is read or allocated.

What must hold before: a declared signature and the dtype of every stored weight. What holds after:
the graph takes and gives exactly what was declared, every promised dimension is dynamic over its
whole range, every state is written, and no constant hides in the program.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import config as fx_config

from llama_artifacts.dtypes import from_name, from_torch
from llama_artifacts.errors import BuildError
from llama_artifacts.signature import Shape, Signature, TensorSpec, parts, resolve
from llama_export.checkpoint.config import LlamaConfig
from llama_export.checkpoint.layout import coded_modules
from llama_export.checkpoint.source import TensorInfo
from llama_export.entries.registry import EntrySpec
from llama_export.model.formulation import Formulation
from llama_export.model.llama import Llama

# Example sizes: at least 2, and such that no two sizes of one program are equal by accident.
_EXAMPLE_SIZES = (3, 5, 7, 11, 13, 2)


@dataclass(frozen=True)
class Job:
    """One program to make: which entry, how it is called, and how its mathematics is written.

    `stem` is how its file's name begins. Of a program that several processes run together, network
    and weights are those of one of them; `cuts` names the weights that are parts.
    """

    config: LlamaConfig
    spec: EntrySpec
    stem: str
    signature: Signature
    form: Formulation
    weights: Mapping[str, TensorInfo]
    cuts: Collection[str] = ()


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a manifest's dtype name."""
    dtype = getattr(torch, from_name(name).torch)
    assert isinstance(dtype, torch.dtype)
    return dtype


def as_kind(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new` as a parameter if `old` is one; a program's state dict must keep its kinds."""
    is_parameter = isinstance(old, torch.nn.Parameter)
    return torch.nn.Parameter(new, requires_grad=False) if is_parameter else new


@contextlib.contextmanager
def without_stack_traces() -> Iterator[None]:
    """Graphs made in the block do not say which lines of Python made them.

    That takes a fifth of the time of tracing and of lowering, half of a saved program, and tells of
    the build machine.
    """
    before = fx_config.do_not_emit_stack_traces
    fx_config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        fx_config.do_not_emit_stack_traces = before


def trace(job: Job, *, returns_states: bool = False) -> ExportedProgram:
    """Exports one entry.

    Args:
        job: what to trace.
        returns_states: append the written states to the results, for formats that have no
            mutation (ONNX).

    Raises:
        BuildError: the graph is not what the signature declares.
    """
    sizes = _example_sizes(job.signature)
    with FakeTensorMode(), torch.no_grad(), without_stack_traces():
        module = _module(job, returns_states)
        args, dynamic = _arguments(job.signature, sizes)
        try:
            program = torch.export.export(module, args, dynamic_shapes=dynamic, strict=False)
        except (RuntimeError, ValueError) as cause:  # torch has no narrower common type
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
            raise _fault(job, f"torch.export refuses it: {(*lines, 'no reason')[0]}") from cause
    _ensure(program, job, returns_states=returns_states)
    return program


def _module(job: Job, returns_states: bool) -> torch.nn.Module:
    llama = Llama(job.config, job.form, coded=coded_modules(job.weights))
    fakes = {
        name: torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        for name, info in job.weights.items()
    }
    llama.load_state_dict(fakes, strict=True, assign=True)
    llama.requires_grad_(False)
    entry = functools.partial(getattr(llama, job.spec.method), **job.spec.arguments)

    @functools.wraps(entry)  # export reads the names of the arguments
    def with_states(*args: Any) -> Any:
        outputs = entry(*args)
        flat = outputs if isinstance(outputs, tuple) else (outputs,)
        return *flat, [tensor for state in args[-1] for tensor in state]

    # `forward` on the instance, so that parameter names stay those of the checkpoint.
    has_states = bool(job.signature.states)
    forward: Any = with_states if returns_states and has_states else entry
    llama.forward = forward  # type: ignore[method-assign]
    return llama


def _example_sizes(signature: Signature) -> dict[str, int]:
    shapes = [spec.shape for spec in (*signature.inputs, *signature.outputs)]
    shapes += [spec.shape for spec in signature.states]
    taken = {size for shape in shapes for size in shape if isinstance(size, int)}
    sizes: dict[str, int] = {}
    for dim in signature.dims:
        fitting = [n for n in _EXAMPLE_SIZES if dim.min <= n <= dim.max]
        fresh = [n for n in fitting if n not in taken] or fitting
        if not fresh:
            raise BuildError(
                f"dimension {dim.name} has too small a range to be dynamic: {dim.min} to {dim.max}",
                hint="choose a larger --max-seq",
            )
        sizes[dim.name] = fresh[0]
        taken.add(fresh[0])
    return sizes


def _arguments(signature: Signature, sizes: Mapping[str, int]) -> tuple[Any, Any]:
    dims = {dim.name: Dim(dim.name, min=dim.min, max=dim.max) for dim in signature.dims}
    inputs = tuple(_example(spec, sizes) for spec in signature.inputs)
    dynamic: tuple[Any, ...] = tuple(_axes(spec.shape, dims) for spec in signature.inputs)
    if not signature.states:
        return inputs, dynamic
    flat = [
        torch.empty(resolve(s.shape, sizes), dtype=torch_dtype(s.dtype)) for s in signature.states
    ]
    axes = [_axes(state.shape, dims) for state in signature.states]
    states = list(zip(flat[::2], flat[1::2], strict=True))
    return (*inputs, states), (*dynamic, list(zip(axes[::2], axes[1::2], strict=True)))


def _axes(shape: Shape, dims: Mapping[str, Any]) -> dict[int, Any] | None:
    return {axis: dims[size] for axis, size in enumerate(shape) if isinstance(size, str)} or None


def _example(spec: TensorSpec, sizes: Mapping[str, int]) -> torch.Tensor:
    return torch.zeros(resolve(spec.shape, sizes), dtype=torch_dtype(spec.dtype))


def _ensure(program: ExportedProgram, job: Job, *, returns_states: bool) -> None:
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    called = []
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            called.append(nodes[spec.arg.name])
        elif spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            _fail(job, f"a constant `{spec.target}` hides in the graph")
        elif spec.target not in job.weights:
            _fail(job, f"`{spec.target}` is not a tensor of the checkpoint")
    declared = [(spec.name, spec.dtype, spec.shape) for spec in job.signature.inputs]
    declared += [(spec.name, spec.dtype, spec.shape) for spec in job.signature.states]
    if len(called) != len(declared):
        _fail(job, f"the graph takes {len(called)} tensors, declared are {len(declared)}")
    symbols: dict[Any, str] = {}
    for node, (name, dtype, shape) in zip(called, declared, strict=True):
        _ensure_tensor(program, job, symbols, node.meta["val"], name, dtype, shape)
    for node in called[len(job.signature.inputs) :]:
        if not any(_is_written(user, node) for user in node.users):
            _fail(job, f"state `{node.name}` is never written")
    outputs = [
        spec.arg
        for spec in program.graph_signature.output_specs
        if isinstance(spec.arg, TensorArgument)
    ]
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    results: list[tuple[str, str, Shape]]
    results = [(spec.name, spec.dtype, spec.shape) for spec in job.signature.outputs]
    if returns_states:
        results += [(spec.name, spec.dtype, spec.shape) for spec in job.signature.states]
    if len(outputs) != len(results):
        _fail(job, f"the graph gives {len(outputs)} tensors, declared are {len(results)}")
    for argument, (name, dtype, shape) in zip(outputs, results, strict=True):
        _ensure_tensor(program, job, symbols, values[argument.name], name, dtype, shape)


def _ensure_tensor(
    program: ExportedProgram,
    job: Job,
    symbols: dict[Any, str],
    value: Any,
    name: str,
    dtype: str,
    shape: Shape,
) -> None:
    actual = from_torch(value.dtype).name
    if actual != dtype or len(value.shape) != len(shape):
        _fail(
            job, f"`{name}` is {actual} {list(value.shape)} in the graph, declared {dtype} {shape}"
        )
    for declared, size in zip(shape, value.shape, strict=True):
        if isinstance(declared, int):
            if not isinstance(size, int) or size != declared:
                _fail(job, f"`{name}` has size {size} in the graph, declared {declared}")
            continue
        factor, dim_name = parts(declared)
        dim = job.signature.dim(dim_name)
        if isinstance(size, torch.SymInt) and _is_known(size, factor, dim_name, symbols):
            continue
        symbol = size.node.expr / factor if isinstance(size, torch.SymInt) else None
        bounds = program.range_constraints.get(symbol) if symbol is not None else None
        if bounds is None:
            _fail(job, f"`{name}`: dimension {declared} is {size} in the graph, not dynamic")
        elif symbols.setdefault(symbol, dim_name) != dim_name:
            _fail(job, f"`{name}`: {declared} is {symbols[symbol]} in the graph")
        elif not (bounds.lower <= dim.min and dim.max <= bounds.upper):
            _fail(
                job,
                f"`{name}`: {declared} is {bounds} in the graph, promised {dim.min} to {dim.max}",
            )


def _is_known(size: torch.SymInt, factor: int, name: str, symbols: Mapping[Any, str]) -> bool:
    """Whether a size is that multiple of a dimension, which may have a symbol in each input."""
    expression = size.node.expr
    named = {symbol: sympy.Symbol(known, integer=True) for symbol, known in symbols.items()}
    known = expression.free_symbols <= named.keys()
    return known and expression.subs(named) == factor * sympy.Symbol(name, integer=True)


def _is_written(user: torch.fx.Node, state: torch.fx.Node) -> bool:
    schema = getattr(user.target, "_schema", None)
    if schema is None:
        return False
    return any(
        argument is state and declared.alias_info is not None and declared.alias_info.is_write
        for argument, declared in zip(user.args, schema.arguments, strict=False)
    )


def _fail(job: Job, message: str) -> NoReturn:
    raise _fault(job, message)


def _fault(job: Job, message: str) -> BuildError:
    hint = "this is a fault of llama-export; report it"
    return BuildError(f"{job.spec.name}: {message}", hint=hint)
