"""The entries that serve many rows at once, on a real model against transformers.

Three chats of different lengths are kept in one state: in rows or in the pages of a pool, packed,
padded, in chunks, behind a page that they share, and while their neighbours are answered already.
`transformers` sees each chat alone and whole. Every state holds a large number before use, so that a
read of what was never written shows, and the tables of pages are scattered.

Building the programs takes minutes, so that only `make test-long` runs these tests. It takes the
portable programs; `LLAMA_EXPORT_TEST_FORMATS=pt2,aoti,onnx make test-long` takes all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import llama_runtime
from llama_runtime import Entry, LoadedBundle, States
from tests.end_to_end.conftest import MAX_SEQ, SERVING_BATCH, SERVING_PAGE_LEN
from tests.end_to_end.oracle import Oracle
from tests.end_to_end.texts import TEXT

# The figures show with `--log-cli-level info`.
_LOG = logging.getLogger(__name__)

pytestmark = [pytest.mark.slow, pytest.mark.long]

ATOL = 1e-4
POISON = 1e4
SCRATCH = MAX_SEQ - 1
MAX_NEW = 16
NUM_PAGES = 12
POOL_PAGES = 1 + SERVING_BATCH * NUM_PAGES
FILLER = 5  # the token of padding and of idle rows

ALICE = TEXT.split("\n\n")
QUESTIONS = (
    f"Who wrote this?\n\n{ALICE[0]}\n\n{ALICE[1]}",
    "Why is the sky blue?",
    f"Summarize in one sentence:\n\n{ALICE[1]}",
)
CAPITALS = tuple(f"What is the capital of {place}?" for place in ("France", "Italy", "Spain"))
"""As chats they have the same number of tokens, and answers that end at different times."""

Tensors = dict[str, torch.Tensor]
Part = tuple[int, int, int]
"""A row, its first position and the one after its last."""
Same = Callable[[int, int, torch.Tensor], None]


@dataclass(frozen=True)
class Chat:
    """A prompt, the greedy answer to it, and the reference's logits [MAX_NEW, V] before each."""

    prompt: list[int]
    answer: list[int]
    logits: torch.Tensor

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer


def encode(bundle: LoadedBundle, question: str) -> list[int]:
    return bundle.tokenizer.encode_chat([{"role": "user", "content": question}])


@pytest.fixture(scope="module")
def bundle(serving_bundle: Path) -> LoadedBundle:
    return llama_runtime.load(serving_bundle)


@pytest.fixture(scope="module")
def chats(bundle: LoadedBundle, oracle_f32: Oracle) -> list[Chat]:
    result = []
    for question in QUESTIONS:
        prompt = encode(bundle, question)
        answer = oracle_f32.greedy(prompt, max_new=MAX_NEW)
        logits = oracle_f32.logits(prompt + answer)[len(prompt) - 1 : -1]
        result.append(Chat(prompt, answer, logits))
    lengths = [len(chat.prompt) for chat in result]
    assert lengths[0] > 100
    assert len(set(lengths)) == SERVING_BATCH
    return result


@pytest.fixture
def same(chats: list[Chat]) -> Iterator[Same]:
    """Compares logits [V] with those before token number `number` of a row's answer."""
    differences = []

    def check(row: int, number: int, logits: torch.Tensor) -> None:
        difference = float((logits - chats[row].logits[number]).abs().max())
        assert difference <= ATOL, f"row {row}, token {number} of its answer"
        assert int(logits.argmax()) == chats[row].answer[number]
        differences.append(difference)

    yield check
    assert len(differences) >= MAX_NEW
    _LOG.info("largest difference %.2e of %d answers", max(differences), len(differences))


def poisoned(entry: Entry, **sizes: int) -> States:
    states = entry.new_states(**sizes)
    for tensor in states.values():
        tensor.fill_(POISON)
    return states


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(chats: Sequence[Chat], parts: Sequence[Part], padding: int = 0) -> Tensors:
    """Parts of prompts one after the other, then padding; all but what the kinds of state need."""
    places = [(row, position) for row, start, end in parts for position in range(start, end)]
    tokens = [chats[row].prompt[position] for row, position in places]
    ends = {row: index for index, (row, _) in enumerate(places)}
    return {
        "tokens": ints([*tokens, *[FILLER] * padding]),
        "rows": ints([*(row for row, _ in places), *[0] * padding]),
        "positions": ints([*(position for _, position in places), *[SCRATCH] * padding]),
        "last": ints([ends.get(row, 0) for row in range(len(chats))]),
    }


def in_rows(chats: Sequence[Chat], rows: Sequence[int], padding: int = 0) -> Tensors:
    """The prompts of these rows as `prefill_packed` takes them."""
    inputs = packed(chats, [(row, 0, len(chats[row].prompt)) for row in rows], padding)
    segments = inputs["rows"].clone()
    segments[len(segments) - padding :] = len(chats)
    return {**inputs, "segments": segments}


def in_pages(
    chats: Sequence[Chat], table: torch.Tensor, parts: Sequence[Part], padding: int = 0
) -> Tensors:
    """Parts of prompts as `prefill_paged` takes them."""
    inputs = packed(chats, parts, padding)
    num_real = len(inputs["tokens"]) - padding
    inputs["positions"][num_real:] = 0
    rows, positions = inputs["rows"].long(), inputs["positions"].long()
    pages = table[rows, positions // SERVING_PAGE_LEN]
    slots = pages * SERVING_PAGE_LEN + positions % SERVING_PAGE_LEN
    slots[num_real:] = 0
    return {**inputs, "slots": slots.int(), "table": table}


def scattered() -> torch.Tensor:
    """A table whose rows share no page and never name page 0."""
    order = torch.randperm(POOL_PAGES - 1, generator=torch.Generator().manual_seed(1))
    return (order + 1).reshape(SERVING_BATCH, NUM_PAGES).int()


def step(chats: Sequence[Chat], known: Mapping[int, int], idle: int) -> Tensors:
    """Feeds each row the last of the tokens known of its answer; rows not named are idle."""
    tokens, positions = [FILLER] * len(chats), [idle] * len(chats)
    for row, num_known in known.items():
        positions[row] = len(chats[row].prompt) + num_known - 1
        tokens[row] = chats[row].tokens[positions[row]]
    return {"tokens": ints(tokens)[:, None], "positions": ints(positions)}


def named_step(chats: Sequence[Chat], known: Mapping[int, int], idle: int) -> Tensors:
    """The same as the mixed entries name it."""
    return {f"step_{name}": value for name, value in step(chats, known, idle).items()}


def finish(
    decode: Entry,
    states: States,
    chats: Sequence[Chat],
    known: Mapping[int, int],
    same: Same,
    table: torch.Tensor | None = None,
) -> None:
    """Steps until every answer is whole; a row that is done early is idle from then on."""
    further = {} if table is None else {"table": table}
    going = {row: num_known for row, num_known in known.items() if num_known < MAX_NEW}
    while going:
        inputs = step(chats, going, SCRATCH if table is None else -1)
        logits = decode.run(states, {**inputs, **further})[0]
        for row, num_known in going.items():
            same(row, num_known, logits[row])
        going = {row: number + 1 for row, number in going.items() if number + 1 < MAX_NEW}


# Rows of a state.


def test_prompts_in_slots(bundle: LoadedBundle, chats: list[Chat], same: Same) -> None:
    fill = bundle.entry("prefill_slots")
    states = poisoned(fill)
    slots = (2, 0, 1)
    width = max(len(chat.prompt) for chat in chats)
    tokens = [[*chat.prompt, *[FILLER] * (width - len(chat.prompt))] for chat in chats]
    lengths = [len(chat.prompt) for chat in chats]
    logits = fill.run(states, {"tokens": tokens, "slots": ints(slots), "lengths": ints(lengths)})[0]
    for number in range(len(chats)):
        same(number, 0, logits[number])
    by_slot = [chats[slots.index(slot)] for slot in range(len(chats))]

    def same_in_slot(slot: int, number: int, logits: torch.Tensor) -> None:
        same(slots.index(slot), number, logits)

    known = dict.fromkeys(slots, 1)
    finish(bundle.entry("decode_rows"), states, by_slot, known, same_in_slot)


def test_packed_prompts(bundle: LoadedBundle, chats: list[Chat], same: Same) -> None:
    fill = bundle.entry("prefill_packed")
    states = poisoned(fill)
    logits = fill.run(states, in_rows(chats, (2, 0, 1), padding=3))[0]
    for row in range(len(chats)):
        same(row, 0, logits[row])
    finish(bundle.entry("decode_rows"), states, chats, dict.fromkeys(range(3), 1), same)


def test_a_prompt_beside_steps_of_rows(bundle: LoadedBundle, chats: list[Chat], same: Same) -> None:
    entry = bundle.entry("step_packed")
    states = poisoned(entry)
    first = in_rows(chats, (1, 2))
    logits = entry.run(states, {**first, **named_step(chats, {}, SCRATCH)})[0]
    for row in (1, 2):
        same(row, 0, logits[row])
    steps = named_step(chats, {1: 1, 2: 1}, SCRATCH)
    logits = entry.run(states, {**in_rows(chats, (0,), padding=2), **steps})[0]
    same(0, 0, logits[0])
    for row in (1, 2):
        same(row, 1, logits[len(chats) + row])
    finish(bundle.entry("decode_rows"), states, chats, {0: 1, 1: 2, 2: 2}, same)


def test_a_prompt_step_by_step(bundle: LoadedBundle, chats: list[Chat], same: Same) -> None:
    """One row alone, from its first token; the others stay idle and poisoned."""
    decode, paged_decode = bundle.entry("decode_rows"), bundle.entry("decode_paged")
    states, pool = poisoned(decode), poisoned(paged_decode, PoolPages=POOL_PAGES)
    table = scattered()
    for position, token in enumerate(chats[1].prompt):
        tokens = ints([FILLER, token, FILLER])[:, None]
        inputs = {"tokens": tokens, "positions": ints([SCRATCH, position, SCRATCH])}
        logits = decode.run(states, inputs)[0]
        inputs = {"tokens": tokens, "positions": ints([-1, position, -1]), "table": table}
        paged_logits = paged_decode.run(pool, inputs)[0]
    same(1, 0, logits[1])
    same(1, 0, paged_logits[1])
    finish(decode, states, chats, {1: 1}, same)
    finish(paged_decode, pool, chats, {1: 1}, same, table)


# Pages of a pool.


def test_prompts_in_chunks_over_pages(bundle: LoadedBundle, chats: list[Chat], same: Same) -> None:
    fill = bundle.entry("prefill_paged")
    states, table = poisoned(fill, PoolPages=POOL_PAGES), scattered()
    ends = [len(chat.prompt) for chat in chats]
    fill.run(states, in_pages(chats, table, [(0, 0, 100), (2, 0, 15)]))
    rest = [(2, 15, ends[2]), (0, 100, ends[0]), (1, 0, ends[1])]
    logits = fill.run(states, in_pages(chats, table, rest, padding=2))[0]
    for row in range(len(chats)):
        same(row, 0, logits[row])
    known = dict.fromkeys(range(3), 1)
    finish(bundle.entry("decode_paged"), states, chats, known, same, table)


def test_prompts_behind_a_shared_page(bundle: LoadedBundle, chats: list[Chat], same: Same) -> None:
    """Chats begin with the same system prompt: its page is written once, by the first row."""
    fill = bundle.entry("prefill_paged")
    states, table = poisoned(fill, PoolPages=POOL_PAGES), scattered()
    page = SERVING_PAGE_LEN
    assert all(chat.prompt[:page] == chats[0].prompt[:page] for chat in chats)
    table[:, 0] = table[0, 0]
    ends = [len(chat.prompt) for chat in chats]
    logits = fill.run(states, in_pages(chats, table, [(0, 0, ends[0])]))[0]
    same(0, 0, logits[0])
    logits = fill.run(states, in_pages(chats, table, [(1, page, ends[1]), (2, page, ends[2])]))[0]
    for row in (1, 2):
        same(row, 0, logits[row])
    known = dict.fromkeys(range(3), 1)
    finish(bundle.entry("decode_paged"), states, chats, known, same, table)


def test_a_prompt_in_chunks_beside_steps(
    bundle: LoadedBundle, chats: list[Chat], same: Same
) -> None:
    entry = bundle.entry("step_paged")
    states, table = poisoned(entry, PoolPages=POOL_PAGES), scattered()
    ends = [len(chat.prompt) for chat in chats]
    first = in_pages(chats, table, [(1, 0, ends[1]), (2, 0, ends[2])])
    logits = entry.run(states, {**first, **named_step(chats, {}, -1)})[0]
    for row in (1, 2):
        same(row, 0, logits[row])
    for number, (start, end) in enumerate(((0, 90), (90, ends[0])), start=1):
        steps = named_step(chats, {1: number, 2: number}, -1)
        chunk = in_pages(chats, table, [(0, start, end)], padding=number)
        logits = entry.run(states, {**chunk, **steps})[0]
        for row in (1, 2):
            same(row, number, logits[len(chats) + row])
    same(0, 0, logits[0])
    finish(bundle.entry("decode_paged"), states, chats, {0: 1, 1: 3, 2: 3}, same, table)


# Whole answers in one call.


@pytest.fixture(scope="module")
def capitals(bundle: LoadedBundle) -> list[list[int]]:
    """Three prompts of one length, since the entries that generate have one position for all."""
    prompts = [encode(bundle, question) for question in CAPITALS]
    assert len({len(prompt) for prompt in prompts}) == 1
    return prompts


def filled(bundle: LoadedBundle, prompts: Sequence[list[int]]) -> tuple[States, Tensors]:
    """Rows that hold all but the last token of each prompt, and the inputs that go on."""
    fill = bundle.entry("prefill_slots")
    states = poisoned(fill)
    pos = len(prompts[0]) - 1
    tokens = [prompt[:pos] for prompt in prompts]
    order = list(range(len(prompts)))
    fill.run(states, {"tokens": tokens, "slots": order, "lengths": [pos] * len(prompts)})
    last = ints([prompt[pos] for prompt in prompts])[:, None]
    return states, {"token": last, "pos": torch.tensor(pos, dtype=torch.int32)}


@pytest.mark.parametrize("name", ["generate<16>", "generate_until<32>"])
def test_an_answer_in_one_call(bundle: LoadedBundle, chats: list[Chat], name: str) -> None:
    """The row that is looked at goes on from a long prompt; the others hold other chats' tokens."""
    entry, chat, num = bundle.entry(name), chats[0], len(chats[0].prompt)
    others = [(other.tokens * num)[:num] for other in chats[1:]]
    states, inputs = filled(bundle, [others[0], chat.prompt, others[1]])
    if "eos" in {spec.name for spec in entry.signature.inputs}:
        inputs["eos"] = ints(bundle.manifest.stop_tokens[:1])[0]
    assert entry.run(states, inputs)[0][1, :MAX_NEW].tolist() == chat.answer


def test_generate_knows_no_end(
    bundle: LoadedBundle, capitals: list[list[int]], oracle_f32: Oracle
) -> None:
    """It gives the greedy tokens past the end of a text too."""
    states, inputs = filled(bundle, capitals)
    tokens = bundle.entry("generate<16>").run(states, inputs)[0].tolist()
    for prompt, answer in zip(capitals, tokens, strict=True):
        # If each token is the likeliest after all before it, they are the greedy ones.
        likeliest = oracle_f32.logits(prompt + answer)[len(prompt) - 1 : -1].argmax(-1)
        assert answer == likeliest.tolist()


def test_generate_until_ends_where_the_texts_do(
    bundle: LoadedBundle, capitals: list[list[int]], oracle_f32: Oracle
) -> None:
    eos = bundle.manifest.stop_tokens[0]
    states, inputs = filled(bundle, capitals)
    entry = bundle.entry("generate_until<32>")
    tokens, count = entry.run(states, {**inputs, "eos": torch.tensor(eos, dtype=torch.int32)})
    expected = [oracle_f32.greedy(prompt, max_new=32) for prompt in capitals]
    assert all(answer[-1] == eos for answer in expected)
    assert len({len(answer) for answer in expected}) == len(capitals)
    assert max(map(len, expected)) > MAX_NEW
    assert count.tolist() == [len(answer) for answer in expected]
    assert tokens.tolist() == [[*answer, *[0] * (32 - len(answer))] for answer in expected]


# Log-probabilities.


def test_log_probs_of_packed_chats(
    bundle: LoadedBundle, chats: list[Chat], oracle_f32: Oracle
) -> None:
    sequences = [chats[row].tokens for row in (2, 0, 1)]
    fed = [tokens[:-1] for tokens in sequences]
    inputs = {
        "tokens": [token for tokens in fed for token in tokens],
        "positions": [position for tokens in fed for position in range(len(tokens))],
        "segments": [number for number, tokens in enumerate(fed) for _ in tokens],
        "targets": [token for tokens in sequences for token in tokens[1:]],
    }
    actual = bundle.entry("log_probs_packed").run(None, inputs)[0]
    expected = []
    for tokens in sequences:
        log_probs = oracle_f32.logits(tokens)[:-1].log_softmax(-1)
        expected.append(log_probs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0])
    difference = float((actual - torch.cat(expected)).abs().max())
    _LOG.info("largest difference %.2e", difference)
    assert difference <= ATOL
