"""A call's spans become an entry's inputs, and its outputs the answers to rows and positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llama_export.laws.memory import Memory
from llama_export.laws.spans import Call, Span

NUM_PADDING = 3
"""Tokens of padding behind packed prompts."""

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sequences:
    """What is fed.

    Attributes:
        tokens: int32 [rows, n].
        targets: of the training entries, int64 [rows, n]; they do not follow from the tokens.
        weights: of the targets, f32 [rows, n]; 0 from position `change` on.
        change: where tokens are changed to see that nothing before depends on them.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    change: int

    @property
    def num_tokens(self) -> int:
        """Tokens of each row."""
        return self.tokens.shape[1]


def new_sequences(tokens: torch.Tensor, vocab_size: int) -> Sequences:
    """Tokens [rows, n] with targets and weights of their own."""
    num_rows, num_tokens = tokens.shape
    change = num_tokens * 3 // 4
    order = torch.arange(num_tokens)
    targets = (torch.arange(num_rows)[:, None] * 31 + order * 7 + 3) % vocab_size
    weights = torch.where(order < change, 0.5 + order / num_tokens, 0.0)
    return Sequences(tokens, targets, weights.expand(num_rows, -1), change)


@dataclass(frozen=True)
class Prepared:
    """A call that can be run.

    Attributes:
        inputs: of the entry, by name.
        answers: (index, row, position): the output's leading axes as one, and what it is after.
    """

    inputs: Inputs
    answers: tuple[tuple[int, int, int], ...]


def prepare(entry: str, call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    """The inputs of one call of an entry, and which of its outputs say something."""
    return _PREPARE[entry](call, sequences, memory)


def _whole(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    answers = [(span.row, position) for span in call.prompts for position in _positions(span)]
    return Prepared({"tokens": _stack(call.prompts, sequences)}, _numbered(answers))


def _last_only(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    return Prepared({"tokens": _stack(call.prompts, sequences)}, _numbered(_ends(call.prompts)))


def _prefill(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    inputs = {"tokens": _stack(call.prompts, sequences), "pos": _int(call.prompts[0].start)}
    return Prepared(inputs, _numbered(_ends(call.prompts)))


def _decode(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    inputs = {"tokens": _stack(call.steps, sequences), "pos": _int(call.steps[0].start)}
    return Prepared(inputs, _numbered(_ends(call.steps)))


def _decode_rows(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    tokens, positions = _steps(call.steps, sequences, memory, idle=memory.scratch)
    return Prepared({"tokens": tokens, "positions": positions}, _by_row(call.steps))


def _decode_paged(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    tokens, positions = _steps(call.steps, sequences, memory, idle=-1)
    inputs = {"tokens": tokens, "positions": positions, "table": _table(memory)}
    return Prepared(inputs, _by_row(call.steps))


def _prefill_slots(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    lengths = [span.stop for span in call.prompts]
    inputs = {
        "tokens": sequences.tokens[[span.row for span in call.prompts], : max(lengths)],
        "slots": _ints([span.row for span in call.prompts]),
        "lengths": _ints(lengths),
    }
    return Prepared(inputs, _numbered(_ends(call.prompts)))


def _prefill_packed(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    inputs = _pack(call.prompts, sequences, memory)
    return Prepared({**inputs, "last": _last(call.prompts, memory)}, _by_row(call.prompts))


def _prefill_paged(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    inputs = _pack(call.prompts, sequences, memory)
    del inputs["segments"]
    slots = [
        pages * memory.page_size + places for pages, places in map(memory.places, call.prompts)
    ]
    inputs |= {
        "slots": torch.cat((*slots, torch.zeros(NUM_PADDING))).int(),
        "last": _last(call.prompts, memory),
        "table": _table(memory),
    }
    return Prepared(inputs, _by_row(call.prompts))


def _step_packed(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    prompts = _prefill_packed(call, sequences, memory)
    return _with_steps(prompts, call, sequences, memory, idle=memory.scratch)


def _step_paged(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    prompts = _prefill_paged(call, sequences, memory)
    return _with_steps(prompts, call, sequences, memory, idle=-1)


def _with_steps(
    prompts: Prepared, call: Call, sequences: Sequences, memory: Memory, *, idle: int
) -> Prepared:
    tokens, positions = _steps(call.steps, sequences, memory, idle=idle)
    steps = [(memory.num_rows + i, row, at) for i, row, at in _by_row(call.steps)]
    inputs = {**prompts.inputs, "step_tokens": tokens, "step_positions": positions}
    return Prepared(inputs, (*prompts.answers, *steps))


def _hidden(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    inputs = _pack(call.prompts, sequences, memory)
    del inputs["rows"]
    answers = [(span.row, position) for span in call.prompts for position in _positions(span)]
    return Prepared(inputs, _numbered(answers))


def _log_probs(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    prepared = _hidden(call, sequences, memory)
    targets = _joined(call.prompts, sequences.targets)
    return Prepared({**prepared.inputs, "targets": targets}, prepared.answers)


def _loss(call: Call, sequences: Sequences, memory: Memory) -> Prepared:
    """One answer for all; it is after the first position, as nothing later changes the weights."""
    inputs = _log_probs(call, sequences, memory).inputs
    weights = _joined(call.prompts, sequences.weights)
    return Prepared({**inputs, "weights": weights}, ((0, call.prompts[0].row, 0),))


_PREPARE: dict[str, Callable[[Call, Sequences, Memory], Prepared]] = {
    "forward": _whole,
    "next_token": _last_only,
    "prefill": _prefill,
    "decode": _decode,
    "decode_rows": _decode_rows,
    "prefill_slots": _prefill_slots,
    "prefill_packed": _prefill_packed,
    "step_packed": _step_packed,
    "loss_packed": _loss,
    "log_probs_packed": _log_probs,
    "hidden_packed": _hidden,
    "decode_paged": _decode_paged,
    "prefill_paged": _prefill_paged,
    "step_paged": _step_paged,
}

PLANNED = tuple(_PREPARE)
"""The entries that plans of spans can drive."""


def _pack(spans: Sequence[Span], sequences: Sequences, memory: Memory) -> Inputs:
    """The spans one after the other, then padding at the scratch position, in its own segment."""
    rows = torch.cat([torch.full((span.stop - span.start,), span.row) for span in spans] or [_NONE])
    positions = torch.cat([torch.arange(span.start, span.stop) for span in spans] or [_NONE])
    padding = torch.zeros(NUM_PADDING, dtype=torch.long)
    return {
        "tokens": _joined(spans, sequences.tokens),
        "rows": torch.cat((rows, padding)).int(),
        "positions": torch.cat((positions, padding + memory.scratch)).int(),
        "segments": torch.cat((rows, padding + memory.num_rows)).int(),
    }


_NONE = torch.zeros(0, dtype=torch.long)


def _joined(spans: Sequence[Span], values: torch.Tensor) -> torch.Tensor:
    parts = [values[span.row, span.start : span.stop] for span in spans]
    return torch.cat((*parts, values.new_zeros(NUM_PADDING)))


def _last(spans: Sequence[Span], memory: Memory) -> torch.Tensor:
    """The packed index of each row's last token; 0 for a row without one."""
    last, end = [0] * memory.num_rows, 0
    for span in spans:
        end += span.stop - span.start
        last[span.row] = end - 1
    return _ints(last)


def _steps(
    spans: Sequence[Span], sequences: Sequences, memory: Memory, *, idle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows, 1] and positions [rows]."""
    tokens, positions = [[0]] * memory.num_rows, [idle] * memory.num_rows
    for span in spans:
        tokens[span.row] = [int(sequences.tokens[span.row, span.start])]
        positions[span.row] = span.start
    return torch.tensor(tokens, dtype=torch.int32), _ints(positions)


def _stack(spans: Sequence[Span], sequences: Sequences) -> torch.Tensor:
    rows, first = [span.row for span in spans], spans[0]
    return sequences.tokens[rows, first.start : first.stop]


def _table(memory: Memory) -> torch.Tensor:
    assert memory.table is not None
    return memory.table


def _positions(span: Span) -> range:
    return range(span.start, span.stop)


def _ends(spans: Sequence[Span]) -> list[tuple[int, int]]:
    return [(span.row, span.stop - 1) for span in spans]


def _numbered(answers: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((index, row, position) for index, (row, position) in enumerate(answers))


def _by_row(spans: Sequence[Span]) -> tuple[tuple[int, int, int], ...]:
    return tuple((span.row, span.row, span.stop - 1) for span in spans)


def _int(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


def _ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
