"""How fast our kernels and steps are on a device, beside what its memory gives.

PYTHONPATH=exporter:runtime:artifacts:. python tests/gpu/measure.py --output figures.json

It needs torch 2.11 or newer with Triton, a CUDA device with 40 GB and no network, and takes less than
eight minutes. In turn: the bandwidth of a copy; every case of `tests.cuda_kernels`, which must agree
with the operator that it stands for; one weight's products; attention over 32,768 places, in splits
and not; steps of an 8-billion-parameter network of random weights; the same step of transformers
under `torch.compile`, where it is installed; then, in the time that is left, `tests/gpu/graphs.py`.
Differences make the exit status 1, times never. `--device cpu --tiny` with TRITON_INTERPRET=1 runs it
without a device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from llama_export.checkpoint.layout import EMBEDDING
from llama_export.lower.cuda_cached import SPLIT, cuda_attend_cached
from llama_export.lower.cuda_products import cuda_products
from llama_export.model.cached import attend_cached
from tests.cuda_kernels import cases as kernel_cases
from tests.cuda_kernels import compute_as_devices_do
from tests.gpu import graphs
from tests.gpu.calls import Inputs

GIB = 1 << 30
ROUNDS, REPEATS = 5, 20
HEADS, KV_HEADS, WIDTH, PAGE_LEN = 32, 8, 128, 16
ATTENTION_LIMIT = 2**-6
"""Largest difference of attention over random bf16 values of size 1, whose weights are rounded."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: was measured.
        ms: the median of some rounds.
        num_bytes: that it must read, and of a copy write.
        share: of the bandwidth of a copy that these bytes make in this time.
        difference: from the plain form, where that was computed.
        is_good: whether it is within its limit.
    """

    what: str
    ms: float | None = None
    num_bytes: int = 0
    share: float | None = None
    difference: float | None = None
    is_good: bool = True


class Meter:
    """Times calls on a device; the first measurement is the copy that others are compared with."""

    def __init__(self, device: torch.device, *, is_tiny: bool) -> None:
        self.device = device
        self.is_tiny = is_tiny
        self.repeats = 1 if is_tiny else REPEATS
        num = (1 << 20) if is_tiny else 4 * GIB
        source, target = (torch.zeros(num, dtype=torch.uint8, device=device) for _ in range(2))
        self.copy_ms = self.time(lambda: target.copy_(source))
        self.bandwidth = 2 * num / self.copy_ms * 1000

    def row(self, what: str, run: Callable[[], object], num_bytes: int, **found: float) -> Row:
        ms = self.time(run)
        share = num_bytes / ms * 1000 / self.bandwidth
        return Row(what, round(ms, 4), num_bytes, round(share, 3), **found)

    def time(self, run: Callable[[], object]) -> float:
        """Milliseconds of a call, the median of some rounds of several."""
        run()
        times = []
        for _ in range(1 if self.is_tiny else ROUNDS):
            begin = self._now()
            for _ in range(self.repeats):
                run()
            times.append((self._now() - begin) / self.repeats * 1000)
        return statistics.median(times)

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """The same launches as a graph, without Python between them; on a CPU, the call itself."""
        if self.device.type != "cuda":
            return run
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def kernels(meter: Meter) -> Iterator[Row]:
    """Every case of the kernels against its operator."""
    if meter.device.type == "cpu":
        compute_as_devices_do()
    for name, judge in kernel_cases():
        difference, limit = judge(meter.device)
        yield Row(name, difference=difference, is_good=difference <= limit)


def weights_alone(meter: Meter) -> Iterator[Row]:
    """Products with one weight of each kind, and the library's with one of bf16."""
    size, width = (64, 128) if meter.is_tiny else (28672, 4096)
    device = meter.device
    for rows in (1, 16):
        x = torch.randn(rows, width, device=device).bfloat16()
        plain = torch.randn(size, width, device=device).bfloat16()
        scale = torch.ones(size, width // 128, device=device, dtype=torch.bfloat16)
        codes = torch.randint(0, 256, (size, width), device=device, dtype=torch.uint8)
        kinds = {
            "bf16": (plain, []),
            "fp8": (plain.to(torch.float8_e4m3fn), [scale[:, :1].contiguous()]),
            "int8": (codes.view(torch.int8), [scale]),
            "int4": (codes[:, : width // 2].contiguous(), [scale]),
        }
        num = plain.numel() * plain.element_size()
        library = meter.captured(lambda x=x, w=plain: torch.nn.functional.linear(x, w))
        yield meter.row(f"{rows} x library bf16", library, num)
        for kind, (weight, scales) in kinds.items():
            num = sum(t.numel() * t.element_size() for t in (weight, *scales))
            run = meter.captured(
                lambda x=x, w=weight, s=scales, r=rows: cuda_products(x, [w], s, [], True, True, r)
            )
            yield meter.row(f"{rows} x kernel {kind}", run, num)


def attention(meter: Meter) -> Iterator[Row]:
    """A step over a long context, in splits, and with all places of a row read by one program."""
    places = 4 * PAGE_LEN if meter.is_tiny else 32768
    split = 32 if meter.is_tiny else SPLIT
    for rows in (1, 2) if meter.is_tiny else (1, 32):
        arguments = _long_context(rows, places, meter.device)
        first = [arguments[0][:1], *arguments[1:4], *(t[:1] for t in arguments[4:])]
        expected = attend_cached(*first)
        num = sum(state.numel() * state.element_size() for state in arguments[1:3])
        for name, split_len in ((f"splits of {split}", split), ("one program a row", places)):
            run = meter.captured(lambda a=arguments, s=split_len: cuda_attend_cached(*a, s))
            actual = cuda_attend_cached(*arguments, split_len)[:1]
            difference = float((actual - expected).abs().max())
            yield meter.row(
                f"{rows} rows at {places}, {name}", run, num,
                difference=difference, is_good=difference <= ATTENTION_LIMIT,
            )  # fmt: skip


def _long_context(rows: int, places: int, device: torch.device) -> list[Tensor]:
    pages = places // PAGE_LEN
    shape = (rows * pages, KV_HEADS, PAGE_LEN, WIDTH)
    q = torch.randn(rows, HEADS, WIDTH, device=device).bfloat16()
    keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(rows * pages, device=device).int().view(rows, pages)
    order = torch.arange(rows, device=device, dtype=torch.int32)
    positions = torch.full((rows,), places - 1, device=device, dtype=torch.int32)
    return [q, keys, values, table, order, positions]


def steps(meter: Meter, folder: Path, num_layers: int | None) -> Iterator[Row]:
    """Steps of one row of the whole network, as graphs; native code on a device."""
    is_cuda = meter.device.type == "cuda"
    for preset in ("llama-3.1-8b-instruct", "llama-3.1-8b-instruct-fp8"):
        found = graphs.network(preset, num_layers, is_tiny=meter.is_tiny)
        weights = graphs.random_weights(found, meter.device)
        num = sum(t.numel() * t.element_size() for n, t in weights.items() if n != EMBEDDING)
        for format in ("aoti", "pt2") if is_cuda else ("pt2",):
            case = graphs.Case(preset, "decode", format)
            bench = graphs.Bench(meter.device, folder, 1024, batch=1)
            entry = bench.graphed(case, found, weights)
            states = entry.new_states()
            inputs: Inputs = {
                "tokens": torch.ones(1, 1, dtype=torch.int32),
                "pos": torch.tensor(1, dtype=torch.int32),
            }
            yield meter.row(f"step: {case}", lambda e=entry, s=states, i=inputs: e.run(s, i), num)
        del weights


def peer(meter: Meter, num_layers: int | None) -> Iterator[Row]:
    """The step of transformers, compiled with graphs by `torch.compile`, over a static cache."""
    if importlib.util.find_spec("transformers") is None:
        yield Row("transformers is not installed")
        return
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    found = graphs.network("llama-3.1-8b-instruct", num_layers, is_tiny=meter.is_tiny).config
    config = LlamaConfig(
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        intermediate_size=found.intermediate_size,
        num_hidden_layers=found.num_layers,
        num_attention_heads=found.num_heads,
        num_key_value_heads=found.num_kv_heads,
        head_dim=found.head_dim,
        dtype=torch.bfloat16,
    )
    with torch.device(meter.device):
        model = LlamaForCausalLM(config).bfloat16().eval()
        cache = StaticCache(config=config, max_cache_len=1024)
        tokens = torch.ones(1, 1, dtype=torch.long)
        position = torch.ones(1, dtype=torch.long)
    forward = model.forward
    if meter.device.type == "cuda":
        forward = torch.compile(forward, mode="reduce-overhead", fullgraph=True)

    def run() -> object:
        with torch.no_grad():
            return forward(tokens, past_key_values=cache, cache_position=position).logits

    run()  # compiles, and once more for the graph
    run()
    embedding = model.get_input_embeddings().weight
    num = sum(p.numel() * p.element_size() for p in model.parameters() if p is not embedding)
    yield meter.row("step: transformers, torch.compile, bf16", run, num)


def line(row: Row) -> str:
    """A row of the table, as text."""
    ms = "" if row.ms is None else f"{row.ms:.3f} ms"
    share = "" if row.share is None else f"{row.share:.0%}"
    difference = "" if row.difference is None else f"{row.difference:.2e}"
    return f"{'' if row.is_good else 'WRONG ':>6}{ms:>12} {share:>6} {difference:>10}  {row.what}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="speed of kernels and steps on a device")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes, one round")
    parser.add_argument("--layers", type=int, help="so many of the 32 layers")
    parser.add_argument("--seconds", type=float, default=440, help="nothing begins after these")
    parser.add_argument("--output", type=Path, help="a file for the figures")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if chosen.device == "cuda" else torch.device("cpu")
    started = time.monotonic()
    meter = Meter(device, is_tiny=chosen.tiny)
    rows = [Row(f"copy, {meter.bandwidth / 1e9:.0f} GB/s", round(meter.copy_ms, 4))]
    left = []
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "kernels": lambda: kernels(meter),
            "weights": lambda: weights_alone(meter),
            "attention": lambda: attention(meter),
            "steps": lambda: steps(meter, Path(folder), chosen.layers),
            "peer": lambda: peer(meter, chosen.layers),
        }
        for name, part in parts.items():
            if time.monotonic() - started > chosen.seconds:
                left.append(name)
                continue
            for row in part():
                rows.append(row)
                sys.stdout.write(line(row) + "\n")
                sys.stdout.flush()
            _write(chosen.output, meter, rows, left)
    status = 0 if all(row.is_good for row in rows) and not left else 1
    if chosen.tiny:
        return status
    rest = chosen.seconds - (time.monotonic() - started)
    return max(status, graphs.main(["--device", chosen.device, "--seconds", str(rest)]))


def _write(output: Path | None, meter: Meter, rows: list[Row], left: list[str]) -> None:
    if output is None:
        return
    is_cuda = meter.device.type == "cuda"
    found = {
        "device": torch.cuda.get_device_name(meter.device) if is_cuda else "cpu",
        "torch": torch.__version__,
        "bytes_per_second": round(meter.bandwidth),
        "rows": [asdict(row) for row in rows],
        "not_run": left,
    }
    output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
