"""How `verify` calls each entry, and the oracle that says what must come out.

The oracle is the model run eagerly in float32 over whole sequences, without any state. States are
filled with a large number before use, so that a read of what was never written shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import WEIGHTS_NAME, Manifest
from llama_artifacts.signature import resolve
from llama_export.checkpoint.config import LlamaConfig, RopeConfig
from llama_export.checkpoint.layout import scaled_modules
from llama_export.entries.registry import POOL_PAGES
from llama_export.model.llama import Formulation, Llama
from llama_runtime.entry import Entry
from llama_runtime.states import States
from llama_runtime.weights import map_weights

POISON = 1e4
NUM_TOKENS = 24
NUM_PADDING = 3
NUM_EARLY = 5

Compared = tuple[torch.Tensor, torch.Tensor]
"""What a program gave, and what it must give; of one shape."""


class Oracle:
    """The check's tokens [rows, n] and what the eager float32 model makes of them, row by row.

    Attributes:
        tokens: int32.
        hidden: the stream after the final norm, [rows, n, H].
        logits: [rows, n, V].
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        num_tokens = min(NUM_TOKENS, manifest.max_seq - 1)
        generator = torch.Generator().manual_seed(0)
        shape = (max(2, manifest.batch), num_tokens)
        self.tokens = torch.randint(
            manifest.model.vocab_size, shape, generator=generator, dtype=torch.int32
        )
        weights = map_weights(folder / WEIGHTS_NAME)
        form = Formulation(torch.float32, reads_positions=False)
        model = Llama(_config(manifest), form, fp8_modules=scaled_modules(weights))
        try:
            model.load_state_dict(weights, strict=True, assign=True)
        except RuntimeError as cause:
            where = folder / WEIGHTS_NAME
            message = "the weights are not those of the network in the manifest"
            raise IntegrityError(message, where=where, hint="build the bundle again") from cause
        order = torch.arange(num_tokens, dtype=torch.int32)
        with torch.no_grad():
            self.logits = model(self.tokens)
            rows = [model.hidden_packed(row, order, torch.zeros_like(order)) for row in self.tokens]
            self.hidden = torch.stack(rows)


def _config(manifest: Manifest) -> LlamaConfig:
    model = manifest.model
    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        rope=RopeConfig(theta=1.0),  # the frequencies are among the weights
        max_position=manifest.max_seq,
        tie_word_embeddings=model.tie_word_embeddings,
        attention_bias=model.attention_bias,
        mlp_bias=model.mlp_bias,
    )


def _poisoned(entry: Entry, **sizes: int) -> States:
    states = entry.new_states(**sizes)
    for tensor in states.values():
        tensor.fill_(POISON)
    return states


def _rows(entry: Entry) -> tuple[int, int]:
    """Rows and positions of the entry's states."""
    num_rows, _, max_seq, _ = resolve(entry.signature.states[0].shape, {})
    return num_rows, max_seq


def _drive_forward(entry: Entry, oracle: Oracle) -> Compared:
    return entry.run(None, {"tokens": oracle.tokens})[0], oracle.logits


def _drive_next_token(entry: Entry, oracle: Oracle) -> Compared:
    return entry.run(None, {"tokens": oracle.tokens})[0], oracle.logits[:, -1]


def _drive_prefill(entry: Entry, oracle: Oracle) -> Compared:
    tokens = oracle.tokens[: entry.signature.states[0].shape[0]]
    states, logits, position = _poisoned(entry), [], 0
    cut = tokens.shape[1] * 2 // 3
    for chunk in tokens.split([cut, tokens.shape[1] - cut - 1, 1], dim=1):
        inputs = {"tokens": chunk.contiguous(), "pos": position}
        logits.append(entry.run(states, inputs)[0])
        position += chunk.shape[1]
    return torch.stack(logits, 1), oracle.logits[: len(tokens), [cut - 1, -2, -1]]


def _drive_decode(entry: Entry, oracle: Oracle) -> Compared:
    tokens = oracle.tokens[: entry.signature.states[0].shape[0]]
    states = _poisoned(entry)
    logits = [
        entry.run(states, {"tokens": tokens[:, i : i + 1].contiguous(), "pos": i})[0]
        for i in range(tokens.shape[1])
    ]
    return torch.stack(logits, 1), oracle.logits[: len(tokens)]


def _drive_decode_rows(entry: Entry, oracle: Oracle) -> Compared:
    """Row r starts r steps late; until then it is idle, at the scratch position."""
    num_rows, max_seq = _rows(entry)
    tokens = oracle.tokens[:num_rows]
    num_steps = tokens.shape[1]
    states, rows = _poisoned(entry), torch.arange(num_rows)
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    for step in range(num_steps + num_rows - 1):
        position = step - rows
        is_live = (position >= 0) & (position < num_steps)
        inputs = {
            "tokens": tokens[rows, position.clamp(0, num_steps - 1)][:, None].contiguous(),
            "positions": torch.where(is_live, position, max_seq - 1).int(),
        }
        step_logits = entry.run(states, inputs)[0]
        for row in rows[is_live]:
            logits[row].append(step_logits[row])
    return torch.stack([torch.stack(row) for row in logits]), oracle.logits[:num_rows]


def _drive_prefill_slots(entry: Entry, oracle: Oracle) -> Compared:
    """Prompts of falling length fill the rows in reverse order."""
    tokens = oracle.tokens[: entry.signature.states[0].shape[0]]
    prompts = torch.arange(len(tokens), dtype=torch.int32)
    lengths = (tokens.shape[1] - 3 * prompts).clamp(min=1)
    inputs = {"tokens": tokens, "slots": prompts.flip(0), "lengths": lengths}
    logits = entry.run(_poisoned(entry), inputs)[0]
    return logits, oracle.logits[prompts.long(), lengths.long() - 1]


def _pack(oracle: Oracle, num_rows: int, padding_position: int) -> dict[str, torch.Tensor]:
    """The oracle's rows of falling length one after the other, the last first, then padding."""
    num_tokens = oracle.tokens.shape[1]
    packed: dict[str, list[torch.Tensor]] = {"tokens": [], "rows": [], "positions": []}
    for row in reversed(range(num_rows)):
        length = max(1, num_tokens - 3 * row)
        packed["tokens"].append(oracle.tokens[row, :length])
        packed["rows"].append(torch.full((length,), row))
        packed["positions"].append(torch.arange(length))
    packed["tokens"].append(torch.zeros(NUM_PADDING))
    packed["rows"].append(torch.zeros(NUM_PADDING))
    packed["positions"].append(torch.full((NUM_PADDING,), padding_position))
    return {name: torch.cat(parts).int() for name, parts in packed.items()}


def _last(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The index of each row's last token, padding aside."""
    order = torch.arange(len(rows) - NUM_PADDING, dtype=torch.int32)
    return torch.stack([order[rows[:-NUM_PADDING] == row].max() for row in range(num_rows)])


def _prompts(entry: Entry, oracle: Oracle) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    num_rows, max_seq = _rows(entry)
    inputs = _pack(oracle, num_rows, max_seq - 1)
    segments = inputs["rows"].clone()
    segments[-NUM_PADDING:] = num_rows
    last = _last(inputs["rows"], num_rows)
    ends = inputs["positions"][last.long()].long()
    return {**inputs, "segments": segments, "last": last}, ends


def _drive_prefill_packed(entry: Entry, oracle: Oracle) -> Compared:
    inputs, ends = _prompts(entry, oracle)
    return entry.run(_poisoned(entry), inputs)[0], oracle.logits[torch.arange(len(ends)), ends]


def _drive_step_packed(entry: Entry, oracle: Oracle) -> Compared:
    """All prompts while every row is idle; then all rows step back one token, behind padding."""
    inputs, ends = _prompts(entry, oracle)
    rows = torch.arange(len(ends))
    scratch = _rows(entry)[1] - 1
    states = _poisoned(entry)
    idle = {
        "step_tokens": torch.zeros(len(ends), 1, dtype=torch.int32),
        "step_positions": torch.full((len(ends),), scratch, dtype=torch.int32),
    }
    first = entry.run(states, {**inputs, **idle})[0][: len(ends)]
    padding = {name: inputs[name][-NUM_PADDING:] for name in inputs if name != "last"}
    step = {
        "last": torch.zeros(len(ends), dtype=torch.int32),
        "step_tokens": oracle.tokens[rows, ends][:, None].contiguous(),
        "step_positions": ends.int(),
    }
    second = entry.run(states, {**padding, **step})[0][len(ends) :]
    expected = oracle.logits[rows, ends]
    return torch.cat((first, second)), torch.cat((expected, expected))


def _training(oracle: Oracle) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Packed rows, and the row and position of each packed token."""
    num_rows = len(oracle.tokens)
    inputs = _pack(oracle, num_rows, 0)
    rows = inputs.pop("rows").long()
    segments = rows.int()
    segments[-NUM_PADDING:] = num_rows
    return {**inputs, "segments": segments}, rows, inputs["positions"].long()


def _targets(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return inputs["tokens"].roll(-1).long()


def _drive_hidden_packed(entry: Entry, oracle: Oracle) -> Compared:
    inputs, rows, positions = _training(oracle)
    hidden = entry.run(None, inputs)[0]
    return hidden[:-NUM_PADDING], oracle.hidden[rows, positions][:-NUM_PADDING]


def _drive_log_probs_packed(entry: Entry, oracle: Oracle) -> Compared:
    inputs, rows, positions = _training(oracle)
    targets = _targets(inputs)
    log_probs = entry.run(None, {**inputs, "targets": targets})[0]
    expected = oracle.logits[rows, positions].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return log_probs[:-NUM_PADDING], expected[:-NUM_PADDING]


def _drive_loss_packed(entry: Entry, oracle: Oracle) -> Compared:
    inputs, rows, positions = _training(oracle)
    targets = _targets(inputs)
    weights = torch.linspace(0.5, 1.5, len(rows))
    weights[-NUM_PADDING:] = 0
    loss = entry.run(None, {**inputs, "targets": targets, "weights": weights})[0]
    log_probs = oracle.logits[rows, positions].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return loss[None], -(weights * log_probs).sum()[None]


def _pages(entry: Entry, oracle: Oracle) -> tuple[States, torch.Tensor, int]:
    """A poisoned pool, and a table that scatters the oracle's rows over its pages."""
    num_rows, num_tokens = oracle.tokens.shape
    page_len = resolve(entry.signature.states[0].shape, {POOL_PAGES: 1})[2]
    num_pages = -(-num_tokens // page_len)
    total = num_rows * num_pages
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1)) + 1
    states = _poisoned(entry, **{POOL_PAGES: total + 1})
    return states, order.reshape(num_rows, num_pages).int(), page_len


def _paged_prompts(oracle: Oracle, table: torch.Tensor, page_len: int) -> dict[str, torch.Tensor]:
    inputs = _pack(oracle, len(table), 0)
    rows, positions = inputs["rows"].long(), inputs["positions"]
    slots = table[rows, (positions // page_len).long()] * page_len + positions % page_len
    slots[-NUM_PADDING:] = 0
    return {**inputs, "slots": slots, "last": _last(inputs["rows"], len(table)), "table": table}


def _drive_prefill_paged(entry: Entry, oracle: Oracle) -> Compared:
    """The first five tokens of every prompt, then the rest of them all."""
    states, table, page_len = _pages(entry, oracle)
    inputs = _paged_prompts(oracle, table, page_len)
    packed = ("tokens", "positions", "rows", "slots")
    is_early = inputs["positions"] < NUM_EARLY  # padding too
    early = {name: inputs[name][is_early] for name in packed}
    late = {name: inputs[name][~is_early] for name in packed}
    some = torch.zeros(len(table), dtype=torch.int32)
    entry.run(states, {**early, "last": some, "table": table})
    lasts = [(late["rows"] == row).nonzero()[:, 0] for row in range(len(table))]
    longer = torch.tensor([row for row, found in enumerate(lasts) if len(found)])
    last = torch.stack([found.max() if len(found) else some[0] for found in lasts]).int()
    logits = entry.run(states, {**late, "last": last, "table": table})[0]
    ends = inputs["positions"][inputs["last"].long()].long()
    return logits[longer], oracle.logits[longer, ends[longer]]


def _drive_decode_paged(entry: Entry, oracle: Oracle) -> Compared:
    """Row r starts r steps late; until then it is idle, at position -1."""
    states, table, _ = _pages(entry, oracle)
    num_rows, num_steps = oracle.tokens.shape
    rows = torch.arange(num_rows)
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    for step in range(num_steps + num_rows - 1):
        position = step - rows
        is_live = (position >= 0) & (position < num_steps)
        inputs = {
            "tokens": oracle.tokens[rows, position.clamp(0, num_steps - 1)][:, None].contiguous(),
            "positions": torch.where(is_live, position, -1).int(),
            "table": table,
        }
        step_logits = entry.run(states, inputs)[0]
        for row in rows[is_live]:
            logits[row].append(step_logits[row])
    return torch.stack([torch.stack(row) for row in logits]), oracle.logits


def _drive_step_paged(entry: Entry, oracle: Oracle) -> Compared:
    """All prompts while every row is idle; then all rows step back one token, behind padding."""
    states, table, page_len = _pages(entry, oracle)
    inputs = _paged_prompts(oracle, table, page_len)
    num_rows = len(table)
    rows = torch.arange(num_rows)
    ends = inputs["positions"][inputs["last"].long()].long()
    idle = {
        "step_tokens": torch.zeros(num_rows, 1, dtype=torch.int32),
        "step_positions": torch.full((num_rows,), -1, dtype=torch.int32),
    }
    first = entry.run(states, {**inputs, **idle})[0][:num_rows]
    packed = ("tokens", "positions", "rows", "slots")
    padding = {name: inputs[name][-NUM_PADDING:] for name in packed}
    step = {
        "last": torch.zeros(num_rows, dtype=torch.int32),
        "table": table,
        "step_tokens": oracle.tokens[rows, ends][:, None].contiguous(),
        "step_positions": ends.int(),
    }
    second = entry.run(states, {**padding, **step})[0][num_rows:]
    expected = oracle.logits[rows, ends]
    return torch.cat((first, second)), torch.cat((expected, expected))


DRIVERS: dict[str, Callable[[Entry, Oracle], Compared]] = {
    "forward": _drive_forward,
    "next_token": _drive_next_token,
    "prefill": _drive_prefill,
    "decode": _drive_decode,
    "decode_rows": _drive_decode_rows,
    "prefill_slots": _drive_prefill_slots,
    "prefill_packed": _drive_prefill_packed,
    "step_packed": _drive_step_packed,
    "loss_packed": _drive_loss_packed,
    "log_probs_packed": _drive_log_probs_packed,
    "hidden_packed": _drive_hidden_packed,
    "decode_paged": _drive_decode_paged,
    "prefill_paged": _drive_prefill_paged,
    "step_paged": _drive_step_paged,
}
