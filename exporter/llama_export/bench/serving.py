"""Measures serving: many requests in flight, in turn with one at a time, in one engine's program."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from llama_artifacts.errors import VerificationError
from llama_export.bench import remote
from llama_export.bench.figures import percentiles, spread
from llama_export.bench.machine import cpu_name
from llama_export.bench.remote import Remote
from llama_export.bench.rounds import Start, StartMachine, setup_of, today, workload
from llama_export.bench.setting import Setting
from llama_export.bench.tokens import MARGINS, agreement
from llama_export.page.timings import Latency, Machine, Timing, Timings
from llama_export.report import Reporter

Answer = dict[str, Any]


def measure(
    setting: Setting,
    scratch: Path,
    *,
    reporter: Reporter,
    start: Start = remote.start,
    start_machine: StartMachine = remote.start_machine,
) -> Timings:
    """Times `setting.requests` requests, `setting.concurrency` and one at a time.

    A run that is not timed comes first, and shows whether both say the same.

    Raises:
        SessionError: the bundle lacks the entries of an engine.
        VerificationError: a request's tokens depend on what else is in flight.
    """
    prompts = setting.prompts()
    ways = list(dict.fromkeys((setting.concurrency, 1)))
    answers: dict[int, list[Answer]] = {way: [] for way in ways}
    rates = []
    process = start("serve", setup_of(setting, scratch, "bundle", setting.formats[0]))
    machine = start_machine(setting.threads)
    try:
        described = process.call("describe")
        with reporter.step("warm up"):
            first = [_serve(process, setting, prompts, way)["tokens"] for way in ways]
        equal = _check(setting, process, prompts, first[-1], first[0])
        for number in range(setting.runs):
            with reporter.step(f"run {number + 1} of {setting.runs}"):
                rates.append(machine.call("measure"))
                for way in ways:
                    answers[way].append(_serve(process, setting, prompts, way))
        peak = process.call("peak")["peak_memory_bytes"]
    finally:
        process.close()
        machine.close()
    best = {name: median(rate[name] for rate in rates) for name in rates[0]}
    rows = tuple(
        _row(f"{described['label']}, {way} at a time", answers[way], peak, equal) for way in ways
    )
    kept = Machine(cpu_name(), setting.threads, **best)
    return Timings(rows, today(), described["versions"], kept, workload(setting, None))


def _serve(process: Remote, setting: Setting, prompts: list[tuple[int, ...]], way: int) -> Answer:
    return process.call("serve", prompts=prompts, num_new=setting.new_tokens, concurrency=way)


def _check(
    setting: Setting,
    process: Remote,
    prompts: list[tuple[int, ...]],
    alone: list[list[int]],
    together: list[list[int]],
) -> str:
    """How many requests have the tokens that they have alone; the others must end in a tie."""
    limit = MARGINS[setting.manifest.dtype]
    num_equal = 0
    for index, prompt in enumerate(prompts):
        expected = alone[index]

        def margin(count: int, token: int, before: tuple[int, ...] = prompt) -> float:
            tokens = [*before, *expected[:count]]  # noqa: B023 - called before the next round
            return float(process.call("margin", tokens=tokens, token=token)["margin"])

        found = agreement(expected, together[index], limit, margin)
        if not found.is_good:
            raise VerificationError(
                f"expected the tokens that request {index} has alone or a tie within {limit}, "
                f"got {found}",
                where=setting.bundle.folder,
                hint="check the bundle with `llama-export verify --law rows --law pages`",
            )
        num_equal += found.margin is None
    return f"tokens equal: {num_equal} of {len(prompts)} requests"


def _row(method: str, answers: list[Answer], peak: int, note: str) -> Timing:
    counts = [sum(map(len, answer["tokens"])) for answer in answers]
    rate = spread([n / answer["seconds"] for n, answer in zip(counts, answers, strict=True)])
    ttft = [value for answer in answers for value in answer["ttft_ms"]]
    token = [value for answer in answers for value in answer["token_ms"]]
    return Timing(
        method=method,
        ttft_ms=percentiles(ttft)[0],
        decode_tok_s=rate.median,
        decode_tok_s_range=rate.range,
        peak_memory_bytes=peak,
        notes=note,
        latency=Latency(
            ttft_ms=percentiles(ttft),
            token_ms=percentiles(token) if token else (),
            pages_peak=max(answer["pages_peak"] for answer in answers),
            pages_total=answers[0]["pages_total"],
        ),
    )
