"""Programs that are wrong in one way: a bundle's own, behind a change of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from llama_artifacts import manifest_file
from llama_artifacts.manifest import FORMATS, Manifest, Program
from llama_export.laws import registry
from llama_export.laws.bench import Bench
from llama_export.laws.finding import Finding
from llama_runtime.entry import Entry

MAX_SEQ, BATCH, STEPS = 64, 3, 6

Outputs = list[torch.Tensor]
Inner = Callable[[Any, Mapping[str, Any]], Outputs]
Change = Callable[[Inner, Any, dict[str, Any]], Outputs]


class Sabotaged:
    """An entry whose every call goes through a change."""

    def __init__(self, entry: Entry, change: Change) -> None:
        self._entry = entry
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def run(self, states: Any, inputs: Mapping[str, Any]) -> Outputs:
        return self._change(self._entry.run, states, dict(inputs))


def program_of(bundle: Path, entry: str) -> tuple[Manifest, Program]:
    manifest = manifest_file.read(bundle)
    return manifest, next(p for p in manifest.programs if registry.kind(p.entry) == entry)


class SabotagedBench(Bench):
    """A bench in which one entry goes through a change; programs and oracles are another's."""

    def __init__(
        self, bench: Bench, entry: str, change: Change, formats: tuple[str, ...] = FORMATS
    ) -> None:
        super().__init__(bench.folder, bench.manifest)
        self._bench, self._entry, self._change = bench, entry, change
        self._formats = formats
        self.oracle = bench.oracle  # type: ignore[misc]
        self.ungrouped = bench.ungrouped  # type: ignore[misc]

    def entry(self, program: Program) -> Any:
        entry = self._bench.entry(program)
        is_bad = program.entry == self._entry and program.format in self._formats
        return Sabotaged(entry, self._change) if is_bad else entry


def found(bench: Bench, law: str, entry: str, change: Change) -> Finding:
    """What the law finds in the entry when all calls of it go through the change."""
    _, program = program_of(bench.folder, entry)
    sabotaged = SabotagedBench(bench, program.entry, change)
    finding: Finding = registry.find([law])[0].load()(sabotaged, program)
    return finding


def noisy(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
    outputs = run(states, inputs)
    outputs[0].view(-1)[-1] += 0.01 * outputs[0].abs().max()
    return outputs


def wrapping(name: str, size: int) -> Change:
    """Positions are taken modulo a size, so that none is refused."""

    def change(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
        return run(states, {**inputs, name: (inputs[name] % size).int()})

    return change


def forgetful(run: Inner, states: Any, inputs: dict[str, Any]) -> Outputs:
    """What it keeps is not what it computed with."""
    outputs = run(states, inputs)
    for name in states:
        if name.endswith("1.value"):
            tensor = states[name]
            tensor[tensor != 1e4] *= 1.5
    return outputs
