"""Processes that run one program together, each with its part of the weights: tensor parallelism.

`torchrun` starts them. Their collectives go through process groups, which programs know by name;
torch.distributed carries them, by Gloo between CPUs and by NCCL between GPUs.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import GroupName

from llama_artifacts.bundle import Bundle
from llama_artifacts.errors import CompatibilityError, GroupError, InputError
from llama_artifacts.manifest import FILE_NAME

GROUP = "shards"
"""The name of the process group in the graphs of programs, and for tensors that Python sees."""
NATIVE_GROUP = "shards.native"
"""The name in the graphs of native programs, which have a group of the same members to themselves.

Their calls hold Python's lock, which Gloo's threads need to let go of a tensor that Python has seen:
in one group, a native program could wait for a thread that waits for it.
"""
DEFAULT_TIMEOUT = 600.0
"""Seconds that a collective waits for the other processes."""
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCH_HINT = "start it with torchrun --standalone --nproc-per-node N -m llama_runtime"
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class Group:
    """This process among those that run programs together.

    Attributes:
        rank: its number, from 0.
        size: how many there are.
    """

    rank: int
    size: int


def join(device: str = "cpu", *, timeout: float = DEFAULT_TIMEOUT) -> Group:
    """Joins the process group that `torchrun` describes in the environment.

    Returns when every process has joined. A process joins once, and calls `leave` at its end.

    Args:
        device: `cpu`, `cuda` or `cuda:N`, where the programs will run. Of `cuda` each process of a
            machine takes the device of its local rank.
        timeout: seconds that joining, and each collective after that, waits for the others.

    Raises:
        CompatibilityError: not started by `torchrun`, or torch is built without the backend.
        GroupError: some process did not come.
        InputError: another device, or a timeout that is not positive.
    """
    kind = device.partition(":")[0]
    if kind not in _BACKENDS:
        raise InputError(f"expected cpu, cuda or cuda:N, got `{device}`", where="device")
    if not timeout > 0:
        raise InputError(f"expected a positive number of seconds, got {timeout}", where="timeout")
    if not distributed.is_backend_available(_BACKENDS[kind]):
        raise CompatibilityError(f"this torch is built without {_BACKENDS[kind]}")
    rank, size = _place()
    if device == "cuda":
        _take_device()
    try:
        _meet(_BACKENDS[kind], datetime.timedelta(seconds=timeout))
    except (RuntimeError, ValueError, OSError) as cause:  # of torch: a store or a peer is missing
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(cause).partition("\n")[0].strip("' ") or type(cause).__name__
        raise GroupError(
            f"expected {size} processes to meet within {timeout:g} s: {reason}",
            where=place,
            hint="start all of them together, each group at a place of its own: torchrun --standalone",
        ) from cause
    return Group(rank, size)


def _take_device() -> None:
    """Makes the GPU of this process's number on its machine the one that `cuda` means."""
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise CompatibilityError(
            f"expected a CUDA device for each process of this machine, got {count}",
            hint="start fewer processes, or run on the CPU",
        )
    torch.cuda.set_device(number)


def _place() -> tuple[int, int]:
    """This process's rank and the number of processes, from the environment."""
    if missing := [name for name in _VARIABLES if not os.environ.get(name)]:
        raise CompatibilityError(
            f"expected to be one of several processes, but {missing[0]} is not set",
            hint=_LAUNCH_HINT,
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not re.fullmatch(r"[0-9]{1,9}", os.environ[name]):
            raise CompatibilityError(
                f"expected a number, got `{os.environ[name]:.40}`", where=name, hint=_LAUNCH_HINT
            )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= size:
        raise CompatibilityError(
            f"expected a rank below {size} (WORLD_SIZE), got {rank}",
            where="RANK",
            hint=_LAUNCH_HINT,
        )
    return rank, size


def _meet(backend: str, timeout: datetime.timedelta) -> None:
    """Makes the process groups, under the names that programs know."""
    distributed.init_process_group(backend, timeout=timeout)
    assert distributed.group.WORLD is not None
    _register_process_group(GroupName(GROUP), distributed.group.WORLD)
    native = distributed.new_group(timeout=timeout)
    _register_process_group(GroupName(NATIVE_GROUP), native)


def leave() -> None:
    """Ends this process's part in the group."""
    for name in (GROUP, NATIVE_GROUP):
        _unregister_process_group(GroupName(name))
    distributed.destroy_process_group()


@contextmanager
def joined(device: str = "cpu", *, timeout: float = DEFAULT_TIMEOUT) -> Iterator[Group]:
    """`join`, and `leave` at the end of the block."""
    group = join(device, timeout=timeout)
    try:
        yield group
    finally:
        leave()


def launch_hint(num_shards: int) -> str:
    """How programs for so many processes are started."""
    if num_shards == 1:
        return "load it in one process by itself"
    return f"run it with torchrun --standalone --nproc-per-node {num_shards} -m llama_runtime"


def check_shards(bundle: Bundle, group: Group | None) -> None:
    """Refuses a bundle without programs for the processes here, or another one than the others'.

    Raises:
        CompatibilityError: it is refused; of other bundles, in every process.
    """
    counts = bundle.manifest.shard_counts()
    num_shards = 1 if group is None else group.size
    if counts and num_shards not in counts:
        listed = " or ".join(map(str, counts))
        raise CompatibilityError(
            f"expected {listed} processes, for which the bundle has programs, got {num_shards}",
            where=bundle.folder,
            hint=launch_hint(counts[0]),
        )
    if group is not None:
        check_same(group, hashlib.sha256((bundle.folder / FILE_NAME).read_bytes()).digest())


def check_same(group: Group, digest: bytes) -> None:
    """Compares a digest of every process with those of the others.

    Args:
        group: of this process.
        digest: of what must be the same everywhere; of the same length everywhere.

    Raises:
        CompatibilityError: they differ; every process raises it.
        GroupError: a process is lost.
    """
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    if distributed.get_backend() == "nccl":
        own = own.cuda()
    found = [torch.empty_like(own) for _ in range(group.size)]
    try:
        distributed.all_gather(found, own)
    except RuntimeError as cause:
        raise GroupError("a process was lost while the bundle was loaded") from cause
    odd = [rank for rank, other in enumerate(found) if not torch.equal(other, found[0])]
    if odd:
        raise CompatibilityError(
            f"expected one bundle for all {group.size} processes, got another in rank"
            f" {', '.join(map(str, odd))} than in rank 0",
            hint="copy the bundle of rank 0 to the other machines",
        )
