"""Serving, with an engine that is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import VerificationError
from llama_export.bench import serve, serving
from llama_export.bench.methods import Setup
from llama_export.bench.serve import Server
from llama_export.bench.setting import Setting, make_setting
from llama_export.page.timings import Timings
from llama_export.report import Reporter
from tests.cli.synthetic import PAGED, PROGRAMS, write_bundle
from tests.exporter.benches import Fake


@dataclasses.dataclass
class Output:
    request_id: str
    token: int | None = None
    finish_reason: str | None = None
    error: Exception | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass
class Stats:
    pages_used: int
    program_s: float
    pages_total: int = 9


class FakeEngine:
    """Gives every request one token a step: the length of its prompt, or `odd` beside others.

    Its `log` has the requests that are in it at each step. A step takes a second of `clock`, half
    of it in the program.
    """

    def __init__(self, rows: int, odd: int, log: list[list[str]], clock: list[float]) -> None:
        self.rows, self.odd, self.log, self.clock = rows, odd, log, clock
        self.jobs: dict[str, list[int]] = {}
        self.num_steps = 0

    def add(self, request: tuple[str, Sequence[int], int]) -> None:
        name, prompt, num_new = request
        self.jobs[name] = [len(prompt), num_new]

    @property
    def has_work(self) -> bool:
        return bool(self.jobs)

    @property
    def stats(self) -> Stats:
        return Stats(len(self.jobs), 0.5 * self.num_steps)

    def step(self) -> list[Output]:
        self.num_steps += 1
        self.clock[0] += 1
        self.log.append([*self.jobs])
        outputs, extra = [], self.odd if len(self.jobs) > 1 else 0
        for name, job in list(self.jobs.items()):
            job[1] -= 1
            reason = None if job[1] else "length"
            top = ((job[0], -0.5), (job[0] + 1, -0.6))
            outputs.append(Output(name, job[0] + extra, reason, top_logprobs=top))
            if not job[1]:
                del self.jobs[name]
        return outputs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that a server sees."""
    now = [100.0]
    monkeypatch.setattr(serve, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def server(clock: list[float], log: list[list[str]] | None = None, odd: int = 0) -> Server:
    def request(name: str, prompt: Sequence[int], num_new: int, **options: Any) -> Any:
        return name, prompt, num_new

    steps = [] if log is None else log
    return Server(lambda rows: FakeEngine(rows, odd, steps, clock), request, "fake")


def test_a_server_keeps_so_many_in_flight(clock: list[float]) -> None:
    log: list[list[str]] = []
    answer = server(clock, log).serve([[1], [1, 2], [1, 2, 3]], 2, 2)
    assert answer["tokens"] == [[1, 1], [2, 2], [3, 3]]
    assert log == [["0", "1"], ["0", "1"], ["2"], ["2"]]
    assert (answer["ttft_ms"], answer["token_ms"]) == ([1000.0] * 3, [1000.0] * 3)
    assert (answer["pages_peak"], answer["pages_total"]) == (2, 9)
    assert (answer["seconds"], answer["step_s"], answer["program_s"]) == (4, 4, 2)


def test_a_warm_up_has_prompts_alone_and_beside_steps_and_steps_alone(clock: list[float]) -> None:
    log: list[list[str]] = []
    assert server(clock, log).warm_up([[1], [1, 2], [1, 2, 3]], 2) == {}
    # Each joins when the one before it has its first token: four tokens, one a step.
    assert log == [["0"], ["0", "1"], ["0", "1", "2"], ["0", "1", "2"], ["1", "2"], ["2"]]


def test_a_server_tells_how_close_a_token_was(clock: list[float]) -> None:
    assert server(clock).margin([1, 2], 3)["margin"] == pytest.approx(0.1)
    assert server(clock).margin([1, 2], 9)["margin"] == float("inf")


class ServerProcess(Fake):
    def __init__(self, server: Server, log: list[str]) -> None:
        super().__init__("serve", (), log)
        self.server = server

    def call(self, do: str, **values: Any) -> dict[str, Any]:
        size = (
            f" {len(values['prompts'])} by {values['concurrency']}" if "prompts" in values else ""
        )
        self.log.append(do + size)
        found: dict[str, Any] = getattr(self.server, do)(**values)
        return found


def setting_of(tmp_path: Path, **changes: Any) -> Setting:
    """Five requests of up to 8 tokens and 3 new ones, run twice."""
    bundle = open_bundle(tmp_path / "b")
    step = bundle.manifest.programs[1]
    sizes = {"requests": 5, "concurrency": 3, "alone": 4} | changes
    return Setting(bundle, {}, "serve", step, 8, 3, 2, 1, **sizes)


def served(
    tmp_path: Path, clock: list[float], odd: int = 0, **changes: Any
) -> tuple[Timings, list[str]]:
    write_bundle(tmp_path / "b")
    log: list[str] = []
    timings = serving.measure(
        setting_of(tmp_path, **changes),
        tmp_path,
        reporter=Reporter(),
        start=lambda kind, setup: ServerProcess(server(clock, odd=odd), log),
        start_machine=lambda threads: Fake("machine", (), []),
    )
    return timings, log


@pytest.mark.parametrize(("odd", "num_equal"), [(0, 4), (1, 0)])
def test_serving_together_and_alone(
    tmp_path: Path, clock: list[float], odd: int, num_equal: int
) -> None:
    timings, log = served(tmp_path, clock, odd)  # the odd token is a tie within what bf16 can tell
    together, alone = timings.rows
    assert [row.method for row in timings.rows] == ["fake, 3 at a time", "fake, 1 at a time"]
    # Five requests of three tokens: three in three steps, then two; alone twelve tokens, a step each.
    assert (together.decode_tok_s, alone.decode_tok_s) == (15 / 6, 1)
    assert together.notes == "2.50 x one at a time"
    assert alone.notes == f"the first 4 requests; tokens equal: {num_equal} of 4"
    assert together.latency is not None
    assert alone.latency is not None
    assert (len(together.latency.token_ms), together.latency.host_share) == (3, 0.5)
    assert (together.latency.pages_peak, alone.latency.pages_peak) == (3, 1)
    num_prompt = sum(map(len, setting_of(tmp_path).prompts()))
    assert together.latency.all_tok_s == (15 + num_prompt) / 6
    assert timings.workload is not None
    assert timings.workload.alone == 4
    margins = ["margin"] * (4 - num_equal)
    assert log == [
        *["describe", "warm_up 3 by 3", "warm_up 3 by 1", "serve 5 by 3", "serve 4 by 1"],
        *[*margins, "serve 5 by 3", "serve 4 by 1", "peak", "serve closed"],
    ]


def test_those_served_alone_are_the_first_ones(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b", programs=(*PROGRAMS, PAGED))
    made = make_setting(bundle, "serve", runs=1, threads=1, requests=5, concurrency=3, alone=2)
    together, alone = serving._ways(made)
    assert (together.concurrency, alone.concurrency) == (3, 1)
    assert together.prompts == made.prompts()
    assert alone.prompts == together.prompts[:2]


@pytest.mark.parametrize("changes", [{"alone": 0}, {"concurrency": 1}])
def test_serving_in_one_way_only(
    tmp_path: Path, clock: list[float], changes: dict[str, int]
) -> None:
    timings, log = served(tmp_path, clock, odd=2, **changes)
    (row,) = timings.rows
    assert (row.notes, log.count("margin")) == ("", 0)
    assert timings.workload is not None
    assert timings.workload.alone == 0


def test_serving_that_depends_on_others_is_refused(tmp_path: Path, clock: list[float]) -> None:
    with pytest.raises(VerificationError, match="expected the tokens that request 0 has alone"):
        served(tmp_path, clock, odd=2)


@pytest.mark.slow
def test_a_server_of_a_bundle(tiny_packed_bundle: Path, tmp_path: Path) -> None:
    made = Server.open(Setup("bundle", tiny_packed_bundle, tmp_path, 1, 8, format="pt2"))
    prompts = [[5, 6, 7], [8] * 20, [9], [10] * 9]
    made.warm_up(prompts, 3)
    together, alone = made.serve(prompts, 6, 3), made.serve(prompts[:2], 6, 1)
    assert made.describe()["label"] == "pt2"
    assert [len(tokens) for tokens in together["tokens"]] == [6] * 4
    assert together["tokens"][:2] == alone["tokens"]
    assert 0 < together["program_s"] < together["step_s"] < together["seconds"]
    assert (together["pages_peak"], alone["pages_peak"]) == (4, 2)
