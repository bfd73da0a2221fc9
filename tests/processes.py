"""Runs a script in several processes, as `torchrun` starts them, and leaves none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

PASSED_SECONDS = 300
"""Of a group of processes, after which it hangs."""


def torchrun(num_processes: int, *words: object, timeout: float = PASSED_SECONDS) -> str:
    """What the processes of `torchrun ... WORDS` wrote to stdout; all of them must succeed.

    They form a session of their own, which is killed as a whole when `torchrun` has ended or the
    time is over.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launch, f"--nproc-per-node={num_processes}", *map(str, words)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        errors += f"\nnot over after {timeout} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{output}\n{errors}"
    return output
