"""The timings that a bundle carries, if it was timed: the one schema of `bench.json`."""

from __future__ import annotations

from dataclasses import dataclass, field

from llama_artifacts.bundle import Bundle, check_digest
from llama_artifacts.codec import decode
from llama_artifacts.errors import IntegrityError, ManifestError
from llama_artifacts.strict_json import parse_object

FILE_NAME = "bench.json"
MAX_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Latency:
    """How requests fared that shared an engine.

    Attributes:
        ttft_ms: milliseconds to the first token: percentiles 50, 95 and 99.
        token_ms: milliseconds from one token to the next: percentiles 50, 95 and 99.
        pages_peak: most pages of the pool that texts had after a step.
        pages_total: pages of the pool.
        all_tok_s: tokens per second of all requests together, those of their prompts included.
        all_tok_s_range: quartiles of `all_tok_s` over the runs.
        host_share: the share of the time of the engine's steps that is not spent in a program:
            planning, making inputs, choosing tokens.
    """

    ttft_ms: tuple[float, ...]
    token_ms: tuple[float, ...]
    pages_peak: int
    pages_total: int
    all_tok_s: float | None = None
    all_tok_s_range: tuple[float, ...] = ()
    host_share: float | None = None


@dataclass(frozen=True)
class Timing:
    """One way to run the model; figures are medians over the runs.

    Attributes:
        method: what ran, such as `aoti, 2 threads`.
        ttft_ms: milliseconds to the first token.
        decode_tok_s: tokens per second after it; new tokens of all requests together where they
            share an engine.
        load_s: seconds until the first call could be made; of `llama-export bench`, from the start
            of the process to its first token.
        peak_memory_bytes: most memory of the process.
        notes: anything else.
        ttft_ms_range: quartiles (25th, 75th percentile) of `ttft_ms` over the runs.
        decode_tok_s_range: those of `decode_tok_s`.
        load_s_range: those of `load_s`.
        disk_bytes: size of the files that it needs: weights, programs, tokenizer.
        roofline_share: the rate reached, as a share of what the machine's read bandwidth (decode)
            or matrix products (prefill) allow.
        max_logit_difference: largest difference of a logit after the prompt from the first
            method's.
        latency: where requests shared an engine.
        build_s: seconds of a build of one program, from the start of the process to its end.
        build_s_range: quartiles of `build_s` over the runs.
    """

    method: str
    ttft_ms: float | None = None
    decode_tok_s: float | None = None
    load_s: float | None = None
    peak_memory_bytes: int | None = None
    notes: str = ""
    ttft_ms_range: tuple[float, ...] = ()
    decode_tok_s_range: tuple[float, ...] = ()
    load_s_range: tuple[float, ...] = ()
    disk_bytes: int | None = None
    roofline_share: float | None = None
    max_logit_difference: float | None = None
    latency: Latency | None = None
    build_s: float | None = None
    build_s_range: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and value < 0:
                raise ValueError(f"expected `{name}` of at least 0, got {value}")


@dataclass(frozen=True)
class Machine:
    """What ran it, and the rates that it reached between the runs (medians).

    Attributes:
        cpu: the processor's name.
        threads: CPU threads that each method had.
        read_bytes_s: bytes per second of a sum over memory that no cache holds.
        bf16_flop_s: floating point operations per second of a large matrix product.
        f32_flop_s: the same in float32.
    """

    cpu: str
    threads: int
    read_bytes_s: float
    bf16_flop_s: float
    f32_flop_s: float


@dataclass(frozen=True)
class Workload:
    """What every method had to do.

    Attributes:
        name: `decode`, `prefill`, `load`, `serve` or `build`.
        prompt_len: tokens of the prompt; the most that a prompt has where lengths are random.
        new_tokens: tokens after it.
        runs: how often each method did it.
        rows: texts side by side in one call; 1 where requests come one by one.
        requests: how many there were; 0 where the workload is one text.
        concurrency: most requests in flight.
        alone: how many of the requests, the first ones, were served one at a time too.
        step_bytes: bytes that one step must read: weights and the positions in use.
        prompt_flops: floating point operations of the prompt.
    """

    name: str
    prompt_len: int
    new_tokens: int
    runs: int
    rows: int = 1
    requests: int = 0
    concurrency: int = 1
    alone: int = 0
    step_bytes: int | None = None
    prompt_flops: int | None = None


@dataclass(frozen=True)
class Timings:
    """All rows, in the order in which they were measured, and how.

    Attributes:
        rows: one for each method.
        date: of the measurement, UTC, such as `2026-03-01`.
        versions: of what ran, by package.
        machine: where it ran.
        workload: what was done.
    """

    rows: tuple[Timing, ...]
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    machine: Machine | None = None
    workload: Workload | None = None


def read_timings(bundle: Bundle) -> tuple[Timing, ...]:
    """The rows of `bench.json`; none where the bundle has no such file.

    Raises:
        IntegrityError: the file is damaged or too large.
        ManifestError: it breaks the format, with the key path.
    """
    file = bundle.manifest.files.get(FILE_NAME)
    if file is None:
        return ()
    path = bundle.path(FILE_NAME)
    if file.bytes > MAX_BYTES:
        message = f"expected at most {MAX_BYTES:,} bytes, got {file.bytes:,}"
        raise IntegrityError(message, where=path)
    check_digest(bundle, FILE_NAME)
    value = parse_object(path.read_bytes(), where=path, error=ManifestError)
    return decode(Timings, value, where=str(path)).rows
