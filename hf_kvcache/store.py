"""What is held, in which slot? A growable run of encoded tokens, and the two runs that make up one layer.

    Store = sinks (first tokens, full precision)  +  sealed (encoded)

Every run is a ``Slab``: one state tuple whose tensors have spare rows at the end. Appending writes into the spare
rows; when they are used up, every tensor is copied once into one about 1/128 longer. That makes an append O(1)
amortised (each token is moved at most ~128 times in its life, against n reads of n tokens by attention), keeps the
spare memory below 1 %, and leaves the history in one piece, so that attention reads it without ``torch.cat``. The
peak while a slab grows is one copy of that one slab.

With a ``limit`` a slab is a ring: once full, a new token overwrites the oldest one that is not pinned, in place.
Softmax does not care about the order of its keys, so a decode step reads the slots as they lie; ``tokens`` says which
is which.

    pinned = 2, limit = 6, after 9 tokens:     slot   0 1 2 3 4 5
                                               token  0 1 6 7 8 5
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .codecs import State

# The first growth of slab number i comes this many rows earlier than that of slab 0, so that the layers of a model do
# not all copy in the same decode step.
STAGGER = 7


def map_state(state: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``fn`` over every tensor of a state, keeping its type."""
    return type(state)(*(fn(t) for t in state))


def narrow(state: Any, start: int, stop: int) -> Any:
    """Tokens ``start:stop`` of a state, as views."""
    return map_state(state, lambda t: t[:, :, start:stop])


def concat(states: list[Any]) -> Any:
    """States of one codec joined along the tokens."""
    return type(states[0])(*(torch.cat(parts, dim=2) for parts in zip(*states, strict=True)))


def slot_tokens(appended: int, limit: int | None, pinned: int = 0) -> torch.Tensor:
    """The token in each slot of a ring after ``appended`` tokens, ``[min(appended, limit)]`` int64."""
    if limit is None or appended <= limit:
        return torch.arange(appended)
    slots, ring, newest = torch.arange(limit), limit - pinned, appended - 1 - pinned
    return torch.where(slots < pinned, slots, newest - (newest - (slots - pinned)) % ring + pinned)


class Slab:
    """A growable run of tokens in one state tuple; a ring when ``limit`` is given.

    Args:
        limit: most tokens held; the oldest unpinned one is overwritten beyond it. ``None``: unbounded.
        pinned: the first ``pinned`` tokens are never overwritten.
        phase: shifts the moments of growth (the layer's index).
        group: what the codec encodes together; a slab counts such groups as one token.
    """

    in_place = True  # ``state`` is where the rows live: a kernel may write into it

    def __init__(self, limit: int | None = None, pinned: int = 0, phase: int = 0, group: int = 1) -> None:
        self.limit, self.pinned, self.phase, self.group = limit, pinned, phase, group
        self.state: State | None = None
        self.appended = 0  # tokens ever written
        self.capacity = 0
        self.grown = False

    def __len__(self) -> int:
        return self.appended if self.limit is None else min(self.appended, self.limit)

    def view(self) -> Any:
        """All stored tokens as views, in slot order (token order until a ring wraps)."""
        assert self.state is not None
        return narrow(self.state, 0, len(self))

    def tokens(self) -> torch.Tensor:
        """Which token (counted from the slab's first) lies in each slot, ``[len]`` int64 on the CPU."""
        return slot_tokens(self.appended, self.limit, self.pinned)

    def last(self, count: int) -> Any:
        """The pinned tokens and the newest ``count`` others, in token order; copies once a ring has wrapped."""
        n = len(self)
        keep = max(min(count, n - self.pinned), 0) + min(self.pinned, n)
        if keep == n and (self.limit is None or self.appended <= self.limit):
            return self.view()
        order = self.tokens().argsort()
        slots = torch.cat([order[: min(self.pinned, n)], order[n - keep + min(self.pinned, n) :]])
        return map_state(self.state, lambda t: t.index_select(2, slots.to(t.device)))

    def drop(self, count: int) -> None:
        """Forget the first ``count`` tokens of a slab without a limit; the few that stay move to the front."""
        rest = narrow(self.state, count, self.appended)
        self.appended -= count
        self._write(0, map_state(rest, torch.clone))

    def append(self, state: Any) -> None:
        """Write a run of tokens. Of a run longer than the ring only what stays is written."""
        n = state[0].shape[2]
        if self.limit is None:
            self._reserve(self.appended + n, state)
            self._write(self.appended, state)
        else:
            self._append_ring(state, n, self.limit)
        self.appended += n

    def open_slot(self) -> int:
        """Room for one more token, counted as appended: the slot that the caller now writes."""
        assert self.state is not None
        if self.limit is None or self.appended < self.limit:
            self._reserve(self.appended + 1, self.state)
            slot = self.appended
        else:
            slot = self.pinned + (self.appended - self.pinned) % (self.limit - self.pinned)
        self.appended += 1
        return slot

    def _append_ring(self, state: Any, n: int, limit: int) -> None:
        ring = limit - self.pinned
        self._reserve(min(self.appended + n, limit), state)
        straight = min(n, max(limit - self.appended, 0))
        self._write(self.appended, narrow(state, 0, straight))
        token = max(straight, n - ring)  # anything before is overwritten within this very run
        while token < n:
            slot = self.pinned + (self.appended + token - self.pinned) % ring
            run = min(n - token, limit - slot)
            self._write(slot, narrow(state, token, token + run))
            token += run

    def _write(self, slot: int, state: Any) -> None:
        for mine, new in zip(self.state, state, strict=True):  # type: ignore[arg-type]
            mine[:, :, slot : slot + new.shape[2]] = new

    def _reserve(self, tokens: int, like: Any) -> None:
        """Room for ``tokens`` rows. The first allocation is exact; later ones add about 1/128."""
        if self.state is not None and tokens <= self.capacity:
            return
        capacity = tokens
        if self.state is not None:
            step = max(16 // self.group, tokens // 128, 1)
            capacity += step - (0 if self.grown else STAGGER * self.phase % step)
            self.grown = True
        if self.limit is not None:
            capacity = min(capacity, self.limit)
        # Plain tensors even under inference_mode: one made there could not be written to outside of it.
        with torch.inference_mode(False):
            grown = map_state(like, lambda t: t.new_empty((*t.shape[:2], capacity, *t.shape[3:])))
        if self.state is not None:
            for new, old in zip(grown, self.state, strict=True):
                new[:, :, : len(self)] = old[:, :, : len(self)]
        self.state, self.capacity = grown, capacity

    def truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens. Only while nothing has been overwritten."""
        assert self.limit is None or self.appended <= self.limit
        self.appended = min(self.appended, tokens)

    def select_rows(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` to every tensor; it may change the batch axis only."""
        if self.state is not None:
            self.state = map_state(self.state, fn)

    def clear(self) -> None:
        self.state, self.appended, self.capacity, self.grown = None, 0, 0, False

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and part."""
        return {"device": self.bytes_by_part()}

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes by part: payload (codes or plain values), scales, and rows not yet used."""
        parts = {"payload": 0, "scales": 0, "spare": 0}
        for name, t in zip(self.state._fields, self.state, strict=True) if self.state is not None else ():  # type: ignore[attr-defined]
            total = t.untyped_storage().nbytes()
            used = total * len(self) // max(self.capacity, 1)
            parts["scales" if name in ("scale", "zero") else "payload"] += used
            parts["spare"] += total - used
        return parts
