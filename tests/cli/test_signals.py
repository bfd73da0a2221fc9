from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.cli.running import start

# A build that holds a half-written folder and does what `{work}` says until it is stopped.
SCRIPT = """
import ctypes, signal, subprocess, sys, time, types
from pathlib import Path
from llama_artifacts.bundle import staging

# The test's own parent may ignore them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

def build(recipe, *, reporter, cache):
    with staging(recipe.output) as folder, reporter.step("work"):
        (folder / "weights.safetensors").write_bytes(b"w")
        {work}

# Stand-ins for what would import torch.
for place, name, value in (("build", "build", build), ("cache", "ProgramCache", lambda folder: None)):
    module = types.ModuleType("llama_export." + place)
    setattr(module, name, value)
    sys.modules[module.__name__] = module
from llama_export.cli import main
main()
"""
READY = "print('ready', flush=True)"
SLEEP = f"{READY}; time.sleep(60)"
COMPILE = (
    "child = subprocess.Popen(['sleep', '60']); print('ready', child.pid, flush=True); child.wait()"
)
# Native code that heeds no signal: the second lock of a mutex by its owner never returns.
STUCK = (
    "libc = ctypes.CDLL(None); mutex = ctypes.create_string_buffer(64); "
    f"libc.pthread_mutex_lock(mutex); {READY}; libc.pthread_mutex_lock(mutex)"
)


def has_ended(stat: Path) -> bool:
    """Whether a killed process goes away: nobody may have waited for it yet."""
    for _ in range(100):
        try:
            if stat.read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X"):
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def stop(work: str, number: int, target: Path, times: int = 1) -> tuple[int, list[str], str]:
    """Exit status, words of stdout, and stderr of a command that a signal ends."""
    with start("build", "m", "-o", target, script=SCRIPT.format(work=work)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        words = process.stdout.readline().split()
        assert words[:1] == ["ready"], process.stderr.read()
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.02)
        _, stderr = process.communicate(timeout=30)
        return process.returncode, words, stderr


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_exits_130_without_traceback_and_leaves_nothing(tmp_path: Path, times: int) -> None:
    status, _, stderr = stop(SLEEP, signal.SIGINT, tmp_path / "b", times)
    assert status == 130
    assert stderr.split() == ["interrupted"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_is_honoured_after_cleaning_up(tmp_path: Path, number: int) -> None:
    status, _, stderr = stop(SLEEP, number, tmp_path / "b")
    assert status == 128 + number
    assert stderr == ""
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_was_started_ends_too(tmp_path: Path) -> None:
    status, words, _ = stop(COMPILE, signal.SIGINT, tmp_path / "b")
    assert status == 130
    assert has_ended(Path(f"/proc/{words[1]}/stat"))


def test_native_code_that_never_returns_is_cut_off(tmp_path: Path) -> None:
    status, _, stderr = stop(STUCK, signal.SIGINT, tmp_path / "b")
    assert status == 130
    assert "Traceback" not in stderr


def test_exit_handlers_of_libraries_are_not_waited_for(tmp_path: Path) -> None:
    work = f"import atexit, torch; atexit.register(time.sleep, 60); {SLEEP}"
    status, _, _ = stop(work, signal.SIGINT, tmp_path / "b")
    assert status == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("then", ["pass", "raise ValueError"])
def test_an_interrupt_that_a_library_swallows_still_ends_the_command(
    tmp_path: Path, then: str
) -> None:
    work = f"exec({f'try: {SLEEP}{chr(10)}except KeyboardInterrupt: {then}'!r})"
    status, _, stderr = stop(work, signal.SIGINT, tmp_path / "b")
    assert status == 130
    assert "Traceback" not in stderr


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    work = f"{READY}; time.sleep(0.3); raise SystemExit(7)"
    script = SCRIPT.replace("default_int_handler", "SIG_IGN").format(work=work)
    with start("build", "m", "-o", tmp_path / "b", script=script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 7
