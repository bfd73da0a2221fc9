"""The table of BENCHMARKS.md: a bundle beside the engines that one would pick instead.

    python -m tests.benchmarks.table MODEL [--folder DIR] [--runs 9] [--only CASE ...] [--write FILE]

Builds the bundles that are not yet in the folder, runs one `llama-export bench` for each case, prints
one table in Markdown, and with --write puts it into a file in place of the one that is there. An engine
that is not installed, or whose tokens are others, is listed as not measured, with the reason.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.cases import BUNDLES, CASES, Case, Goal

SIZE = "size, serving"
BEGIN, END = "<!-- make bench: begin -->\n", "<!-- make bench: end -->\n"
COLUMNS = ("case", "engine", "figure", "of limit", "ours / theirs", "must reach", "notes")


@dataclass
class Found:
    """What a case gave.

    Attributes:
        case: what was measured.
        answer: of the command, or empty where it failed.
        missing: engines that were not measured, and why.
    """

    case: Case
    answer: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def run(words: Sequence[object]) -> tuple[dict[str, Any], str]:
    """The answer of a command of llama-export with --json, or the line of its error."""
    command = [sys.executable, "-m", "llama_export", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer, ""
    lines = done.stderr.splitlines() or ["no message"]
    error = next((line for line in lines if line.startswith("error: ")), lines[-1])
    remedy = next((f"; {line[6:]}" for line in lines if line.startswith("hint: pip install")), "")
    return {}, error.removeprefix("error: ") + remedy


def words_of(case: Case, folder: Path, peers: Sequence[str], runs: int) -> list[object]:
    """The command of a case, without `llama-export`."""
    words: list[object] = ["bench", folder / case.bundle, *case.words, "--runs", case.runs or runs]
    words += [word for name in case.beside for word in ("--beside", folder / name)]
    return words + [word for peer in peers for word in ("--compare", peer)]


def measure(case: Case, folder: Path, runs: int) -> Found:
    """Runs a case; an engine that fails is left out, and the case is begun anew."""
    found, peers = Found(case, missing=dict(case.missing)), list(case.peers)
    while True:
        answer, error = run(words_of(case, folder, peers, runs))
        if answer:
            found.answer = answer
            return found
        # The longest name, since `openvino` begins `openvino-paged` too.
        failed = max((p for p in peers if error.startswith(p)), key=len, default=None)
        if failed is None:
            found.missing["the bundle"] = error
            return found
        found.missing[failed] = error
        peers.remove(failed)


def lines_of(found: Found) -> Iterator[tuple[str, ...]]:
    """The rows of a case, the bundle first."""
    case, rows = found.case, found.answer.get("rows", [])
    for number, row in enumerate(rows):
        engine = re.sub(r", \d+ threads?$", "", row["method"])
        ratio = ratio_of(case, rows[0], row) if number and case.figure != "build_s" else None
        goal = next((goal for goal in case.goals if engine.startswith(goal.engine)), None)
        yield (
            case.name,
            engine,
            shown(case, row),
            "-" if row.get("roofline_share") is None else f"{row['roofline_share']:.0%}",
            "-" if ratio is None else f"{ratio:.2f}",
            "-" if ratio is None or goal is None else goal.judge(ratio),
            row["notes"] or "-",
        )
    for engine, reason in found.missing.items():
        yield case.name, engine, "not measured", "-", "-", "-", reason


def ratio_of(case: Case, own: dict[str, Any], other: dict[str, Any]) -> float:
    """How many times as fast as the other the bundle is."""
    ours, theirs = own[case.figure], other[case.figure]
    return float(ours / theirs if case.figure.endswith("tok_s") else theirs / ours)


def shown(case: Case, row: dict[str, Any]) -> str:
    """The median, and the quartiles where there are several runs."""
    digits = 2 if case.figure.endswith("_s") and not case.figure.endswith("tok_s") else 1
    low_high = row.get(f"{case.figure}_range") or []
    text = f"{row[case.figure]:.{digits}f} {case.unit}"
    return text + (f" ({low_high[0]:.{digits}f}-{low_high[1]:.{digits}f})" if low_high else "")


def size_line(folder: Path) -> tuple[str, ...]:
    """The bundle with all serving entries in three formats, beside its weights."""
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    weights = sum(size for name, size in files.items() if name.startswith("weights"))
    programs = [size for name, size in files.items() if name.endswith((".pt2", ".onnx"))]
    ratio, largest = sum(files.values()) / weights, max(programs)
    met = Goal("", 1.05).judge_most(ratio)
    text = f"{sum(files.values()) / 1e6:.0f} MB, weights {weights / 1e6:.0f} MB"
    notes = f"{len(programs)} programs, the largest {largest / 1e6:.2f} MB of at most 10"
    return SIZE, "three formats", text, "-", f"{ratio:.3f}", met, notes


def markdown(
    founds: Sequence[Found], commands: Sequence[str], sizes: Sequence[tuple[str, ...]]
) -> str:
    """Machine, commands and the table."""
    rows = [*sizes, *(line for found in founds for line in lines_of(found))]
    parts = [f"{' | '.join(COLUMNS)}", " | ".join("---" for _ in COLUMNS)]
    parts += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    table = "\n".join(f"| {part} |" for part in parts)
    listed = "\n".join(commands)
    return f"{heading(founds)}\n\n```sh\n{listed}\n```\n\n{table}\n"


def heading(founds: Sequence[Found]) -> str:
    """The machine, its rates over all cases, the dates and the versions."""
    answers = [found.answer for found in founds if found.answer]
    if not answers:
        return "Nothing was measured."
    machines = [answer["machine"] for answer in answers]
    versions: dict[str, str] = {}
    for answer in answers:
        versions |= answer["versions"]

    def span(name: str) -> str:
        rates = [machine[name] / 1e9 for machine in machines]
        return f"{min(rates):.0f} to {max(rates):.0f}"

    return (
        f"{answers[-1]['date']}, {machines[0]['cpu']}, {machines[0]['threads']} threads; between the"
        f" runs it read {span('read_bytes_s')} GB/s and multiplied {span('bf16_flop_s')} GFLOP/s in"
        f" bf16, {span('f32_flop_s')} in float32. "
        + ", ".join(f"{name} {text}" for name, text in sorted(versions.items()))
        + "."
    )


def write(path: Path, text: str) -> None:
    """Puts the text between the two marks of a file, or with them at its end."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and not end:
        raise SystemExit(f"{path}: `{BEGIN.strip()}` without `{END.strip()}`")
    path.write_text(f"{before}{BEGIN}{text}{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--folder", type=Path, default=Path("build/bench"))
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--only", action="append", choices=[*(case.name for case in CASES), SIZE])
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    wanted = options.only or [*(case.name for case in CASES), SIZE]
    cases = [case for case in CASES if case.name in wanted]
    options.folder.mkdir(parents=True, exist_ok=True)
    names = [name for case in cases for name in (case.bundle, *case.beside)]
    for name in dict.fromkeys([*names, *(["serving"] if SIZE in wanted else [])]):
        build(options.model, options.folder / name, BUNDLES[name])
    founds, commands = [], []
    for case in cases:
        founds.append(measure(case, options.folder, options.runs))
        words = words_of(case, Path(), case.peers, options.runs)
        commands.append(" ".join(["llama-export", *map(str, words)]))
    sizes = [size_line(options.folder / "serving")] if SIZE in wanted else []
    text = markdown(founds, commands, sizes)
    sys.stdout.write(text)
    if options.write:
        write(options.write, text)


def build(model: str, folder: Path, words: Sequence[str]) -> None:
    """Builds a bundle that is not there yet."""
    if folder.exists():
        return
    answer, error = run(["build", model, "-o", folder, *words])
    if not answer:
        raise SystemExit(f"{folder}: {error}")


if __name__ == "__main__":
    main()
