"""Every dynamic dimension at its smallest, an odd middle and its largest size, and one beyond.

Expected values are those of transformers, which sees each sequence alone and whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import llama_runtime
from llama_artifacts import manifest_file
from llama_artifacts.errors import InputError
from llama_artifacts.manifest import FORMATS, Format
from llama_export.entries import registry
from llama_runtime import Entry, LoadedBundle, States
from tests.runtime.loading import LOGITS_ATOL, POISON, expected_logits, random_tokens

pytestmark = pytest.mark.slow  # the bundles take minutes to build

NUM_ROWS, LENGTH = 64, 255
BATCH, MAX_SEQ, PAGE_SIZE = 4, 256, 16
USUAL = {"B": 3, "S": 20, "M": 3, "P": 40, "Rows": 3, "Pages": 4, "PoolPages": 1100}

COPIED_PAGES = 5000
"""Of the largest pool that ONNX programs are called with, who give it back as a copy: the largest of all
takes them 5 GB. `make test-long` calls them with that one, too."""

Sizes = dict[str, int]
Tensors = dict[str, torch.Tensor]
Call = Callable[[Entry, Sizes], None]


@pytest.fixture(scope="module", params=FORMATS)
def bundles(
    request: pytest.FixtureRequest, tiny_bundle: Path, tiny_packed_bundle: Path
) -> tuple[LoadedBundle, ...]:
    format: Format = request.param
    folders = (tiny_packed_bundle, tiny_bundle)
    return tuple(llama_runtime.load(folder, format=format) for folder in folders)


def entry_of(bundles: tuple[LoadedBundle, ...], name: str) -> Entry:
    for bundle in bundles:
        if name in bundle.manifest.entries():
            return bundle.entry(name)
    raise AssertionError(name)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return random_tokens(NUM_ROWS, LENGTH)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    return expected_logits(tiny_checkpoint, tokens)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, atol=2 * LOGITS_ATOL, rtol=1e-5)


def new_states(entry: Entry, sizes: Sizes) -> States:
    """Poisoned, but for pools too large to touch as a whole."""
    pages = sizes.get("PoolPages", 1)
    is_pool = "PoolPages" in {dim.name for dim in entry.signature.dims}
    states = entry.new_states(**({"PoolPages": pages} if is_pool else {}))
    for tensor in states.values():
        tensor[: min(len(tensor), USUAL["PoolPages"])] = POISON
    return states


def laid_out(num_tokens: int, num_rows: int, capacity: int) -> list[tuple[int, int]]:
    """Row and position of each packed token, rows filled one after the other; fewer if full."""
    places = [(row, position) for row in range(num_rows) for position in range(capacity)]
    return places[:num_tokens]


class Calls:
    """One method per entry: calls it at some sizes and compares."""

    def __init__(self, tokens: torch.Tensor, expected: torch.Tensor) -> None:
        self.tokens = tokens
        self.expected = expected

    def forward(self, entry: Entry, sizes: Sizes) -> None:
        rows, length = sizes["B"], sizes["S"]
        tokens = self.tokens[:rows, :length].contiguous()
        close(entry.run(None, {"tokens": tokens})[0], self.expected[:rows, :length])

    def next_token(self, entry: Entry, sizes: Sizes) -> None:
        rows, length = sizes["B"], sizes["S"]
        tokens = self.tokens[:rows, :length].contiguous()
        close(entry.run(None, {"tokens": tokens})[0], self.expected[:rows, length - 1])

    def prefill(self, entry: Entry, sizes: Sizes) -> None:
        batch, length = entry.signature.states[0].shape[0], sizes["S"]
        assert isinstance(batch, int)
        tokens = self.tokens[:batch, :length].contiguous()
        logits = entry.run(new_states(entry, sizes), {"tokens": tokens, "pos": 0})[0]
        close(logits, self.expected[:batch, length - 1])

    def prefill_slots(self, entry: Entry, sizes: Sizes) -> None:
        num_prompts, length = sizes["M"], sizes["S"]
        live = min(num_prompts, BATCH)  # prompts for which there is no row are padding
        inputs = {
            "tokens": self.tokens[:num_prompts, :length].contiguous(),
            "slots": ints([*range(live), *[0] * (num_prompts - live)]),
            "lengths": ints([length] * live + [0] * (num_prompts - live)),
        }
        logits = entry.run(new_states(entry, sizes), inputs)[0]
        close(logits[:live], self.expected[:live, length - 1])

    def _prompts(self, sizes: Sizes, num_rows: int) -> tuple[Tensors, dict[int, int]]:
        places = laid_out(sizes["P"], num_rows, LENGTH)
        padding = sizes["P"] - len(places)
        order = {row: index for index, (row, _) in enumerate(places)}
        inputs = {
            "tokens": ints([int(self.tokens[place]) for place in places] + [0] * padding),
            "rows": ints([row for row, _ in places] + [0] * padding),
            "positions": ints([position for _, position in places] + [MAX_SEQ - 1] * padding),
            "segments": ints([row for row, _ in places] + [num_rows] * padding),
            "last": ints([order.get(row, 0) for row in range(num_rows)]),
        }
        return inputs, {row: places[index][1] for row, index in order.items()}

    def prefill_packed(self, entry: Entry, sizes: Sizes) -> None:
        inputs, ends = self._prompts(sizes, BATCH)
        logits = entry.run(new_states(entry, sizes), inputs)[0]
        for row, end in ends.items():
            close(logits[row], self.expected[row, end])

    def step_packed(self, entry: Entry, sizes: Sizes) -> None:
        inputs, ends = self._prompts(sizes, BATCH)
        idle = {"step_tokens": ints([0] * BATCH)[:, None], "step_positions": [MAX_SEQ - 1] * BATCH}
        logits = entry.run(new_states(entry, sizes), {**inputs, **idle})[0]
        for row, end in ends.items():
            close(logits[row], self.expected[row, end])

    def _training(self, sizes: Sizes) -> tuple[Tensors, torch.Tensor]:
        inputs, _ = self._prompts(sizes, NUM_ROWS)
        rows, positions = inputs.pop("rows").long(), inputs["positions"].long()
        del inputs["last"]
        return inputs, self.expected[rows, positions]

    def hidden_packed(self, entry: Entry, sizes: Sizes) -> None:
        inputs, logits = self._training(sizes)
        hidden = entry.run(None, inputs)[0]
        close(hidden @ self.head.T, logits)

    def log_probs_packed(self, entry: Entry, sizes: Sizes) -> None:
        inputs, logits = self._training(sizes)
        targets = random_tokens(sizes["P"], seed=5).long()
        wanted = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        close(entry.run(None, {**inputs, "targets": targets})[0], wanted)

    def loss_packed(self, entry: Entry, sizes: Sizes) -> None:
        inputs, logits = self._training(sizes)
        targets = random_tokens(sizes["P"], seed=5).long()
        wanted = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        weights = torch.full((sizes["P"],), 1 / sizes["P"])
        loss = entry.run(None, {**inputs, "targets": targets, "weights": weights})[0]
        close(loss, -wanted.mean())

    def _paged(self, sizes: Sizes) -> tuple[Tensors, dict[int, int]]:
        num_rows, num_pages = sizes["Rows"], sizes["Pages"]
        # A pool of few pages is shared out to the first rows; the others have no page of theirs.
        own = min(num_rows * num_pages, sizes["PoolPages"] - 1)
        table = torch.zeros(num_rows * num_pages, dtype=torch.int32)
        table[:own] = ints([sizes["PoolPages"] - 1 - i for i in range(own)])
        table = table.reshape(num_rows, num_pages)
        capacity = min(num_pages * PAGE_SIZE, LENGTH)
        places = laid_out(sizes["P"], own // num_pages, capacity)
        padding = sizes["P"] - len(places)
        order = {row: index for index, (row, _) in enumerate(places)}
        slots = [int(table[r, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for r, p in places]
        inputs = {
            "tokens": ints([int(self.tokens[place]) for place in places] + [0] * padding),
            "positions": ints([position for _, position in places] + [0] * padding),
            "rows": ints([row for row, _ in places] + [0] * padding),
            "slots": ints(slots + [0] * padding),
            "last": ints([order.get(row, 0) for row in range(num_rows)]),
            "table": table,
        }
        return inputs, {row: places[index][1] for row, index in order.items()}

    def prefill_paged(self, entry: Entry, sizes: Sizes) -> None:
        inputs, ends = self._paged(sizes)
        logits = entry.run(new_states(entry, sizes), inputs)[0]
        for row, end in ends.items():
            close(logits[row], self.expected[row, end])

    def step_paged(self, entry: Entry, sizes: Sizes) -> None:
        inputs, ends = self._paged(sizes)
        idle = {
            "step_tokens": ints([0] * sizes["Rows"])[:, None],
            "step_positions": ints([-1] * sizes["Rows"]),
        }
        logits = entry.run(new_states(entry, sizes), {**inputs, **idle})[0]
        for row, end in ends.items():
            close(logits[row], self.expected[row, end])

    def decode_paged(self, entry: Entry, sizes: Sizes) -> None:
        """Three steps of every row that has a page; the others are idle."""
        inputs, _ = self._paged({**sizes, "P": 1})
        table = inputs["table"]
        states = new_states(entry, sizes)
        for position in range(3):
            is_live = table[:, 0] > 0
            step = {
                "tokens": self.tokens[: len(table), position : position + 1].contiguous(),
                "positions": torch.where(is_live, position, -1).int(),
                "table": table,
            }
            logits = entry.run(states, step)[0]
            close(logits[is_live], self.expected[: len(table), position][is_live])

    head: torch.Tensor


DIMS = [(spec.name, dim.name) for spec in registry.entries() for dim in spec.dims]


@pytest.fixture(scope="module")
def calls(bundles: tuple[LoadedBundle, ...], tokens: torch.Tensor, expected: torch.Tensor) -> Calls:
    made = Calls(tokens, expected)
    made.head = bundles[0].weights["lm_head.weight"]
    return made


def test_every_entry_is_there_in_every_format(tiny_bundle: Path, tiny_packed_bundle: Path) -> None:
    programs = [
        p for f in (tiny_bundle, tiny_packed_bundle) for p in manifest_file.read(f).programs
    ]
    found = {(program.entry.partition("<")[0], program.format) for program in programs}
    assert found == {(spec.method, format) for spec in registry.entries() for format in FORMATS}


@pytest.mark.parametrize(("name", "dim"), DIMS)
def test_smallest_odd_middle_and_largest(
    bundles: tuple[LoadedBundle, ...], calls: Calls, name: str, dim: str
) -> None:
    entry = entry_of(bundles, name)
    smallest, largest = entry.signature.dim(dim).min, entry.signature.dim(dim).max
    if dim == "PoolPages" and entry.format == "onnx":
        largest = COPIED_PAGES
    middle = (smallest + largest) // 2 | 1
    assert smallest == 1
    assert smallest < middle < largest
    for size in (smallest, middle, largest):
        getattr(calls, name)(entry, {**USUAL, dim: size})


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, dim in DIMS if dim == "PoolPages"])
def test_the_largest_pool(bundles: tuple[LoadedBundle, ...], calls: Calls, name: str) -> None:
    entry = entry_of(bundles, name)
    getattr(calls, name)(entry, {**USUAL, "PoolPages": entry.signature.dim("PoolPages").max})


@pytest.mark.parametrize(("name", "dim"), DIMS)
def test_one_size_too_many_is_refused_with_both_numbers(
    bundles: tuple[LoadedBundle, ...], name: str, dim: str
) -> None:
    entry = entry_of(bundles, name)
    largest = entry.signature.dim(dim).max
    message = f"expected {dim} from 1 to {largest}, got {largest + 1}"
    if dim == "PoolPages":
        with pytest.raises(InputError, match=message):
            entry.new_states(PoolPages=largest + 1)
        return
    sizes = {**{d.name: 2 for d in entry.signature.dims}, dim: largest + 1}
    inputs = {
        spec.name: torch.zeros(
            [sizes[s] if isinstance(s, str) else s for s in spec.shape],
            dtype={"i32": torch.int32, "i64": torch.int64, "f32": torch.float32}[spec.dtype],
        )
        for spec in entry.signature.inputs
    }
    pages = {"PoolPages": 2} if "PoolPages" in sizes else {}
    states = entry.new_states(**pages) if entry.signature.states else None
    with pytest.raises(InputError, match=message):
        entry.run(states, inputs)
