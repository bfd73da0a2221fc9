"""Test vectors: inputs and expected outputs that travel in the bundle, and no model code.

`<entry>.vectors.safetensors` holds a series of calls of one entry, `generate-32` standing for
`generate<32>`. Before the first call every element of the states is `fill`. Its metadata:

- `version`: `1`; a reader refuses others.
- `entry`: the entry's name.
- `fill`: a number, as text.
- `sizes`: the sizes of the states' dynamic dimensions, a JSON object.

Its tensors, for calls 0, 1, ... in order, none left out:

- `calls.<i>.inputs.<name>`: each input as declared.
- `calls.<i>.rows.<name>`, int32 [k], and `calls.<i>.outputs.<name>`, [k, width]: what row `rows[j]`
  of the output must be, the output seen as [-1, width]. Other rows say nothing; a call without any
  is there for its states. Float outputs are float32 and allow for rounding in the compute dtype;
  integer outputs are exact, and where -1 is expected anything is good.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llama_artifacts.bundle import check_digest, open_bundle
from llama_artifacts.errors import IntegrityError, LlamaExportError
from llama_artifacts.manifest import Format, Program, vectors_name
from llama_artifacts.safetensors import read_header
from llama_artifacts.strict_json import shown
from llama_runtime import compat
from llama_runtime.comparison import LIMITS, compare
from llama_runtime.entry import Entry
from llama_runtime.loader import LoadedBundle, load
from llama_runtime.weights import map_weights

VERSION = "1"
ANYTHING = -1
"""In place of an integer that is not compared."""

_NAME = re.compile(r"calls\.(0|[1-9][0-9]{0,5})\.(inputs|rows|outputs)\.([a-z_]+)")


@dataclass(frozen=True)
class VectorCall:
    """One call: its inputs, and by output which rows are expected to be what."""

    inputs: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Vectors:
    """The calls of one entry, on states that hold `fill`, with dynamic dimensions of `sizes`."""

    entry: str
    fill: float
    sizes: dict[str, int]
    calls: tuple[VectorCall, ...]


@dataclass(frozen=True)
class VectorResult:
    """One program against its vectors; NaN where it could not be run."""

    entry: str
    format: Format
    figure: float
    limit: float
    detail: str

    @property
    def passed(self) -> bool:
        """Whether every output is as expected."""
        return self.figure <= self.limit


def check(
    folder: Path,
    *,
    device: str = "cpu",
    formats: Sequence[Format] | None = None,
    weights_dir: Path | None = None,
) -> tuple[VectorResult, ...]:
    """Runs every program of one shard that fits the device and has vectors; not its variants.

    Raises:
        ManifestError, IntegrityError: the bundle or a file of vectors is damaged.
        CompatibilityError: there is no such device, or there are no weights.
    """
    bundle = load(folder, device=device, weights_dir=weights_dir)
    results = []
    for program in bundle.manifest.programs:
        is_general = not program.variant and program.shards == 1
        is_wanted = (formats is None or program.format in formats) and is_general
        has_vectors = vectors_name(program.entry) in bundle.manifest.files
        if is_wanted and has_vectors and compat.fits(program, device=device, allow_native=True):
            results.append(_check_program(bundle, program))
    return tuple(results)


def read(folder: Path, entry: str) -> Vectors:
    """The vectors of an entry of a bundle.

    Raises:
        IntegrityError: the file is damaged, or of another version.
    """
    name = vectors_name(entry)
    path = folder / name
    check_digest(open_bundle(folder), name)
    metadata = read_header(path, error=IntegrityError).metadata
    if metadata.get("version") != VERSION:
        found = shown(metadata.get("version", "none"))
        raise IntegrityError(f"expected vectors of version {VERSION}, got {found}", where=path)
    if metadata.get("entry") != entry:
        raise IntegrityError(f"expected vectors of `{entry}`", where=path)
    found_calls: dict[int, VectorCall] = {}
    for key, tensor in map_weights(path).items():
        match = _NAME.fullmatch(key)
        if match is None:
            raise IntegrityError(f"unknown tensor {shown(key)}", where=path)
        call = found_calls.setdefault(int(match[1]), VectorCall({}, {}, {}))
        getattr(call, match[2])[match[3]] = tensor
    try:
        calls = tuple(found_calls[number] for number in range(len(found_calls)))
        sizes = {str(k): int(v) for k, v in json.loads(metadata["sizes"]).items()}
        return Vectors(entry, float(metadata["fill"]), sizes, calls)
    except (KeyError, ValueError, AttributeError, TypeError) as cause:
        raise IntegrityError("its calls or metadata are incomplete", where=path) from cause


def _check_program(bundle: LoadedBundle, program: Program) -> VectorResult:
    limit = LIMITS[program.dtype]
    vectors = read(bundle.folder, program.entry)
    try:
        figure, detail = _run(bundle.open(program), vectors, limit)
    except Exception as cause:  # a wrong program may fail in any way, and every way is a verdict
        reason = str(cause) if isinstance(cause, LlamaExportError) else repr(cause)
        figure, detail = math.nan, f"cannot be run: {reason.splitlines()[0]:.300}"
    return VectorResult(program.entry, program.format, figure, limit, detail)


def _run(entry: Entry, vectors: Vectors, limit: float) -> tuple[float, str]:
    """The largest figure of all calls, and where it was found."""
    states: Any = None
    if entry.signature.states:
        states = entry.new_states(**vectors.sizes)
        for tensor in states.values():
            tensor.fill_(vectors.fill)
    worst, detail = -1.0, "nothing is expected"
    if not any(map(_is_compared, vectors.calls)):
        return math.nan, detail
    for number, call in enumerate(vectors.calls):
        outputs = entry.run(states, {name: t.clone() for name, t in call.inputs.items()})
        named = dict(zip((spec.name for spec in entry.signature.outputs), outputs, strict=True))
        for name, expected in call.outputs.items():
            actual = named[name].cpu().reshape(-1, expected.shape[1])[call.rows[name].long()]
            figure, text = _compare(actual, expected, limit)
            if not figure <= worst:  # also NaN
                worst, detail = figure, f"call {number}, {name}: {text}"
            if math.isnan(worst):
                return worst, detail
    return worst, detail


def _is_compared(call: VectorCall) -> bool:
    """Whether anything is expected of a call."""
    return any(
        bool((expected != ANYTHING).any()) if not expected.is_floating_point() else expected.numel()
        for expected in call.outputs.values()
    )


def _compare(actual: torch.Tensor, expected: torch.Tensor, limit: float) -> tuple[float, str]:
    if expected.is_floating_point():
        return compare(actual, expected, limit)
    wrong = (actual != expected) & (expected != ANYTHING)
    num_wrong = int(wrong.sum())
    if not num_wrong:
        return 0.0, f"{int((expected != ANYTHING).sum())} of {expected.numel()} compared, all equal"
    place = tuple(int(i) for i in wrong.nonzero()[0])
    return float(num_wrong), f"{num_wrong} differ, the first at {place}"
