"""Times `verify --integrity` against hashing the same bytes once with all processors.

    python -m tests.benchmarks.integrity [--files N] [--mebibytes N] [--rounds N] [--folder DIR]

Two baselines: `files` gives each processor the next whole file, as far as digests of whole files can be
split; `bytes` cuts all bytes into equal parts, one for each processor. All three are timed in turn, from
the page cache, and the best round of each is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llama_artifacts import integrity
from llama_artifacts.digests import describe, sha256
from llama_artifacts.manifest import FILE_NAME
from llama_artifacts.manifest_file import to_json
from tests.bundles import sample_manifest, write_sample

NUM_PROCESSORS = len(os.sched_getaffinity(0))
STEP = 2**20


def write_bundle(folder: Path, num_files: int, num_bytes: int) -> list[Path]:
    """A bundle of so many further files, which together have so many bytes; returns their paths."""
    write_sample(folder)
    files = dict(sample_manifest().files)
    paths = [folder / f"part-{number}.bin" for number in range(num_files)]
    for path in paths:
        with path.open("wb") as file:
            for _ in range(num_bytes // num_files // STEP):
                file.write(os.urandom(STEP))
        files[path.name] = describe(path)
    manifest = dataclasses.replace(sample_manifest(), files=files)
    (folder / FILE_NAME).write_bytes(to_json(manifest))
    return paths


def by_files(paths: list[Path]) -> None:
    with ThreadPoolExecutor(NUM_PROCESSORS) as pool:
        list(pool.map(sha256, paths))


def by_bytes(paths: list[Path]) -> None:
    """Every processor hashes its share of each file."""

    def share(number: int) -> None:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(STEP))
        for path in paths:
            part = path.stat().st_size // NUM_PROCESSORS
            with path.open("rb", buffering=0) as file:
                file.seek(part * number)
                for _ in range(part // STEP):
                    digest.update(buffer[: file.readinto(buffer)])

    with ThreadPoolExecutor(NUM_PROCESSORS) as pool:
        list(pool.map(share, range(NUM_PROCESSORS)))


def check(folder: Path) -> None:
    report = integrity.check(folder)
    if report.faults:
        raise SystemExit(f"the benchmark's own bundle is broken: {report.faults}")


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        bundle = Path(folder) / "bundle"
        paths = write_bundle(bundle, chosen.files, chosen.mebibytes * 2**20)
        works: dict[str, Callable[[], None]] = {
            "integrity": lambda: check(bundle),
            "files": lambda: by_files(paths),
            "bytes": lambda: by_bytes(paths),
        }
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(chosen.rounds):
            for name, work in works.items():
                times[name].append(seconds(work))
    best = {name: min(found) for name, found in times.items()}
    sys.stdout.write(f"{chosen.files} files, {chosen.mebibytes} MiB, {NUM_PROCESSORS} processors\n")
    for name, found in times.items():
        rounds = " ".join(f"{value:.2f}" for value in found)
        sys.stdout.write(f"{name:10} best {best[name]:.2f} s; rounds {rounds}\n")
    for name in ("files", "bytes"):
        sys.stdout.write(f"integrity / {name}: {best['integrity'] / best[name]:.2f}\n")


if __name__ == "__main__":
    main()
