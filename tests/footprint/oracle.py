"""What a program really keeps alive: it is run on real tensors whose storages are watched."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """Counts the bytes of storages from when an operator gives them to when Python drops them."""

    supports_higher_order_operators = True

    def __init__(self, outside: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in outside}
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.higher_order.while_loop:
            return self._loop(*args)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def _loop(self, condition: Any, body: Any, carried: Any, fixed: Any) -> Any:
        with self:
            while condition(*carried, *fixed):
                carried = body(*carried, *fixed)
        return carried

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
