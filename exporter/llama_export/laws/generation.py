"""Drives the entries that generate: a few tokens are in the states, the program goes on alone.

The states are filled by the eager model, so that no other program of the bundle is needed. Tokens
are not compared with other tokens, since one rounding may make another the best: each is fed to the
oracle, and its regret is how far it is from the oracle's best.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llama_artifacts.signature import Signature, resolve
from llama_export.laws.calls import Inputs
from llama_export.laws.draws import noise
from llama_export.laws.drive import Watch
from llama_export.laws.finding import Finding, exact, worst
from llama_export.laws.memory import Memory, new_memory
from llama_export.laws.oracle import Oracle
from llama_export.laws.registry import kind
from llama_export.laws.spans import Span
from llama_runtime.entry import Entry

NUM_BEFORE = 5
"""Positions that are filled before a program goes on."""

TEMPERATURE = 0.7
KEY, OTHER_KEY = (7, 2_147_483_653), (8, 2_147_483_653)
EOS_STEP = 3
"""The step of row 0 whose token is taken as the end of the text in a second run."""


@dataclass(frozen=True)
class Generated:
    """What one call of a generating entry gave.

    Attributes:
        inputs: of the call.
        tokens: int64 [rows, steps].
        count: tokens of each row, [rows].
        start: the position of the token that was fed.
        cells: see `Memory.cells`; up to `start + steps`.
        num_stray: see `Driven`.
        stray: see `Driven`.
    """

    inputs: Inputs
    tokens: torch.Tensor
    count: torch.Tensor
    start: int
    cells: tuple[torch.Tensor, ...]
    num_stray: int
    stray: str


def generate(entry: Entry, oracle: Oracle) -> tuple[Generated, ...]:
    """The calls that the laws look at; two, of different ends, where the entry knows an end."""
    if kind(entry.name) != "generate_until":
        return (go_on(entry, oracle),)
    # A token that the model would hardly ever give.
    never = int(oracle.logits.amax((0, 1)).argmin())
    first = go_on(entry, oracle, eos=never)
    eos = first.tokens[0, min(EOS_STEP, int(first.count[0]) - 1)]
    return first, go_on(entry, oracle, eos=int(eos))


def go_on(entry: Entry, oracle: Oracle, *, eos: int = 0, key: tuple[int, int] = KEY) -> Generated:
    """Fills the states from the oracle's sequences and calls the entry once."""
    num_steps = resolve(entry.signature.outputs[0].shape, {})[1]
    memory = new_memory(entry, 0)
    start = first_position(memory, num_steps)
    fill(memory, oracle, start)
    token = oracle.tokens[: memory.num_rows, start : start + 1].contiguous()
    inputs = inputs_of(entry.signature, token, pos=start, eos=eos, key=key)
    watch = Watch(memory, start + num_steps)
    outputs = entry.run(memory.states, inputs)
    tokens = outputs[0].cpu().long()
    count = torch.full((len(tokens),), num_steps) if len(outputs) == 1 else outputs[1].cpu().long()
    spans = [Span(row, start, start + int(n)) for row, n in enumerate(count.clamp(0, num_steps))]
    watch.note(memory.mask(spans, start + num_steps))
    cells = tuple(watch.cells)
    watch.end()
    return Generated(inputs, tokens, count, start, cells, watch.num_stray, watch.stray)


def inputs_of(
    signature: Signature,
    token: torch.Tensor,
    *,
    pos: int,
    eos: int = 0,
    key: tuple[int, int] = KEY,
) -> Inputs:
    """A call's inputs; those that the entry does not have are left out."""
    values = {
        "token": token,
        "pos": torch.tensor(pos, dtype=torch.int32),
        "eos": torch.tensor(eos, dtype=torch.int32),
        "key": torch.tensor(key),
        "temperature": torch.tensor(TEMPERATURE),
    }
    return {spec.name: values[spec.name] for spec in signature.inputs}


def first_position(memory: Memory, num_steps: int) -> int:
    """How many positions are filled before: some, where the states have room for them."""
    return max(0, min(NUM_BEFORE, memory.capacity - num_steps))


def fill(memory: Memory, oracle: Oracle, num_tokens: int) -> None:
    """Writes the eager model's keys and values of the first tokens of each row.

    States with fewer heads than the model get the part of this process.
    """
    assert memory.states is not None
    if not num_tokens:
        return
    targets = memory.states.tensors()
    num_heads = oracle.num_kv_heads
    shapes = [(len(target), num_heads, num_tokens, target.shape[3]) for target in targets]
    own = [torch.zeros(shape) for shape in shapes]
    tokens = oracle.tokens[: memory.num_rows, :num_tokens]
    with torch.no_grad():
        states = list(zip(own[::2], own[1::2], strict=True))
        oracle.model.prefill(tokens, torch.tensor(0, dtype=torch.int32), states)
    for target, values in zip(targets, own, strict=True):
        parts = values.split(target.shape[1], dim=1)
        part = parts[oracle.rank] if len(parts) > 1 else values
        target[:, :, :num_tokens] = part.to(target.device, target.dtype)


def logits_along(oracle: Oracle, generated: Generated) -> torch.Tensor:
    """The oracle's logits [rows, steps, V] where the tokens of the call are fed."""
    num_rows, start = len(generated.tokens), generated.start
    before = oracle.tokens[:num_rows, : start + 1]
    vocab_size = oracle.logits.shape[-1]
    fed = generated.tokens[:, :-1].clamp(0, vocab_size - 1).int()
    return oracle.read(torch.cat((before, fed), 1))[:, start:]


def scores_along(oracle: Oracle, generated: Generated) -> torch.Tensor:
    """What the oracle takes the largest of: logits, with the draw's noise where there is one."""
    logits = logits_along(oracle, generated)
    if "key" not in generated.inputs:
        return logits
    first, second = (int(word) for word in generated.inputs["key"])
    num_rows, num_steps, vocab_size = logits.shape
    draws = [noise((first, second), step, num_rows, vocab_size) for step in range(num_steps)]
    return logits + torch.stack(draws, 1) * float(generated.inputs["temperature"])


def regret(generated: Generated, scores: torch.Tensor, limit: float) -> Finding:
    """How far the worst token is from the best score, as a share of the largest score."""
    if tuple(generated.tokens.shape) != tuple(scores.shape[:2]):
        raise ValueError(f"expected tokens {list(scores.shape[:2])}")
    vocab_size = scores.shape[2]
    num_odd = int(((generated.tokens < 0) | (generated.tokens >= vocab_size)).sum())
    if num_odd:
        return exact(num_odd, "tokens outside of the vocabulary", str(generated.tokens.tolist()))
    chosen = scores.gather(2, generated.tokens[..., None])[..., 0]
    given = torch.arange(scores.shape[1]) < generated.count[:, None]
    lost = torch.where(given, scores.amax(2) - chosen, 0)
    scale = float(scores.abs().max())
    largest = float(lost.max())
    place = tuple(int(i) for i in (lost == largest).nonzero()[0]) if largest == largest else ()
    detail = f"{largest:.3g} below the best at {place}, atol {limit * scale:.3g}"
    return Finding(largest / scale, limit, detail)


def ending(generated: Generated) -> Finding:
    """Whether each row ends with its first eos, and holds zeros behind it."""
    num_steps = generated.tokens.shape[1]
    wrong, first = 0, ""
    for row, tokens in enumerate(generated.tokens.tolist()):
        eos = int(generated.inputs["eos"])
        length = tokens.index(eos) + 1 if eos in tokens else num_steps
        found = int(generated.count[row])
        if found != length or any(tokens[length:]):
            wrong += 1
            first = first or f"row {row} counts {found}, expected {length} and zeros behind"
    return exact(wrong, "rows that end wrongly", first)


def parity(calls: tuple[Generated, ...], oracle: Oracle, limit: float) -> Finding:
    """Whether every token is the oracle's choice, and every text ends where it must."""
    findings = [regret(call, scores_along(oracle, call), limit) for call in calls]
    findings += [ending(call) for call in calls if "eos" in call.inputs]
    return worst(findings)
