"""`room`: a position past the capacity is refused and leaves all as it was; the last one works.

What is legal is derived here from the sizes of states, tables and calls, not from the bounds that
the signature declares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llama_artifacts.errors import InputError
from llama_artifacts.manifest import Program
from llama_export.laws.bench import Bench, is_generating, num_rows
from llama_export.laws.calls import Inputs, Sequences, new_sequences, prepare
from llama_export.laws.finding import Finding, exact
from llama_export.laws.generation import inputs_of
from llama_export.laws.memory import Memory
from llama_export.laws.spans import MIXED, STEPPING, WHOLE, Call, Span
from llama_runtime.entry import Entry


def check(bench: Bench, program: Program) -> Finding | None:
    """The law on one program."""
    entry, memory = bench.entry(program), bench.memory(program)
    found = _Faults()
    inputs = _inputs(bench, program, memory)
    for name, value in _illegal(bench, program, memory, inputs):
        if not _is_refused(entry, memory, inputs, name, value):
            found.add(1, f"{name} = {value} is accepted")
            memory = bench.memory(program)
        elif touched := memory.num_touched(0):
            found.add(touched, f"{name} = {value} is refused, and states are written")
    if memory.states is not None:
        _try_last(bench, program, found)
    return exact(found.num, "faults", found.first)


@dataclass
class _Faults:
    num: int = 0
    first: str = ""

    def add(self, num: int, what: str) -> None:
        self.num += num
        self.first = self.first or what


def _inputs(bench: Bench, program: Program, memory: Memory) -> Inputs:
    """A legal call."""
    if not is_generating(program):
        call = bench.usual(program)[0]
        return prepare(program.entry, call, bench.sequences, memory).inputs
    return _generating_inputs(program, bench.sequences, pos=0)


def _generating_inputs(program: Program, sequences: Sequences, *, pos: int) -> Inputs:
    token = sequences.tokens[: num_rows(program), :1].contiguous()
    return inputs_of(program.signature, token, pos=pos)


def _illegal(
    bench: Bench, program: Program, memory: Memory, inputs: Inputs
) -> Iterator[tuple[str, int]]:
    """One value too small and one too large for each input that has an end."""
    vocab_size, rows = bench.manifest.model.vocab_size, memory.num_rows
    num_kept = 1
    if program.entry == "prefill":
        num_kept = inputs["tokens"].shape[1]
    elif is_generating(program):
        num_kept = _num_generated(program)
    in_table = 0 if memory.table is None else memory.table.shape[1] * memory.page_size
    last_position = in_table - 1 if in_table else bench.manifest.max_seq - 1
    num_pages = 0 if memory.states is None else memory.states.tensors()[0].shape[0]
    ends = {
        **dict.fromkeys(("tokens", "token", "step_tokens", "targets", "eos"), vocab_size - 1),
        "pos": memory.capacity - num_kept,
        **dict.fromkeys(("positions", "step_positions"), last_position),
        "rows": rows - 1,
        "slots": num_pages * memory.page_size - 1 if in_table else rows - 1,
        "table": num_pages - 1,
        "last": inputs["tokens"].shape[0] - 1 if "tokens" in inputs else 0,
    }
    if program.entry == "prefill_slots":
        ends["lengths"] = inputs["tokens"].shape[1]
    is_paged_step = {"step_positions"} if in_table else set()
    if program.entry == "decode_paged":
        is_paged_step = {"positions"}
    for name in inputs:
        if name in ends:
            smallest = -1 if name in is_paged_step else 0
            yield name, smallest - 1
            yield name, ends[name] + 1


def _num_generated(program: Program) -> int:
    size = program.signature.outputs[0].shape[1]
    assert isinstance(size, int)
    return size


def _is_refused(entry: Entry, memory: Memory, inputs: Inputs, name: str, value: int) -> bool:
    changed = inputs[name].clone()
    changed.view(-1)[-1] = value
    try:
        entry.run(memory.states, {**inputs, name: changed})
    except InputError:
        return True
    return False


def _try_last(bench: Bench, program: Program, found: _Faults) -> None:
    """One token of every row at the last position that can be filled; nothing else is written."""
    memory, entry = bench.memory(program), bench.entry(program)
    last = memory.capacity - 1
    if is_generating(program):
        first = memory.capacity - _num_generated(program)
        inputs = _generating_inputs(program, bench.sequences, pos=first)
        spans: tuple[Span, ...] = ()
    else:
        call = _last_call(program, memory)
        if call is None:
            return
        first, spans = last, call.spans()
        inputs = prepare(program.entry, call, _long(bench, memory), memory).inputs
    try:
        outputs = entry.run(memory.states, inputs)
    except InputError as refusal:
        found.add(1, f"position {last} is refused: {refusal}")
        return
    lowest = min((span.start for span in spans), default=first)
    if touched := memory.num_touched(0, lowest):
        found.add(touched, f"a token at position {last} writes before position {lowest}")
    if not is_generating(program) and not memory.num_touched(last):
        found.add(1, f"position {last} is not written")
    num_odd = sum(int(output.isnan().sum()) for output in outputs if output.is_floating_point())
    if num_odd:
        found.add(num_odd, f"a token at position {last} gives NaN")


def _last_call(program: Program, memory: Memory) -> Call | None:
    """A token of every row at the last position; None where a call cannot begin there."""
    last, rows = memory.capacity - 1, range(memory.num_rows)
    spans = tuple(Span(row, last, last + 1) for row in rows)
    if program.entry in STEPPING:
        return Call(steps=spans)
    if program.entry in MIXED:
        return Call(spans[:1], spans[1:])
    if program.entry == "prefill_slots":
        if program.signature.dim("S").max < memory.capacity:
            return None
        return Call(tuple(Span(row, 0, last + 1) for row in rows))
    return Call(spans if program.entry in WHOLE else spans[::-1])


def _long(bench: Bench, memory: Memory) -> Sequences:
    """Sequences that reach to the last position, the bench's tokens over and over."""
    tokens = bench.sequences.tokens
    times = -(-memory.capacity // tokens.shape[1])
    return new_sequences(tokens.repeat(1, times), bench.manifest.model.vocab_size)
