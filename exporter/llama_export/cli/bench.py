"""`llama-export bench`: how fast a bundle runs, beside other engines and the machine's limits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llama_artifacts.codec import encode
from llama_artifacts.summary import show_bytes
from llama_export.bench.methods import PEERS
from llama_export.cli import output
from llama_export.cli.options import (
    Command,
    bundle_argument,
    formats_option,
    json_option,
    option,
    weights_dir_option,
)

if TYPE_CHECKING:
    from llama_export.bench.setting import Setting, WorkloadName
    from llama_export.page.timings import Timing, Timings

EXAMPLES = (
    ("Decoding, and how near it is to the memory's speed:", "llama-export bench smollm2-135m"),
    (
        "A prompt, in turn with another engine:",
        "llama-export bench smollm2-135m --workload prefill --compare transformers",
    ),
    (
        "What a longer state costs:",
        "llama-export bench long --beside short --prompt-len 100 --new-tokens 32",
    ),
    ("How long a program takes to build:", "llama-export bench smollm2-135m --workload build"),
    ("From start to first token:", "llama-export bench smollm2-135m --workload load --runs 9"),
    (
        "64 requests of up to 128 prompt tokens, sixteen in flight:",
        "llama-export bench serving --workload serve --requests 64 --concurrency 16",
    ),
    (
        "Kept in the bundle, and as a picture:",
        "llama-export bench smollm2-135m --record --plot roofline.png",
    ),
)
WORKLOADS = ("decode", "prefill", "load", "serve", "build")
WORK, SERVING, PROGRAM, RESULT = "Workload", "Of the workload serve", "Program", "Result"
COLUMNS = ("method", "tok/s", "first token ms", "load s", "memory", "disk", "of limit", "notes")
BUILD_COLUMNS = ("program", "build s", "memory", "file", "notes")


class BenchCommand(Command):
    """The command whose help lists the peers."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Peers"):
            formatter.write_dl(list(PEERS.items()))
        super().format_epilog(ctx, formatter)


@click.command(cls=BenchCommand, examples=EXAMPLES)
@bundle_argument
@option(
    "--workload",
    group=WORK,
    type=click.Choice(WORKLOADS),
    default="decode",
    help="`decode`: tokens after a prompt; `prefill`: a prompt; `load`: from the start of a process"
    " to its first token; `serve`: many requests through the engine; `build`: one program, made and"
    " taken from the cache.",
)
@option(
    "--compare",
    "peers",
    group=WORK,
    type=click.Choice(tuple(PEERS)),
    metavar="PEER",
    multiple=True,
    show_default="none",
    help="An engine to run in turn with the bundle, from the list below; repeat it for several.",
)
@option(
    "--beside",
    group=WORK,
    type=click.Path(path_type=Path),
    metavar="BUNDLE",
    multiple=True,
    show_default="none",
    help="Another bundle of the same model and batch to run in turn, such as one of more positions;"
    " repeat it for several.",
)
@option(
    "--runs",
    group=WORK,
    type=click.IntRange(1),
    metavar="N",
    show_default="5; build 1",
    help="Timed runs.",
)
@option(
    "--prompt-len",
    group=WORK,
    type=click.IntRange(1),
    metavar="N",
    show_default="512; load 16, serve 128; fewer in a small bundle",
    help="Tokens of the prompt; with `serve` the most, lengths are random from a quarter up.",
)
@option(
    "--new-tokens",
    group=WORK,
    type=click.IntRange(1),
    metavar="N",
    show_default="decode 128, serve 32, else 1",
    help="Tokens after the prompt.",
)
@option(
    "--requests",
    group=SERVING,
    type=click.IntRange(1),
    metavar="N",
    show_default="32",
    help="Requests; a new one comes as soon as another has ended.",
)
@option(
    "--concurrency",
    group=SERVING,
    type=click.IntRange(1),
    metavar="N",
    show_default="4, or the bundle's rows",
    help="Requests in flight.",
)
@option(
    "--alone",
    group=SERVING,
    type=click.IntRange(0),
    metavar="N",
    show_default="16, or all",
    help="How many of the requests, the first ones, to serve one at a time too, to compare; 0: none.",
)
@formats_option(
    "A format to run; repeat it for several, in turn.",
    group=PROGRAM,
    show_default="the best that fits this machine",
)
@option(
    "--threads",
    group=PROGRAM,
    type=click.IntRange(1),
    metavar="N",
    show_default="one per core",
    help="CPU threads of every method.",
)
@weights_dir_option
@option(
    "--record",
    group=RESULT,
    is_flag=True,
    show_default=False,
    help="Keep the figures in the bundle, as `bench.json`; its page shows them.",
)
@option(
    "--plot",
    group=RESULT,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    show_default="none",
    help="Draw the roofline into a file .png or .svg (of `decode` and `prefill`).",
)
@json_option
def command(
    *,
    bundle: Path,
    workload: WorkloadName,
    runs: int | None,
    threads: int | None,
    record: bool,
    plot: Path | None,
    as_json: bool,
    **choices: Any,
) -> None:
    """Measure how fast a bundle runs.

    BUNDLE is the folder that `llama-export build` wrote.

    Every method runs in a process of its own, and all take turns, run by run, after one that is not
    timed. Figures are medians with quartiles. What the machine can do at most (bytes read per
    second, matrix products) is measured between the runs. The figures of a peer are shown only if
    it gives the bundle's tokens, up to a tie within the rounding of the dtype.

    `serve` puts requests through one engine, greedily, without a prefix cache. Its figures are
    tokens per second of all requests together, percentiles of the time from a request to its first
    token and from there to each next one, the most pages in use, and the share of the engine's time
    that no program takes. The first requests, served one at a time, must have the same tokens.
    """
    _check_usage(workload, plot, choices)
    from llama_export.bench.machine import num_cores
    from llama_export.bench.setting import make_setting

    runs = runs or (1 if workload == "build" else 5)
    setting = make_setting(bundle, workload, runs=runs, threads=threads or num_cores(), **choices)
    timings = _measure(setting, plot)
    if record:
        from llama_export.bench.record import record as keep

        keep(bundle, timings)
    if as_json:
        output.write_json(encode(timings))
    else:
        _show(timings)


def _check_usage(workload: str, plot: Path | None, choices: Mapping[str, Any]) -> None:
    for name in ("requests", "concurrency", "alone"):
        if workload != "serve" and choices[name] is not None:
            raise click.UsageError(f"`--{name}` needs `--workload serve`, got {workload}")
    others = (*choices["peers"], *choices["beside"])
    if workload == "serve" and others:
        raise click.UsageError("`--workload serve` compares with one request at a time, no PEER")
    if workload == "build" and others:
        raise click.UsageError("`--workload build` compares with the cache, no PEER")
    if workload in ("serve", "build") and len(choices["formats"]) > 1:
        raise click.UsageError(f"`--workload {workload}` takes one `--format`")
    if plot is not None and workload not in ("decode", "prefill"):
        raise click.UsageError("`--plot` needs the workload decode or prefill")
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise click.UsageError(f"expected `--plot` FILE.png or FILE.svg, got `{plot.name}`")


def _measure(setting: Setting, plot: Path | None) -> Timings:
    from llama_export.bench import building, figures, rounds, serving

    if plot is not None:
        from llama_export.bench.plot import check_library, write_plot

        check_library()
    special: dict[str, Callable[..., Timings]] = {
        "serve": serving.measure,
        "build": building.measure,
    }
    measure = special.get(setting.name, rounds.measure)
    with output.reporter() as reporter, tempfile.TemporaryDirectory() as scratch:
        timings = measure(setting, Path(scratch), reporter=reporter)
    if plot is not None:
        step_flops = figures.prompt_flops(setting.manifest, 1)
        write_plot(timings, plot, step_flops=step_flops, dtype=setting.manifest.dtype)
    return timings


def _show(timings: Timings) -> None:
    machine, workload = timings.machine, timings.workload
    assert machine is not None
    assert workload is not None
    if workload.requests:
        columns = ("", *(row.method for row in timings.rows))
        output.write_table(_serve_table(timings.rows), columns=columns)
        work = f"{workload.requests:,} requests, prompts up to {workload.prompt_len:,}"
    elif workload.name == "build":
        output.write_table([_build_row(row) for row in timings.rows], columns=BUILD_COLUMNS)
        work = f"rows {workload.rows}"
    else:
        output.write_table([_row(row) for row in timings.rows], columns=COLUMNS)
        work = f"prompt {workload.prompt_len:,}, rows {workload.rows}"
    output.write(
        f"\n{workload.name}: {work}, new tokens {workload.new_tokens:,}, runs {workload.runs}\n"
        f"machine: {machine.cpu}, threads {machine.threads}, "
        f"reads {machine.read_bytes_s / 1e9:.1f} GB/s, "
        f"products bf16 {machine.bf16_flop_s / 1e9:,.0f}, f32 {machine.f32_flop_s / 1e9:,.0f}"
        " GFLOP/s\n"
    )


def _row(row: Timing) -> tuple[str, ...]:
    return (
        row.method,
        _spread(row.decode_tok_s, row.decode_tok_s_range, 1),
        _spread(row.ttft_ms, row.ttft_ms_range, 1),
        _spread(row.load_s, row.load_s_range, 2),
        "-" if row.peak_memory_bytes is None else show_bytes(row.peak_memory_bytes),
        "-" if row.disk_bytes is None else show_bytes(row.disk_bytes),
        "-" if row.roofline_share is None else f"{row.roofline_share:.1%}",
        row.notes or "-",
    )


def _serve_table(rows: Sequence[Timing]) -> list[tuple[str, ...]]:
    """A line for each figure, since there are more figures than ways to serve."""
    columns = [_serve_column(row) for row in rows]
    return [(name, *(column[name] for column in columns)) for name in columns[0]]


def _serve_column(row: Timing) -> dict[str, str]:
    latency = row.latency
    assert latency is not None
    share = latency.host_share
    return {
        "new tokens/s": _spread(row.decode_tok_s, row.decode_tok_s_range, 1),
        "tokens/s with prompts": _spread(latency.all_tok_s, latency.all_tok_s_range, 1),
        "first token ms, p50 / p95 / p99": _waits(latency.ttft_ms),
        "next token ms, p50 / p95 / p99": _waits(latency.token_ms),
        "pages at most": f"{latency.pages_peak:,} of {latency.pages_total:,}",
        "outside of programs": "-" if share is None else f"{share:.1%}",
        "memory": "-" if row.peak_memory_bytes is None else show_bytes(row.peak_memory_bytes),
        "notes": row.notes or "-",
    }


def _waits(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values) or "-"


def _build_row(row: Timing) -> tuple[str, ...]:
    sizes = (row.peak_memory_bytes, row.disk_bytes)
    return (
        row.method,
        _spread(row.build_s, row.build_s_range, 2),
        *("-" if size is None else show_bytes(size) for size in sizes),
        row.notes,
    )


def _spread(value: float | None, ends: tuple[float, ...], digits: int) -> str:
    """`101.2 (99.8-103.0)`: the median and the quartiles."""
    if value is None:
        return "-"
    shown = f"{value:.{digits}f}"
    return f"{shown} ({ends[0]:.{digits}f}-{ends[1]:.{digits}f})" if ends else shown
