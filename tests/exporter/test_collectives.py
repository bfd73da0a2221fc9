"""The collectives that `inspect` shows are those of the programs' graphs, entry by entry."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from llama_artifacts import manifest_file
from llama_artifacts.manifest import Manifest, Program
from llama_artifacts.per_rank import Collective, collectives
from llama_artifacts.signature import show
from llama_export.entries.llama import ENTRIES
from llama_export.laws.registry import kind
from llama_export.page.graph import Op
from llama_export.page.pt2_graph import read_pt2

KINDS = {
    "_c10d_functional.all_reduce": "all_reduce",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
}


def in_the_graph(bundle: Path, program: Program) -> Counter[tuple[str, str]]:
    """How often a call makes each kind of result; what a loop's body makes, in every turn."""
    graph = read_pt2(bundle / program.file, program.signature, is_sharded=True)
    output = program.signature.outputs[0]
    found: Counter[tuple[str, str]] = Counter()
    for op in graph.ops:
        if op.target in KINDS:
            turns = output.shape[1] if is_in_a_loop(op) else 1
            assert isinstance(turns, int)
            found[KINDS[op.target], op.outputs[0][1]] += turns
    return found


def is_in_a_loop(op: Op) -> bool:
    return "/" in op.outputs[0][0]


def as_results(collective: Collective, num_shards: int) -> tuple[str, str]:
    """What the operator gives: parts below each other, or a rank's part."""
    shape = list(collective.shape)
    if collective.kind == "all_gather":
        first, last = shape[0], shape[-1]
        assert isinstance(last, int)
        factor, name = re.fullmatch(r"(?:(\d+)\*)?(\w+)", str(first)).groups()  # type: ignore[union-attr]
        shape[0] = times(num_shards * int(factor or 1), name)
        shape[-1] = last // num_shards
    if collective.kind == "reduce_scatter":
        shape = [1]
    return collective.kind, f"{collective.dtype} {show(shape)}"


def times(factor: int, size: str) -> int | str:
    return factor * int(size) if size.isdecimal() else f"{factor}*{size}"


def sharded(manifest: Manifest) -> list[Program]:
    return [program for program in manifest.programs if program.shards > 1]


def test_the_formula_is_what_the_graph_of_every_entry_does(sharded_bundle: Path) -> None:
    manifest = manifest_file.read(sharded_bundle)
    programs = sharded(manifest)
    assert {kind(program.entry) for program in programs} == {kind(spec.name) for spec in ENTRIES}
    for program in programs:
        expected = {
            as_results(one, program.shards): one.count for one in collectives(manifest, program)
        }
        assert in_the_graph(sharded_bundle, program) == expected, program.title


def test_the_build_proved_every_program_under_its_processes(sharded_bundle: Path) -> None:
    manifest = manifest_file.read(sharded_bundle)
    checked = {(c.entry, c.format) for c in manifest.checks if c.law == "parity" and c.shards == 2}
    assert checked == {(program.label, program.format) for program in sharded(manifest)}
    assert all(check.figure <= 1e-5 for check in manifest.checks if check.law == "parity")
