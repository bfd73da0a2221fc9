"""The group of processes that a compiler asks after, though none but itself is there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._C._distributed_c10d import (
    HashStore,
    ProcessGroup,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed.distributed_c10d import GroupName

from llama_export.model.formulation import Formulation


@contextlib.contextmanager
def processes(form: Formulation) -> Iterator[None]:
    """In the block, the graph's group has as many members as the program will; none can be reached."""
    if not form.is_sharded:
        yield
        return
    name = GroupName(form.group)
    group = ProcessGroup(HashStore(), 0, form.num_shards)  # which the register does not keep alive
    _register_process_group(name, group)
    try:
        yield
    finally:
        _unregister_process_group(name)
