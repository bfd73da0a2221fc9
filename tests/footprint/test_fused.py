"""The peak of compiled programs, over Inductor's own schedule."""

from __future__ import annotations

import pytest
import sympy

from llama_artifacts.errors import BuildError
from llama_artifacts.signature import Dim, Signature, TensorSpec
from llama_export.footprint import fused
from llama_export.footprint.activations import Compiled, Kind, Traced
from llama_export.footprint.call import Call
from llama_export.footprint.fused import Schedule, Step
from tests.footprint.jobs import tiny_call, tiny_network

S, U = sympy.symbols("S U")
TOKENS = TensorSpec("tokens", "i32", (2, "S"))


def call(size: int, position: int = 0) -> Call:
    logits = TensorSpec("logits", "f32", (2,))
    signature = Signature((TOKENS,), (), (logits,), (Dim("S", 1, 100),))
    return Call(signature, {"S": size}, position)


def test_a_schedule_is_counted_for_any_size() -> None:
    steps = (Step("a", 4 * S, 0 * S), Step("b", 8 * S, 4 * S), Step("c", 2 * S + U, 8 * S))
    schedule = Schedule(steps, {S: "S"})
    assert schedule.peak(call(10)) == 120  # a and b
    assert schedule.peak(call(10, position=90)) == 190  # b and c, which follows the position


def test_a_turn_of_a_loop_has_what_the_turn_before_gave() -> None:
    body = (Step("x", 3 * S, 0 * S), Step("y", 5 * S, 3 * S))
    loop = Step("loop", 0 * S, 0 * S, body, 7 * S)
    assert Schedule((Step("a", 1 * S, 0 * S), loop), {S: "S"}).peak(call(10)) == 160


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry", ["decode_paged", pytest.param("generate<8>", marks=pytest.mark.long)]
)
def test_fused_loops_keep_less_than_single_operators(entry: str) -> None:
    network = tiny_network()
    spec, asked = tiny_call(network, entry, batch=8, length=64)
    single = Traced(network, spec, Kind("aoti", "cuda", page_size=4)).peak(asked)
    fused = Compiled(network, spec, Kind("aoti", "cpu", page_size=4)).peak(asked)
    results = 8 * 128 * 4 if entry == "decode_paged" else 8 * 8 * 4
    assert results < fused < single


def test_what_inductor_refuses_is_a_known_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(fused, "aoti_compile_and_package", refuse)
    network = tiny_network(num_hidden_layers=1)
    spec, asked = tiny_call(network, "forward", batch=2, length=8)
    with pytest.raises(BuildError, match=r"cannot compile it: .*no compiler"):
        Compiled(network, spec, Kind("aoti", "cpu")).peak(asked)
