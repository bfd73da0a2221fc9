"""Measures serving: many requests in flight, in turn with one at a time, over one loaded bundle."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from llama_artifacts.errors import VerificationError
from llama_export.bench import remote
from llama_export.bench.figures import Spread, percentiles, spread
from llama_export.bench.machine import cpu_name
from llama_export.bench.remote import Remote
from llama_export.bench.rounds import Start, StartMachine, setup_of, today, workload
from llama_export.bench.setting import Setting
from llama_export.bench.tokens import MARGINS, agreement
from llama_export.page.timings import Latency, Machine, Timing, Timings
from llama_export.report import Reporter

NUM_WARM_UP = 3
"""Requests before the timed ones: one whose prompt comes alone, others beside its steps."""

Answer = dict[str, Any]


@dataclass
class _Way:
    """So many requests in flight, and what was measured of it."""

    concurrency: int
    prompts: list[tuple[int, ...]]
    answers: list[Answer] = field(default_factory=list)

    def serve(self, process: Remote, num_new: int) -> None:
        """Serves all of the prompts once more."""
        answer = process.call(
            "serve", prompts=self.prompts, num_new=num_new, concurrency=self.concurrency
        )
        self.answers.append(answer)

    @property
    def tokens(self) -> list[list[int]]:
        """Of each request in the first run."""
        found: list[list[int]] = self.answers[0]["tokens"]
        return found

    @property
    def rate(self) -> Spread:
        """New tokens per second."""
        return self._per_second(0)

    @property
    def rate_of_all(self) -> Spread:
        """Tokens per second, those of the prompts included."""
        return self._per_second(sum(map(len, self.prompts)))

    def _per_second(self, extra: int) -> Spread:
        counts = [extra + sum(map(len, answer["tokens"])) for answer in self.answers]
        pairs = zip(counts, self.answers, strict=True)
        return spread([count / answer["seconds"] for count, answer in pairs])


def measure(
    setting: Setting,
    scratch: Path,
    *,
    reporter: Reporter,
    start: Start = remote.start,
    start_machine: StartMachine = remote.start_machine,
) -> Timings:
    """Times `setting.requests` requests, `setting.concurrency` at a time.

    In turn with that, the first `setting.alone` of them are served one at a time. The tokens of
    both are compared after the first run of each; a few requests before it are not timed.

    Raises:
        SessionError: the bundle lacks the entries of an engine.
        VerificationError: a request's tokens depend on what else is in flight.
    """
    ways = _ways(setting)
    with contextlib.ExitStack() as stack:
        process = start("serve", setup_of(setting, scratch, "bundle", setting.formats[0]))
        stack.callback(process.close)
        machine = start_machine(setting.threads)
        stack.callback(machine.close)
        described = process.call("describe")
        with reporter.step("warm up"):
            for way in ways:
                few = way.prompts[:NUM_WARM_UP]
                process.call("warm_up", prompts=few, concurrency=way.concurrency)
        rates, equal = _rounds(setting, ways, process, machine, reporter)
        peak = process.call("peak")["peak_memory_bytes"]
    best = {name: median(rate[name] for rate in rates) for name in rates[0]}
    kept = Machine(cpu_name(), setting.threads, **best)
    rows = tuple(_row(described["label"], way, peak) for way in ways)
    if len(rows) > 1:
        rows = _with_notes(rows, setting, equal)
    return Timings(rows, today(), described["versions"], kept, workload(setting, None))


def _rounds(
    setting: Setting, ways: list[_Way], process: Remote, machine: Remote, reporter: Reporter
) -> tuple[list[Answer], str]:
    """Serves in every way in turn; the machine's rates before each turn, and `_check`'s note."""
    rates, equal = [], ""
    for number in range(setting.runs):
        with reporter.step(f"run {number + 1} of {setting.runs}"):
            rates.append(machine.call("measure"))
            for way in ways:
                way.serve(process, setting.new_tokens)
        if number == 0 and len(ways) > 1:
            equal = _check(setting, process, *ways)
    return rates, equal


def _ways(setting: Setting) -> list[_Way]:
    prompts = setting.prompts()
    ways = [_Way(setting.concurrency, prompts)]
    if setting.concurrency > 1 and setting.alone:
        ways.append(_Way(1, prompts[: setting.alone]))
    return ways


def _check(setting: Setting, process: Remote, together: _Way, alone: _Way) -> str:
    """How many requests have the tokens that they have alone; the others must end in a tie."""
    limit = MARGINS[setting.manifest.dtype]
    num_equal = 0
    for index, (prompt, expected) in enumerate(zip(alone.prompts, alone.tokens, strict=True)):

        def margin(
            count: int,
            token: int,
            prompt: tuple[int, ...] = prompt,
            expected: Sequence[int] = expected,
        ) -> float:
            tokens = [*prompt, *expected[:count]]
            return float(process.call("margin", tokens=tokens, token=token)["margin"])

        found = agreement(expected, together.tokens[index], limit, margin)
        if not found.is_good:
            raise VerificationError(
                f"expected the tokens that request {index} has alone or a tie within {limit}, "
                f"got {found}",
                where=setting.bundle.folder,
                hint="check the bundle with `llama-export verify --law rows --law pages`",
            )
        num_equal += found.margin is None
    return f"tokens equal: {num_equal} of {len(alone.prompts)}"


def _with_notes(rows: tuple[Timing, ...], setting: Setting, equal: str) -> tuple[Timing, ...]:
    together, alone = rows
    assert together.decode_tok_s
    assert alone.decode_tok_s
    ratio = together.decode_tok_s / alone.decode_tok_s
    return (
        replace(together, notes=f"{ratio:.2f} x one at a time"),
        replace(alone, notes=f"the first {setting.alone} requests; {equal}"),
    )


def _row(label: str, way: _Way, peak: int) -> Timing:
    ttft = [value for answer in way.answers for value in answer["ttft_ms"]]
    token = [value for answer in way.answers for value in answer["token_ms"]]
    rate, rate_of_all = way.rate, way.rate_of_all
    return Timing(
        method=f"{label}, {way.concurrency} at a time",
        ttft_ms=percentiles(ttft)[0],
        decode_tok_s=rate.median,
        decode_tok_s_range=rate.range,
        peak_memory_bytes=peak,
        latency=Latency(
            ttft_ms=percentiles(ttft),
            token_ms=percentiles(token) if token else (),
            pages_peak=max(answer["pages_peak"] for answer in way.answers),
            pages_total=way.answers[0]["pages_total"],
            all_tok_s=rate_of_all.median,
            all_tok_s_range=rate_of_all.range,
            host_share=median(1 - a["program_s"] / a["step_s"] for a in way.answers),
        ),
    )
