"""Proves a bundle: its files are those that were built, its programs compute what they must.

The oracle is the model run eagerly in float32 over the whole sequence, without any state. States
are filled with a large number before use, so that a read of what was never written shows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import llama_runtime
from llama_artifacts.bundle import check_digest, open_bundle
from llama_artifacts.errors import IntegrityError, LlamaExportError, VerificationError
from llama_artifacts.manifest import WEIGHTS_NAME, Check, Format, Manifest, Program
from llama_export.checkpoint.config import LlamaConfig, RopeConfig
from llama_export.model.llama import Formulation, Llama
from llama_export.report import Reporter
from llama_runtime import compat
from llama_runtime.entry import Entry
from llama_runtime.states import States
from llama_runtime.weights import map_weights

LIMITS = {"f32": 1e-4, "f16": 2e-2, "bf16": 1e-1}
"""Largest difference of the logits allowed, as a share of the largest logit, by compute dtype."""

POISON = 1e4
NUM_TOKENS = 24

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckResult:
    """One law on one program: the figure found, the most it may be, and where it was found."""

    law: str
    entry: str
    format: str
    figure: float
    limit: float
    passed: bool
    detail: str


def verify(
    folder: Path,
    *,
    reporter: Reporter | None = None,
    formats: Sequence[Format] | None = None,
) -> tuple[CheckResult, ...]:
    """Checks every file's digest, then runs every program that this machine can run.

    Args:
        folder: the bundle.
        reporter: told about each check.
        formats: only programs of these; None: all.

    Raises:
        ManifestError, IntegrityError: the bundle cannot even be opened.
    """
    reporter = reporter or Reporter()
    results = [_integrity(folder, reporter)]
    if results[0].passed and open_bundle(folder).manifest.weights != "none":
        results += _run_programs(folder, reporter, formats)
    return tuple(results)


def check_programs(folder: Path, *, reporter: Reporter) -> tuple[Check, ...]:
    """Runs every program that this machine can run, for the manifest's record.

    Raises:
        VerificationError: one is wrong.
    """
    checks = []
    for result in _run_programs(folder, reporter, None):
        if not result.passed:
            raise VerificationError(
                f"{result.law} failed: {result.detail}",
                where=f"{result.entry}/{result.format}",
                hint="this is a fault of llama-export or of the compiler it calls; report it",
            )
        format: Format = result.format  # type: ignore[assignment]
        checks.append(Check(result.law, result.entry, format, result.figure, result.limit))
    return tuple(checks)


def _integrity(folder: Path, reporter: Reporter) -> CheckResult:
    bundle = open_bundle(folder)
    files = bundle.manifest.files
    damaged = []
    with reporter.step("integrity", sum(file.bytes for file in files.values())) as advance:
        for name, file in files.items():
            try:
                check_digest(bundle, name)
            except IntegrityError as cause:
                damaged.append(str(cause))
            advance(file.bytes)
    detail = damaged[0] if damaged else f"{len(files)} files"
    return CheckResult("integrity", "", "", len(damaged), 0, not damaged, detail)


def _run_programs(
    folder: Path, reporter: Reporter, formats: Sequence[Format] | None
) -> list[CheckResult]:
    manifest = open_bundle(folder).manifest
    oracle = None
    results = []
    for program in manifest.programs:
        if formats is not None and program.format not in formats:
            continue
        name = f"{program.entry} {program.format}"
        if program.entry not in _DRIVERS:
            reporter.note(f"{name}: an entry that this version does not know, not run here")
            continue
        if not compat.fits(program, device=_device(program), allow_native=True):
            reporter.note(f"{name}: made for another machine, not run here")
            continue
        with reporter.step(f"check {name}"):
            oracle = oracle or _Oracle(folder, manifest)
            results.append(_parity(folder, program, oracle))
    return results


def _device(program: Program) -> str:
    if program.target.device == "cuda" and not torch.cuda.is_available():
        return "cpu"
    return program.target.device


class _Oracle:
    """Logits [n, V] of the check's tokens, eager, float32, whole sequence."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        num_tokens = min(NUM_TOKENS, manifest.max_seq - 1)
        generator = torch.Generator().manual_seed(0)
        shape = (max(2, manifest.batch), num_tokens)
        self.tokens = torch.randint(
            manifest.model.vocab_size, shape, generator=generator, dtype=torch.int32
        )
        model = Llama(_config(manifest), Formulation(torch.float32, reads_positions=False))
        weights = map_weights(folder / WEIGHTS_NAME)
        try:
            model.load_state_dict(weights, strict=True, assign=True)
        except RuntimeError as cause:
            where = folder / WEIGHTS_NAME
            message = "the weights are not those of the network in the manifest"
            raise IntegrityError(message, where=where, hint="build the bundle again") from cause
        with torch.no_grad():
            self.logits = model(self.tokens)


def _config(manifest: Manifest) -> LlamaConfig:
    model = manifest.model
    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        rope=RopeConfig(theta=1.0),  # the frequencies are among the weights
        max_position=manifest.max_seq,
        tie_word_embeddings=model.tie_word_embeddings,
        attention_bias=model.attention_bias,
        mlp_bias=model.mlp_bias,
    )


def _parity(folder: Path, program: Program, oracle: _Oracle) -> CheckResult:
    limit = LIMITS[program.dtype]
    try:
        actual, expected = _run(folder, program, oracle)
    except Exception as cause:  # a wrong program may fail in any way, and every way is a verdict
        if isinstance(cause, LlamaExportError):
            reason = str(cause)
        else:
            reason = next(iter(str(cause).splitlines()), "") or type(cause).__name__
        _log.debug("%s %s failed", program.entry, program.format, exc_info=cause)
        detail = f"cannot be run: {reason:.300}"
        return CheckResult("parity", program.entry, program.format, math.nan, limit, False, detail)
    difference = (actual.float().cpu() - expected).abs()
    largest = float(difference.max())  # NaN if any is
    figure = largest / float(expected.abs().max())
    passed = figure <= limit  # False for NaN too
    worst = difference.isnan() if math.isnan(largest) else difference == largest
    place = tuple(int(i) for i in torch.nonzero(worst)[0])
    detail = f"max diff {largest:.3g} at {place}, relative limit {limit:g}"
    return CheckResult("parity", program.entry, program.format, figure, limit, passed, detail)


def _run(folder: Path, program: Program, oracle: _Oracle) -> tuple[torch.Tensor, torch.Tensor]:
    """What the program gives, and what it must give."""
    bundle = llama_runtime.load(folder, device=program.target.device, format=program.format)
    entry = bundle.entry(program.entry)
    actual, expected = _DRIVERS[program.entry](entry, oracle)
    if actual.shape != expected.shape:
        raise VerificationError(f"expected {list(expected.shape)}, got {list(actual.shape)}")
    return actual, expected


def _poisoned(entry: Entry) -> States:
    states = entry.new_states()
    for tensor in states.values():
        tensor.fill_(POISON)
    return states


def _drive_forward(entry: Entry, oracle: _Oracle) -> tuple[torch.Tensor, torch.Tensor]:
    return entry.run(None, {"tokens": oracle.tokens})[0], oracle.logits


def _drive_next_token(entry: Entry, oracle: _Oracle) -> tuple[torch.Tensor, torch.Tensor]:
    return entry.run(None, {"tokens": oracle.tokens})[0], oracle.logits[:, -1]


def _drive_prefill(entry: Entry, oracle: _Oracle) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = oracle.tokens[: entry.signature.states[0].shape[0]]
    states, logits, position = _poisoned(entry), [], 0
    cut = tokens.shape[1] * 2 // 3
    for chunk in tokens.split([cut, tokens.shape[1] - cut - 1, 1], dim=1):
        inputs = {"tokens": chunk.contiguous(), "pos": position}
        logits.append(entry.run(states, inputs)[0])
        position += chunk.shape[1]
    return torch.stack(logits, 1), oracle.logits[: len(tokens), [cut - 1, -2, -1]]


def _drive_decode(entry: Entry, oracle: _Oracle) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = oracle.tokens[: entry.signature.states[0].shape[0]]
    states = _poisoned(entry)
    logits = [
        entry.run(states, {"tokens": tokens[:, i : i + 1].contiguous(), "pos": i})[0]
        for i in range(tokens.shape[1])
    ]
    return torch.stack(logits, 1), oracle.logits[: len(tokens)]


def _drive_decode_rows(entry: Entry, oracle: _Oracle) -> tuple[torch.Tensor, torch.Tensor]:
    """Row r starts r steps late; until then it is idle, at the scratch position."""
    num_rows, _, max_seq, _ = entry.signature.states[0].shape
    tokens = oracle.tokens[:num_rows]
    num_steps = tokens.shape[1]
    states, rows = _poisoned(entry), torch.arange(num_rows)
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    for step in range(num_steps + num_rows - 1):
        position = step - rows
        is_live = (position >= 0) & (position < num_steps)
        inputs = {
            "tokens": tokens[rows, position.clamp(0, num_steps - 1)][:, None].contiguous(),
            "positions": torch.where(is_live, position, max_seq - 1).int(),
        }
        step_logits = entry.run(states, inputs)[0]
        for row in rows[is_live]:
            logits[row].append(step_logits[row])
    return torch.stack([torch.stack(row) for row in logits]), oracle.logits[:num_rows]


_DRIVERS: dict[str, Callable[[Entry, _Oracle], tuple[torch.Tensor, torch.Tensor]]] = {
    "forward": _drive_forward,
    "next_token": _drive_next_token,
    "prefill": _drive_prefill,
    "decode": _drive_decode,
    "decode_rows": _drive_decode_rows,
}
