"""The peak over a graph, against graphs counted by hand and against programs that are run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from llama_artifacts.errors import BuildError
from llama_export.footprint.activations import Kind, Traced
from llama_export.footprint.call import Call
from llama_export.footprint.liveness import ProgramGraph, peak_of
from llama_export.trace import Job, as_kind, trace
from tests.footprint.jobs import ENTRIES, arguments, tiny_call, tiny_network
from tests.footprint.oracle import Watch

pytestmark = pytest.mark.slow  # a trace for each figure

aten = torch.ops.aten
KB = 1024


def graph_of(function: Callable[..., Tensor], *, num_inputs: int = 1) -> GraphModule:
    """The function's graph over vectors of 256 float32 numbers, a kilobyte each."""
    return make_fx(function)(*(meta() for _ in range(num_inputs)))


def meta() -> Tensor:
    return torch.empty(256, device="meta")


def peak(function: Callable[..., Tensor], *, num_inputs: int = 1) -> tuple[int, str]:
    graph = graph_of(function, num_inputs=num_inputs)
    found = peak_of(graph, [meta() for _ in range(num_inputs)], 0)
    return found.num_bytes, found.node


def test_a_value_ends_with_its_last_use() -> None:
    # a, then a and b, then b and c: never three.
    assert peak(lambda x: aten.exp(aten.sin(aten.cos(x)))) == (2 * KB, "sin")


def test_what_is_used_again_stays() -> None:
    def function(x: Tensor) -> Tensor:
        a = aten.cos(x)
        return aten.add(aten.exp(aten.sin(a)), a)  # a, sin and exp; then a, exp and the sum

    assert peak(function) == (3 * KB, "exp")


def test_inputs_and_results_of_nothing_need_nothing() -> None:
    assert peak(lambda x: aten.view(x, [16, 16])) == (0, "")


def test_a_view_keeps_the_whole_storage_alive() -> None:
    def function(x: Tensor) -> Tensor:
        corner = aten.slice(aten.cos(x), 0, 0, 1)  # 4 of 1024 bytes
        return aten.add(aten.exp(aten.sin(x)), corner)

    assert peak(function) == (3 * KB, "exp")


def test_views_count_once() -> None:
    def function(x: Tensor) -> Tensor:
        a = aten.cos(x)
        return aten.mm(aten.view(a, [16, 16]), aten.t(aten.view(a, [16, 16])))

    assert peak(function) == (2 * KB, "mm")


def test_writing_in_place_makes_nothing() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return aten.add_(aten.mul_(x, y), y)

    assert peak(function, num_inputs=2) == (0, "")


def test_writing_into_a_view_of_an_input_makes_nothing() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        aten.copy_(aten.slice(x, 0, 0, 128), aten.slice(y, 0, 0, 128))
        return aten.cos(y)

    assert peak(function, num_inputs=2) == (KB, "cos")


def test_a_cast_to_the_same_dtype_is_the_same_memory() -> None:
    assert peak(lambda x: aten.to.dtype(aten.cos(x), torch.float32)) == (KB, "cos")
    assert peak(lambda x: aten.to.dtype(aten.cos(x), torch.float64))[0] == 3 * KB


def test_a_result_that_nobody_uses_counts_while_it_is_made() -> None:
    def function(x: Tensor) -> Tensor:
        values, _ = aten.sort(x)  # values and 64-bit indices
        return values

    assert peak(function)[0] == 3 * KB


def test_parts_of_one_operator_share_its_memory() -> None:
    def function(x: Tensor) -> Tensor:
        first, second = aten.split(aten.cos(x), 128)
        return aten.add(first, second)

    assert peak(function)[0] == KB + KB // 2


# --- whole programs -------------------------------------------------------------------------------


USUAL = ("prefill", "step_paged", "loss_packed", "generate<8>")
"""One entry of each kind; `make test-long` takes the others."""


def measured(job: Job, call: Call) -> int:
    """The peak of the job's program, run by torch's operators on real tensors."""
    program = trace(job)
    for name, fake in program.state_dict.items():
        weight = torch.full(fake.shape, 0.01, dtype=fake.dtype)
        program.state_dict[name] = as_kind(fake, weight)
    inputs, states = arguments(call)
    nested = [list(zip(states[::2], states[1::2], strict=True))] if states else []
    module = program.module(check_guards=False)
    watch = Watch([*inputs, *states, *program.state_dict.values()])
    with torch.no_grad(), watch:
        module(*inputs, *nested)
    return watch.peak


def compare(entry: str, num_layers: int) -> None:
    """Of sizes that the followed graph was not traced with."""
    network = tiny_network(num_hidden_layers=num_layers)
    spec, call = tiny_call(network, entry, batch=2, length=24)
    kind = Kind("pt2", "cpu", page_size=4)
    form = kind.formulation("f32")
    job = Job(network.config, spec, spec.stem, call.signature, form, network.tensors)
    forecast = Traced(network, spec, kind).peak(call)
    assert forecast == pytest.approx(measured(job, call), rel=0.01)


@pytest.mark.parametrize(
    "entry",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.long) for name in ENTRIES],
)
def test_the_peak_is_that_of_the_running_program(entry: str) -> None:
    compare(entry, 1)


@pytest.mark.long
@pytest.mark.parametrize("entry", ["prefill", "generate<8>"])
def test_few_layers_tell_of_many(entry: str) -> None:
    compare(entry, 6)


def test_a_program_without_positions_reads_the_whole_state() -> None:
    network = tiny_network()
    spec, call = tiny_call(network, "decode", batch=2, length=200)
    on_cpu, on_cuda = (Traced(network, spec, Kind("pt2", device)) for device in ("cpu", "cuda"))
    early = Call(call.signature, call.sizes, 0)
    assert on_cpu.peak(early) < on_cuda.peak(early) == on_cuda.peak(call)


def test_a_call_that_the_graph_cannot_take_is_a_known_failure() -> None:
    network = tiny_network(num_hidden_layers=1)
    spec, call = tiny_call(network, "forward", batch=2, length=8)
    form = Kind("pt2", "cpu").formulation("f32")
    job = Job(network.config, spec, spec.stem, call.signature, form, network.tensors)
    _, other = tiny_call(network, "hidden_packed", batch=2, length=8)
    with pytest.raises(BuildError, match="cannot be followed for P=16"):
        ProgramGraph(trace(job)).peak(other)
