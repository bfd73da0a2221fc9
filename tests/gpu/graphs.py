"""Whether CUDA graphs give what the eager path gives, bit for bit: a script for a fresh machine.

PYTHONPATH=exporter:runtime:artifacts:. python tests/gpu/graphs.py --output figures.json

It needs torch 2.11 or newer, a CUDA device with 40 GB and no network: the weights are random, of
the size of an 8-billion-parameter model, made on the device. Every entry that can be captured is
traced and called twenty times, in bf16 and FP8; once through graphs, once with the same padding but
launched anew (the results must be equal bit for bit), once without padding (the difference is
reported). `--device cpu --tiny` runs the same script anywhere, with `tests.recording` in place of
the capture.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llama_artifacts.manifest import Format, Numerics, Program
from llama_export.checkpoint.config import LlamaConfig
from llama_export.checkpoint.layout import E4M3, coded_modules
from llama_export.entries import registry
from llama_export.footprint.network import Network, from_model, plain_tensors
from llama_export.lower.backend import Place, backend
from llama_export.model import rope
from llama_export.model.llama import INV_FREQ
from llama_export.trace import Job, torch_dtype
from llama_runtime.cuda_graphs import CudaGraphs, CudaRecorder, GraphProgram, Recorder
from llama_runtime.entry import Entry
from llama_runtime.programs.base import Loading, load_program
from llama_runtime.states import States
from tests.gpu.calls import BATCH, ENTRIES, Calls, Sizes, meant
from tests.recording import StepRecorder

NUM_STEPS, PAGE_SIZE = 20, 16
TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Case:
    """One program: weights of a preset's kind, an entry, a format."""

    preset: str
    entry: str
    format: Format = "pt2"
    numerics: Numerics = "exact"

    def __str__(self) -> str:
        kind = f"fp8 {self.numerics}" if "fp8" in self.preset else "bf16"
        return f"{kind} {self.entry} {self.format}"


@dataclass(frozen=True)
class Figures:
    """What was found; times in milliseconds a step, the last ten steps of twenty."""

    case: str
    num_equal: int
    num_steps: int
    are_states_equal: bool
    num_graphs: int
    largest_difference: float
    graph_ms: float
    eager_ms: float
    prepare_s: float


def cases(device: str) -> Iterator[Case]:
    """The most telling ones first, in case time runs out."""
    plain, eight = "llama-3.1-8b-instruct", "llama-3.1-8b-instruct-fp8"
    for preset in (plain, eight):
        for entry in ENTRIES:
            yield Case(preset, entry)
    if device == "cuda":  # FP8 units, and a compiler for the device
        yield Case(eight, "decode_paged", "pt2", "fast")
        yield Case(plain, "decode_paged", "aoti")
        yield Case(plain, "decode_rows", "aoti")


def network(preset: str, num_layers: int | None, *, is_tiny: bool) -> Network:
    found = from_model(preset)
    if is_tiny:
        config: LlamaConfig = replace(found.config, **TINY)
        modules = {m for m in coded_modules(found.tensors) if _layer(m) < config.num_layers}
        tensors = plain_tensors(config, found.dtype, frozenset(modules))
        found = replace(found, config=config, tensors=tensors)
    return found if num_layers is None else found.first_layers(num_layers)


def _layer(module: str) -> int:
    return int(module.split(".")[2])


def random_weights(found: Network, device: torch.device) -> dict[str, torch.Tensor]:
    """Values of the size that trained ones have, so that nothing overflows in 32 layers."""
    generator = torch.Generator(device).manual_seed(1)
    weights = {}
    for name, info in found.tensors.items():
        if name == INV_FREQ:
            weights[name] = rope.inverse_frequencies(found.config.rope, found.config.head_dim).to(
                device
            )
            continue
        values = torch.empty(info.shape, device=device, dtype=torch.bfloat16)
        if name.endswith("_scale"):
            values.fill_(2**-9)
        elif len(info.shape) == 1:
            values.fill_(1)
        else:
            values.normal_(0, 0.02, generator=generator)
        if info.dtype == E4M3:
            values.mul_(2**9)
        weights[name] = values.to(torch_dtype(info.dtype))
    return weights


class Bench:
    """Runs cases on one device."""

    def __init__(
        self, device: torch.device, folder: Path, max_seq: int, *, batch: int = BATCH
    ) -> None:
        self._device = device
        self._batch = batch
        self._folder = folder
        self._max_seq = max_seq

    def run(self, case: Case, found: Network, weights: Mapping[str, torch.Tensor]) -> Figures:
        started = time.perf_counter()
        loading = self._lowered(case, found, weights)
        prepare_s = time.perf_counter() - started
        *entries, graphs = self._entries(loading)
        sizes = Sizes(self._max_seq, PAGE_SIZE, found.config.vocab_size)
        pool = {"PoolPages": sizes.pool_pages} if case.entry.endswith("_paged") else {}
        states = [entry.new_states(**pool) for entry in entries]
        results, times = [], []
        for inputs in Calls(sizes).of(case.entry, NUM_STEPS):
            outputs, clocks = [], []
            for entry, own in zip(entries, states, strict=True):
                begin = self._now()
                outputs.append(meant(case.entry, entry.run(own, inputs)[0]))
                clocks.append(self._now() - begin)
            results.append(outputs)
            times.append(clocks)
        late = times[NUM_STEPS // 2 :]
        plain = torch.stack([(a.float() - c.float()).abs().amax() for a, _, c in results])
        return Figures(
            case=str(case),
            num_equal=sum(torch.equal(b, c) for _, b, c in results),
            num_steps=NUM_STEPS,
            are_states_equal=_are_equal(states[1], states[2], is_pool=bool(pool)),
            num_graphs=graphs.num_graphs,
            largest_difference=round(float(plain.max()), 6),
            graph_ms=round(1000 * sum(t[2] for t in late) / len(late), 3),
            eager_ms=round(1000 * sum(t[0] for t in late) / len(late), 3),
            prepare_s=round(prepare_s, 1),
        )

    def graphed(self, case: Case, found: Network, weights: Mapping[str, torch.Tensor]) -> Entry:
        """The entry of a case, through graphs."""
        return self._entries(self._lowered(case, found, weights))[2]

    def _lowered(self, case: Case, found: Network, weights: Mapping[str, torch.Tensor]) -> Loading:
        own = registry.Sizes(
            found.config,
            batch=self._batch,
            max_seq=self._max_seq,
            dtype=found.dtype,
            page_size=PAGE_SIZE,
        )
        spec = registry.find(case.entry)
        maker = backend(case.format)
        # The form for CUDA, which reads no position back, also where the CPU stands for it.
        place = Place(
            device="cuda",
            isa=None,
            folder=self._folder,
            weights=weights if case.format == "aoti" else None,
            inv_freq=weights[INV_FREQ].cpu(),
            extents={},
            numerics=case.numerics,
        )
        form = maker.formulation(torch_dtype(found.dtype), place)
        job = Job(found.config, spec, spec.stem, spec.signature(own), form, found.tensors)
        lowered = maker.lower(job, place)
        record = Program(
            entry=case.entry,
            format=case.format,
            file=lowered.file,
            dtype=found.dtype,
            target=lowered.target,
            signature=job.signature,
            constants=lowered.constants,
            requires=lowered.requires,
            numerics=case.numerics if "fp8" in case.preset else None,
        )
        return Loading(self._folder / lowered.file, record, weights, self._device, None)

    def _entries(self, loading: Loading) -> tuple[Entry, Entry, Entry, CudaGraphs]:
        """Without graphs; with their padding, launched anew; with graphs."""
        record, device = loading.program, self._device
        program = load_program(replace(loading, uses_graphs=True))
        real: Recorder = CudaRecorder(device) if device.type == "cuda" else StepRecorder()
        programs = [program]
        for recorder in (StepRecorder(), real):
            graphs = CudaGraphs(device, recorder, is_required=True)
            programs.append(GraphProgram(program, record, recorder, graphs))
        eager, padded, graphed = (Entry(record, one, device) for one in programs)
        return eager, padded, graphed, graphs

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _are_equal(first: States, second: States, *, is_pool: bool) -> bool:
    """Whether all but the scratch is: page 0 of a pool, the last position of a row."""
    if is_pool:
        return all(torch.equal(first[name][1:], second[name][1:]) for name in first)
    return all(torch.equal(first[name][:, :, :-1], second[name][:, :, :-1]) for name in first)


def _is_good(found: Figures) -> bool:
    is_near = math.isfinite(found.largest_difference)
    return found.num_equal == found.num_steps and found.are_states_equal and is_near


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="CUDA graphs against the eager path")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a network of two small layers")
    parser.add_argument("--case", default="", help="only cases whose name has this in it")
    parser.add_argument("--layers", type=int, help="so many of the 32 layers")
    parser.add_argument("--seconds", type=float, default=420, help="no case begins after these")
    parser.add_argument("--output", type=Path, help="a file for the figures")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if chosen.device == "cuda" else torch.device("cpu")
    max_seq = 64 if chosen.tiny else 1024
    started, found_all, left, loaded = time.monotonic(), [], [], ""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(device, Path(folder), max_seq)
        for case in cases(chosen.device):
            if chosen.case not in str(case):
                continue
            if time.monotonic() - started > chosen.seconds:
                left.append(str(case))
                continue
            if case.preset != loaded:
                weights = None  # the old ones first
                found = network(case.preset, chosen.layers, is_tiny=chosen.tiny)
                weights, loaded = random_weights(found, device), case.preset
            figures = bench.run(case, found, weights)
            found_all.append(figures)
            sys.stdout.write(json.dumps(asdict(figures)) + "\n")
            sys.stdout.flush()
    bad = [f.case for f in found_all if not _is_good(f)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    summary: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - started, 1),
        "not_equal": bad,
        "not_run": left,
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    if chosen.output:
        lines = {**summary, "figures": [asdict(figures) for figures in found_all]}
        chosen.output.write_text(json.dumps(lines, indent=2) + "\n")
    return 1 if bad or left else 0


if __name__ == "__main__":
    sys.exit(main())
