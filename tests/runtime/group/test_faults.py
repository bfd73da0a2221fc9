"""Processes of a group that die, fail, hang or are told to end: all end, and one says why."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import llama_runtime
from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from tests.runtime.group.processes import Job, started, wait_for

pytestmark = pytest.mark.slow
long = pytest.mark.long

SECONDS = 30.0
"""Most from a death to the end of all, on a machine with other work; a second or two alone."""
PROMPT = ["--tokens", "1 2 3", "--max-new", "8", "--format", "pt2"]


def expected(bundle: Path) -> str:
    tokens = llama_runtime.load(bundle, format="pt2").generate_tokens([1, 2, 3], max_new=8)
    return " ".join(map(str, tokens)) + "\n"


@pytest.fixture
def words(declared_bundle: Path) -> list[object]:
    return ["run", declared_bundle, *PROMPT]


def test_torchrun_starts_two_that_run_as_one(sharded_bundle: Path, tmp_path: Path) -> None:
    """Programs that are cut, whose collectives meet; elsewhere here they are whole."""
    words = ["run", sharded_bundle, *PROMPT]
    with started(tmp_path / "job", 2, words, is_launched=True) as job:
        job.wait()
    assert job.launcher is not None
    assert job.launcher.returncode == 0, job.text
    assert job.output == expected(sharded_bundle)
    assert job.errors == []


@long
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("1:2:kill", "rank 1 is gone: it was killed, or crashed"),
        ("1:2:raise", "rank 1: a call failed: MemoryError: no room for this"),
        ("1:2:hang", "Timed out waiting 6000ms"),
    ],
    ids=["kill", "raise", "hang"],
)
def test_a_fault_in_the_middle_of_a_collective(
    sharded_bundle: Path, tmp_path: Path, fault: str, error: str
) -> None:
    words = ["run", sharded_bundle, *PROMPT, "--timeout", "6"]
    with started(tmp_path / "job", 2, words, fault=fault) as job:
        assert job.wait() < 6 + SECONDS, job.text
    (line,) = job.errors
    assert error in line


@pytest.mark.parametrize(
    ("fault", "error", "statuses"),
    [
        pytest.param("1:2:kill", "rank 1 is gone: it was killed, or crashed", [1, -9], marks=long),
        ("1:2:raise", "rank 1: a call failed: MemoryError: no room for this", [1, 1]),
        pytest.param("1:2:exit", "rank 1 is gone: it was killed, or crashed", [1, 7], marks=long),
        pytest.param("1:0:kill", "rank 1 is gone: it was killed, or crashed", [1, -9], marks=long),
        pytest.param("0:2:kill", "rank 0 is gone: it was killed, or crashed", [-9, 1], marks=long),
        pytest.param(
            "0:2:raise", "a call failed: MemoryError: no room for this", [1, 1], marks=long
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value[1:2] == ":" else "",
)
def test_a_fault_ends_all_with_the_first_error(
    words: list[object], tmp_path: Path, fault: str, error: str, statuses: list[int]
) -> None:
    with started(tmp_path / "job", 2, words, fault=fault) as job:
        assert job.wait() < SECONDS, job.text
    assert job.errors == [error], job.text
    assert "Traceback" not in job.text
    assert job.statuses == statuses


@long
@pytest.mark.parametrize(("kind", "statuses"), [("interrupt", [130, 0]), ("terminate", [143, 0])])
def test_the_leader_ends_the_others_when_it_is_told_to_end(
    words: list[object], tmp_path: Path, kind: str, statuses: list[int]
) -> None:
    with started(tmp_path / "job", 2, words, fault=f"0:2:{kind}") as job:
        assert job.wait() < SECONDS, job.text
    assert job.errors == []
    assert job.statuses == statuses


@long
@pytest.mark.parametrize("kind", ["interrupt", "terminate"])
def test_a_follower_leaves_signals_to_the_leader(
    declared_bundle: Path, words: list[object], tmp_path: Path, kind: str
) -> None:
    with started(tmp_path / "job", 2, words, fault=f"1:2:{kind}") as job:
        job.wait()
    assert job.statuses == [0, 0], job.text
    assert job.output == expected(declared_bundle)


@long
def test_one_that_stops_is_missed_before_long(words: list[object], tmp_path: Path) -> None:
    words = [*words, "--timeout", "4"]
    with started(tmp_path / "job", 2, words, fault="0:2:stop") as job:
        job.ranks[1].wait(60)
        assert job.errors == ["rank 0 has been silent for 8 s"], job.text
        assert job.ranks[0].poll() is None  # it cannot end before it goes on
        os.kill(job.ranks[0].pid, signal.SIGCONT)
        assert job.wait() < 60
    assert job.statuses == [1, 1]


@long
def test_a_follower_that_hangs_does_not_outlive_the_leader(
    words: list[object], tmp_path: Path
) -> None:
    with started(tmp_path / "job", 2, words, fault="1:7:hang") as job:
        assert job.wait() < SECONDS, job.text
    assert job.statuses[1] == 0


@long
def test_a_count_without_programs_is_refused_once(words: list[object], tmp_path: Path) -> None:
    with started(tmp_path / "job", 3, words) as job:
        job.wait()
    (error,) = job.errors
    assert error.endswith("expected 1 or 2 processes, for which the bundle has programs, got 3")
    assert job.statuses == [1, 1, 1]


@long
def test_another_bundle_in_one_rank_is_refused(
    declared_bundle: Path, words: list[object], tmp_path: Path
) -> None:
    other = shutil.copytree(declared_bundle, tmp_path / "other")
    manifest = dataclasses.replace(manifest_file.read(other), stop_tokens=(5,))
    (other / manifests.FILE_NAME).write_bytes(manifest_file.to_json(manifest))
    with started(tmp_path / "job", 2, words, fault=f"1:0:bundle={other}") as job:
        job.wait()
    (error,) = job.errors
    assert "expected one bundle for all 2 processes, got another in rank 1 than in rank 0" in error
    assert job.statuses == [1, 1]


@long
def test_one_that_never_comes(words: list[object], tmp_path: Path) -> None:
    with started(tmp_path / "job", 2, [*words, "--timeout", "5"], fault="1:0:absent") as job:
        job.wait()
    (error,) = job.errors
    assert "expected 2 processes to meet within 5 s" in error
    assert job.statuses == [1, 7]


@long
def test_states_of_two_are_not_saved(words: list[object], tmp_path: Path) -> None:
    with started(tmp_path / "job", 2, [*words, "--save-state", tmp_path / "x.state"]) as job:
        job.wait()
    (error,) = job.errors
    assert error.endswith(
        "states of 2 processes cannot be saved or restored: each has a part of them"
    )
    assert job.output == ""


# The server


@pytest.fixture
def serving(sharded_bundle: Path) -> list[object]:
    return ["serve", sharded_bundle, "--format", "pt2", "--rows", "2", "--port", "0"]


def address(job: Job) -> str:
    def find() -> str | None:
        found = re.search(r"^serving .* at (http://\S+)$", job.text, re.MULTILINE)
        assert not job.errors, job.text
        return found[1] if found else None

    return wait_for(find)


def ask(url: str, num_tokens: int) -> tuple[int, str]:
    with urllib.request.urlopen(f"{url}/v1/models") as reply:
        model = json.load(reply)["data"][0]["id"]
    fields = {"model": model, "prompt": [1, 2, 3], "max_tokens": num_tokens, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(fields).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_server_answers_and_ends_with_a_follower(serving: list[object], tmp_path: Path) -> None:
    with started(tmp_path / "job", 2, serving) as job:
        url = address(job)
        status, body = ask(url, 4)
        assert status == 200, body
        os.kill(job.number(1), signal.SIGKILL)
        killed = time.time()
        job.wait()
        assert time.time() - killed < SECONDS
    assert job.errors == ["rank 1 is gone: it was killed, or crashed"], job.text
    assert job.statuses == [1, -9]


@long
def test_an_open_request_gets_the_reason(serving: list[object], tmp_path: Path) -> None:
    replies: list[tuple[int, str]] = []
    with started(tmp_path / "job", 2, serving, fault="1:20:kill") as job:
        url = address(job)
        thread = threading.Thread(target=lambda: replies.append(ask(url, 200)))
        thread.start()
        assert job.wait() < SECONDS
        thread.join()
    ((status, body),) = replies
    assert status == 500
    assert "rank 1 is gone" in body
    assert job.errors == ["rank 1 is gone: it was killed, or crashed"]
    assert "Traceback" not in job.text


@long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_torchrun_passes_a_signal_on_and_open_requests_finish(
    serving: list[object], tmp_path: Path, number: signal.Signals
) -> None:
    replies: list[tuple[int, str]] = []
    with started(tmp_path / "job", 2, serving, is_launched=True) as job:
        url = address(job)
        ask(url, 1)
        thread = threading.Thread(target=lambda: replies.append(ask(url, 100)))
        thread.start()
        time.sleep(0.3)
        assert job.launcher is not None
        job.launcher.send_signal(number)
        job.wait()
        thread.join()
        assert all(job.is_gone(rank) for rank in (0, 1))
    assert [status for status, _ in replies] == [200]
    assert job.errors == []


@long
def test_without_torchrun_nobody_stays(serving: list[object], tmp_path: Path) -> None:
    with started(tmp_path / "job", 2, serving, is_launched=True) as job:
        address(job)
        assert job.launcher is not None
        job.launcher.kill()
        for rank in (0, 1):
            wait_for(lambda rank=rank: job.is_gone(rank), SECONDS)
    assert job.errors == ["torchrun is gone: it was killed, or crashed"]
