"""Laws under several processes: verdicts, and what becomes of a process that fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from llama_artifacts.digests import describe
from llama_artifacts.errors import VerificationError
from llama_export import verify
from llama_export.report import Reporter
from llama_export.verify import CheckResult

pytestmark = pytest.mark.slow

ENTRIES = ("forward", "prefill", "decode")


@pytest.fixture
def bundle(sharded_bundle: Path, tmp_path: Path) -> Path:
    """Some entries for one process and for two."""
    folder = shutil.copytree(sharded_bundle, tmp_path / "bundle")
    programs = [p for p in manifest_file.read(folder).programs if p.entry in ENTRIES]
    write(folder, programs=tuple(programs))
    return folder


def write(folder: Path, **changes: Any) -> None:
    """The manifest with some fields changed, fitted to the files."""
    names = sorted(path.name for path in folder.iterdir() if path.name != manifests.FILE_NAME)
    files = {name: describe(folder / name) for name in names}
    manifest = replace(manifest_file.read(folder), files=files, **changes)
    (folder / manifests.FILE_NAME).write_bytes(manifest_file.to_json(manifest))


def of_two(results: Sequence[CheckResult]) -> list[tuple[str, str, bool]]:
    return [(r.law, r.entry, r.passed) for r in results if r.shards == 2]


class Hook(Reporter):
    """Does something when a step begins."""

    def __init__(self, step: str, action: object) -> None:
        self._step, self._action = step, action
        self.steps: list[str] = []

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[object]:  # type: ignore[override]
        self.steps.append(name)
        if name == self._step:
            self._action()  # type: ignore[operator]
        yield lambda count: None


def children() -> list[int]:
    """The processes that this one started and that still run."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(number) for number in listed.split()]


def test_every_law_for_shards_is_checked_of_each_program(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within a job of torchrun, whose group is another one."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    results = verify.verify(bundle, entries=("prefill", "decode"))
    assert all(result.passed for result in results)
    assert sorted(of_two(results)) == [
        *(("chain", "prefill", True),),
        *(("formats", entry, True) for entry in ("decode", "prefill")),
        *(("parity", entry, True) for entry in ("decode", "prefill")),
        *(("room", entry, True) for entry in ("decode", "prefill")),
        *(("scratch", entry, True) for entry in ("decode", "prefill")),
    ]
    compared = {r.place: r for r in results if r.law == "formats" and r.shards == 2}
    decode = compared["decode of 2 shards formats"]
    assert decode.detail.startswith("pt2 and pt2 of 2 shards: max diff ")
    assert decode.figure <= 1e-5
    assert not children()
    verify.record(bundle, results)
    checks = manifest_file.read(bundle).checks
    parity = [check for check in checks if (check.law, check.entry) == ("parity", "decode")]
    assert {(check.format, check.shards) for check in parity} >= {("pt2", 1), ("pt2", 2)}


def test_a_build_refuses_a_program_that_computes_something_else(bundle: Path) -> None:
    keys, values = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
    cuts = manifest_file.read(bundle).cuts
    write(bundle, cuts={**cuts, keys: cuts[values]})
    with pytest.raises(VerificationError, match=r"max diff \d") as caught:
        verify.check_programs(bundle, reporter=Reporter())
    assert caught.value.where == "forward of 2 shards/pt2 parity"
    assert not children()


def test_a_killed_rank_fails_its_task_and_the_rest_is_checked_by_new_ones(bundle: Path) -> None:
    def kill_one() -> None:
        os.kill(children()[-1], signal.SIGKILL)

    hook = Hook("check prefill of 2 shards pt2 parity", kill_one)
    results = verify.verify(bundle, laws=("parity",), reporter=hook)
    failed = [result for result in results if not result.passed]
    assert [result.place for result in failed] == ["prefill of 2 shards/pt2 parity"]
    assert failed[0].detail.startswith("cannot be run: rank 1: ended with status -9: ")
    assert ("parity", "decode", True) in of_two(results)


def test_ranks_that_cannot_meet_are_an_error(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none such")
    with pytest.raises(VerificationError, match=r"rank 0 cannot start: ended with status 1: .*"):
        verify.verify(bundle, laws=("parity",), entries=("forward",))
    assert not children()


def test_a_killed_verify_leaves_no_rank_behind(bundle: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from llama_export.report import Reporter
from llama_export.verify import verify
class Loud(Reporter):
    def step(self, name, total=None):
        print(name, flush=True)
        return super().step(name, total)
verify(Path({str(bundle)!r}), laws=("parity",), reporter=Loud())
"""
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        while "2 shards" not in process.stdout.readline():
            assert process.poll() is None
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    assert len(listed) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{number}").exists() for number in listed):
        assert time.monotonic() < deadline
        time.sleep(0.05)
