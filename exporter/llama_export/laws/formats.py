"""`formats`: every format of an entry gives the same, up to the rounding of their dtypes.

So do several processes that share the entry and one that has it whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from llama_artifacts.manifest import Program, show_shards
from llama_export.laws.bench import Bench, is_generating, limit_of
from llama_export.laws.finding import Finding, close, worst
from llama_export.laws.generation import Generated, scores_along


def check(bench: Bench, programs: Sequence[Program]) -> Finding | None:
    """The law on the programs of one entry; None for a single program."""
    if len(programs) < 2:
        return None
    first, others = programs[0], programs[1:]
    return worst([_pair(bench, first, other) for other in others])


def _pair(bench: Bench, first: Program, second: Program) -> Finding:
    limit = max(limit_of(first), limit_of(second))
    if is_generating(first):
        calls = zip(bench.generate(first), bench.generate(second), strict=True)
        found = worst([_gap(bench, one, other, limit) for one, other in calls])
    else:
        one, other = bench.drive(first), bench.drive(second)
        found = close(other.values, one.values, limit, one.places)
    pair = (
        f"{show_shards(first.format, first.shards)} and {show_shards(second.format, second.shards)}"
    )
    return Finding(found.figure, limit, f"{pair}: {found.detail}")


def _gap(bench: Bench, one: Generated, other: Generated, limit: float) -> Finding:
    """How far apart the oracle puts two texts at the first token in which they differ."""
    scores = scores_along(bench.oracle, one)
    scale, largest = float(scores.abs().max()), 0.0
    place: tuple[int, ...] = ()
    for row, differs in enumerate(one.tokens != other.tokens):
        if differs.any():
            step = int(differs.nonzero()[0])
            pair = [int(one.tokens[row, step]), int(other.tokens[row, step])]
            gap = float((scores[row, step, pair[0]] - scores[row, step, pair[1]]).abs())
            largest, place = max((largest, place), (gap, (row, step)))
    return Finding(
        largest / scale, limit, f"{largest:.3g} apart at {place}, atol {limit * scale:.3g}"
    )
