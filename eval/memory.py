"""How high did memory go?

Stored bytes are what a cache holds between steps; the peak includes what a step needs for a moment: the
second copy that `torch.cat` makes of a history, or a history dequantized to be read. On CUDA the allocator
knows the peak. On a CPU every operator's outputs are watched: a storage counts from the operator that made
it until it is freed. Workspace inside an operator is not seen there.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """`with PeakBytes(device) as peak: ...`, then `peak.bytes`: the most alive at once of what it made."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.bytes = 0
        self._live: dict[int, int] = {}  # storage -> bytes
        self._now = 0

    def __enter__(self) -> PeakBytes:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
            return self
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count the storages it made."""
        kwargs = kwargs or {}
        known = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in known:  # not a view of an input
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.bytes = max(self.bytes, self._now)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self._now -= self._live.pop(key, 0)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
