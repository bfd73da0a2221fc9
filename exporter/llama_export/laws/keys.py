"""`keys`: one key, one text on every format and device; another key, another text.

Every format's draws are held against the same perturbed scores of the oracle, so that formats that
keep the law agree with each other but where two scores are equal up to rounding.
"""

from __future__ import annotations

from llama_artifacts.manifest import Program
from llama_export.laws.bench import Bench, limit_of
from llama_export.laws.finding import Finding, exact, worst
from llama_export.laws.generation import OTHER_KEY, go_on, regret, scores_along


def check(bench: Bench, program: Program) -> Finding | None:
    """The law on one program."""
    entry, (first,) = bench.entry(program), bench.generate(program)
    again, other = go_on(entry, bench.oracle), go_on(entry, bench.oracle, key=OTHER_KEY)
    num_different = int((first.tokens != again.tokens).sum())
    is_same = bool((first.tokens == other.tokens).all())
    return worst(
        [
            exact(num_different, "tokens differ", "the same key twice"),
            exact(int(is_same), "keys without effect", f"{OTHER_KEY}"),
            regret(first, scores_along(bench.oracle, first), limit_of(program)),
        ]
    )
