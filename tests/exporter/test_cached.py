"""Attention over kept keys and values: the operator, and its kernel in native code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from llama_export.model.cached import attend_cached
from tests.exporter.native import ISAS, call_by_threads, compile_native, load_native

NEVER_READ = float("nan")
NUM_COLUMNS, NUM_PAGES = 5, 12


@dataclass(frozen=True)
class Case:
    """Heads and pages of one call, whose tokens stand in three rows of a scattered table.

    Anywhere in them; or, where there is a start, one after the other from there in one row, but for
    the last two.
    """

    dtype: torch.dtype
    kv_heads: int
    group: int
    width: int
    page: int
    num_tokens: int
    q_dtype: torch.dtype = torch.float32
    start: int | None = None

    def arguments(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(self.width * 1000 + self.page * 10 + self.group)
        shape = (NUM_PAGES, self.kv_heads, self.page, self.width)
        q = torch.randn(
            self.num_tokens, self.kv_heads * self.group, self.width, generator=generator
        )
        keys, values = (torch.randn(shape, generator=generator).to(self.dtype) for _ in range(2))
        order = torch.randperm(NUM_PAGES - 2, generator=generator).int() + 2  # two in nobody's use
        table = order.repeat(2)[: 3 * NUM_COLUMNS].view(3, NUM_COLUMNS)
        rows = torch.randint(3, (self.num_tokens,), generator=generator).int()
        last = NUM_COLUMNS * self.page - 1
        positions = torch.randint(last, (self.num_tokens,), generator=generator).int()
        positions[0], positions[-1] = 0, last
        if self.start is not None:
            in_turn = self.num_tokens - 2
            rows[:in_turn] = 1
            positions[:in_turn] = torch.arange(self.start, self.start + in_turn)
        return q.to(self.q_dtype), keys, values, table, rows, positions


IN_TURN = [
    Case(torch.bfloat16, 3, 3, 64, 16, 43, torch.bfloat16, start=0),
    Case(torch.bfloat16, 1, 4, 128, 32, 70, torch.bfloat16, start=61),
    Case(torch.bfloat16, 2, 3, 64, 16, 24, start=30),
    Case(torch.float32, 2, 3, 64, 16, 71, start=5),
    Case(torch.float32, 1, 2, 32, 100, 40, start=99),
]
CASES = [
    *IN_TURN,
    Case(torch.bfloat16, 3, 3, 64, 16, 7),
    Case(torch.bfloat16, 3, 3, 64, 16, 8, torch.bfloat16),
    Case(torch.bfloat16, 1, 2, 32, 100, 9, torch.bfloat16),
    Case(torch.bfloat16, 2, 2, 64, 64, 9, torch.bfloat16),
    Case(torch.bfloat16, 2, 4, 128, 16, 40),
    Case(torch.bfloat16, 1, 8, 80, 100, 1),
    Case(torch.float16, 2, 1, 64, 24, 9),
    Case(torch.float32, 2, 2, 16, 1, 30),
    Case(torch.float32, 2, 3, 48, 32, 11),
    Case(torch.float32, 1, 7, 48, 200, 5),
]


def judged(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, *where: Tensor) -> Tensor:
    """Each token by itself, in float64, over keys that are laid out one after the other."""
    results = []
    for token, row, position in zip(q, *where, strict=True):
        k, v = (
            torch.cat([state[page] for page in table[row]], dim=1)[:, : position + 1].double()
            for state in (keys, values)
        )
        group = token.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        results.append(scaled_dot_product_attention(token.double()[:, None], k, v)[:, 0])
    return torch.stack(results)


def all_arguments() -> list[tuple[Tensor, ...]]:
    return [case.arguments() for case in CASES]


class Calls(nn.Module):
    def forward(self, all_arguments: list[tuple[Tensor, ...]]) -> list[Tensor]:
        return [attend_cached(*arguments) for arguments in all_arguments]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_operator_attends_up_to_the_position(case: Case) -> None:
    arguments = case.arguments()
    actual = attend_cached(*arguments)
    torch.testing.assert_close(actual.double(), judged(*arguments), rtol=1e-5, atol=1e-5)


def test_the_operator_is_whole() -> None:
    torch.library.opcheck(torch.ops.llama_export.attend_cached.default, CASES[0].arguments())


@pytest.fixture(scope="module", params=ISAS)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    return compile_native(Calls(), (all_arguments(),), request.param, folder)


@pytest.mark.slow
def test_the_kernel_in_native_code(package: Path) -> None:
    calls = all_arguments()
    for actual, arguments in zip(call_by_threads(load_native(package), calls), calls, strict=True):
        # Pairs of bf16 are multiplied after the weights, at most 1, are rounded, too.
        is_rounded = arguments[0].dtype == torch.bfloat16
        limit = 2**-8 * float(arguments[2].abs().max()) if is_rounded else 1e-5
        torch.testing.assert_close(actual.double(), judged(*arguments), rtol=1e-5, atol=limit)


@pytest.mark.slow
def test_the_kernel_reads_nothing_that_a_token_does_not_see(package: Path) -> None:
    run = load_native(package)
    calls = all_arguments()
    clean = run(calls)
    for _, keys, values, table, rows, positions in calls:
        seen = torch.zeros(keys.shape[0], keys.shape[2], dtype=torch.bool)
        for row, position in zip(rows, positions, strict=True):
            for place in range(int(position) + 1):
                seen[table[row, place // keys.shape[2]], place % keys.shape[2]] = True
        assert not seen.all()
        for state in (keys, values):
            state.transpose(1, 2)[~seen] = NEVER_READ
    for before, after in zip(clean, run(calls), strict=True):
        assert torch.equal(before, after)


@pytest.mark.slow
def test_tokens_in_turn_give_what_each_gives_by_itself(package: Path) -> None:
    run = load_native(package)
    calls = all_arguments()
    turned = [
        (q.flip(0), keys, values, table, rows.flip(0), positions.flip(0))
        for q, keys, values, table, rows, positions in calls
    ]
    for forward, backward in zip(run(calls), run(turned), strict=True):
        assert torch.equal(forward, backward.flip(0))


@pytest.mark.slow
def test_no_token_sees_what_follows_it_in_the_same_call(package: Path) -> None:
    run = load_native(package)
    calls = all_arguments()
    clean = run(calls)
    for case, (_, keys, values, table, rows, positions) in zip(CASES, calls, strict=True):
        if case in IN_TURN:
            page, place = divmod(int(positions[-3]), case.page)
            for state in (keys, values):
                state[table[rows[-3], page], :, place] = NEVER_READ
    for case, before, after in zip(CASES, clean, run(calls), strict=True):
        if case in IN_TURN:
            assert torch.equal(before[:-3], after[:-3])
            assert after[-3].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "value"), [(3, NUM_PAGES), (3, -1), (4, 3), (5, NUM_COLUMNS * 16), (5, -1)]
)
def test_a_place_that_does_not_exist(package: Path, argument: int, value: int) -> None:
    run = load_native(package)
    calls = all_arguments()
    calls[len(IN_TURN)][argument].view(-1)[1] = value
    with pytest.raises(RuntimeError):
        run(calls)
