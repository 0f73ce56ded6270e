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

Forks share rows. What a slab without a limit has written never changes, so ``fork`` declares it *frozen*: both slabs
hold the same tensors from then on, and each writes later tokens to rows of its own.

    original   [frozen 0 .. 4000) [own 4000 .. 4003)
    fork       [frozen 0 .. 4000) [own 4000 .. 4001)        the frozen tensors are the same ones

Attention takes the pieces as they lie, so nobody joins them; ``freeze`` joins a piece with the one before it when that
is not much longer, which keeps them few (their lengths fall by a factor of ``FOLD``). Frozen rows of the batch may
stand for several rows each, next to each other: repeating a batch copies nothing. A ring is copied before its next
write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .codecs import State
from .part import concat, map_state, narrow, repeat_rows

# The first growth of slab number i comes this many rows earlier than that of slab 0, so that the layers of a model do
# not all copy in the same decode step.
STAGGER = 7

FEW = 256  # tokens that are copied rather than kept as a piece of their own
FOLD = 4  # a frozen piece is at least this many times as long as the next one


T = TypeVar("T")


def twin(thing: T) -> T:
    """``copy.copy`` of an object of ours, at a fifth of the time: a fork makes hundreds."""
    new = object.__new__(type(thing))
    new.__dict__.update(thing.__dict__)
    return new


def pick_rows(state: Any, rows: torch.Tensor, batch: int) -> Any:
    """What a state that stands for ``batch`` rows holds of ``rows`` of them; copies only what it cannot share."""
    held = state[0].shape[0]
    wanted = rows.cpu() // max(batch // max(held, 1), 1)
    if held and len(wanted) and not len(wanted) % held:
        if torch.equal(wanted, torch.arange(held).repeat_interleave(len(wanted) // held)):
            return state
    if len(wanted) and bool((wanted == wanted[0]).all()):
        return map_state(state, lambda t: t[int(wanted[0]) : int(wanted[0]) + 1])
    return map_state(state, lambda t: t.index_select(0, wanted.to(t.device)))


def slot_tokens(appended: int, limit: int | None, pinned: int = 0) -> torch.Tensor:
    """The token in each slot of a ring after ``appended`` tokens, ``[min(appended, limit)]`` int64."""
    if limit is None or appended <= limit:
        return torch.arange(appended)
    slots, ring, newest = torch.arange(limit), limit - pinned, appended - 1 - pinned
    return torch.where(slots < pinned, slots, newest - (newest - (slots - pinned)) % ring + pinned)


class Kept(list[Any]):
    """(slot, rows) of a slab before they were overwritten."""


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
        self.frozen: tuple[State, ...] = ()  # shared with forks, before the rows in ``state``; never written
        self.state: State | None = None
        self.shared = False  # a ring that a fork holds, too
        self.ragged = False  # written row by row, each at a slot of its own (``put``)
        self.appended = 0  # tokens ever written
        self.capacity = 0
        self.grown = False
        self.overwrote = False  # since this was last set to False, rows that were in use
        self._kept: weakref.ref[Kept] | None = None  # what they held, as long as somebody may want it back

    def __len__(self) -> int:
        return self.appended if self.limit is None else min(self.appended, self.limit)

    @property
    def base(self) -> int:
        """Tokens in the frozen pieces."""
        return sum(piece[0].shape[2] for piece in self.frozen)

    @property
    def batch(self) -> int:
        assert self.state is not None
        return self.state[0].shape[0]

    def views(self) -> list[Any]:
        """All stored tokens as views, in slot order (token order until a ring wraps); one state per piece."""
        assert self.state is not None
        own = len(self) - self.base
        return [*self.frozen, narrow(self.state, 0, own)] if own or not self.frozen else list(self.frozen)

    def view(self) -> Any:
        """``views`` as one state of the whole batch; copies where rows are shared with a fork."""
        pieces = [map_state(piece, lambda t: repeat_rows(t, self.batch)) for piece in self.views()]
        return pieces[0] if len(pieces) == 1 else concat(pieces)

    def tokens(self) -> torch.Tensor:
        """Which token (counted from the slab's first) lies in each slot, ``[len]`` int64 on the CPU."""
        return slot_tokens(self.appended, self.limit, self.pinned)

    def newest(self, count: int) -> list[Any]:
        """The pinned tokens and the newest ``count`` others, in token order, as views: a wrapped ring is several."""
        n, pinned = len(self), min(self.pinned, len(self))
        gone = n - pinned - max(min(count, n - pinned), 0)
        runs = [(pinned, n)]
        if self.limit is not None and self.appended > self.limit:
            oldest = pinned + (self.appended - pinned) % (n - pinned)
            runs = [(oldest, n), (pinned, oldest)]
        pieces, view = [(0, pinned)], self.view()
        for start, stop in runs:
            skipped = min(gone, stop - start)
            gone -= skipped
            pieces.append((start + skipped, stop))
        if pieces[1][0] == pinned:  # nothing lies between the first two
            pieces[:2] = [(0, pieces[1][1])]
        return [narrow(view, start, stop) for start, stop in pieces if stop > start] or [narrow(view, 0, 0)]

    def last(self, count: int, then: Any = None) -> Any:
        """``newest`` as one state, and ``then`` after it; copies once, where there are several pieces."""
        pieces = [*self.newest(count), *([] if then is None else [then])]
        return pieces[0] if len(pieces) == 1 else concat(pieces)

    def drop(self, count: int) -> None:
        """Forget the first ``count`` tokens of a slab without a limit; the few that stay move to new rows."""
        if not count:
            return
        rest = narrow(self.view(), count, self.appended)
        if self.frozen:
            self.clear()
            return self.append(rest)
        with torch.inference_mode(False):
            self.state = map_state(self.state, torch.empty_like)
        self.appended -= count
        self._write(0, rest)

    def append(self, state: Any) -> None:
        """Write a run of tokens. Of a run longer than the ring only what stays is written."""
        n = state[0].shape[2]
        if self.limit is None:
            own = self._own_rows()
            self._reserve(own + n, state)
            self._write(own, state)
        else:
            self._append_ring(state, n, self.limit)
        self.appended += n

    def put(self, start: torch.Tensor, count: torch.Tensor, state: Any) -> None:
        """Write the first ``count[b]`` tokens of row b to its slots from ``start[b]`` on; both [B], on the CPU."""
        offset = torch.arange(state[0].shape[2])
        wanted = offset < count[:, None]
        slots = start[:, None] + offset
        if self.limit is not None:
            wanted &= offset >= count[:, None] - self.limit  # anything before is overwritten within this very run
            self.overwrote |= bool((slots[wanted] >= self.limit).any())
            slots %= self.limit
        if not bool(wanted.any()):
            return
        self._own_rows()
        end = max(int(slots[wanted].max()) + 1, len(self))
        self._reserve(end, state)
        rows, columns = wanted.nonzero(as_tuple=True)
        for mine, new in zip(self.state, state, strict=True):  # type: ignore[arg-type]
            device = mine.device
            mine[rows.to(device), :, slots[wanted].to(device)] = new[rows.to(device), :, columns.to(device)]
        self.appended = end

    def open_slot(self) -> int:
        """Room for one more token, counted as appended: the slot that the caller now writes."""
        assert self.state is not None
        slot = self._own_rows()
        if self.limit is None or self.appended < self.limit:
            self._reserve(slot + 1, self.state)
        else:
            slot = self.pinned + (self.appended - self.pinned) % (self.limit - self.pinned)
            self._overwrite(slot, 1)
        self.appended += 1
        return slot

    def _append_ring(self, state: Any, n: int, limit: int) -> None:
        ring = limit - self.pinned
        self._own_rows()
        self._reserve(min(self.appended + n, limit), state)
        straight = min(n, max(limit - self.appended, 0))
        self._write(self.appended, narrow(state, 0, straight))
        token = max(straight, n - ring)  # anything before is overwritten within this very run
        while token < n:
            slot = self.pinned + (self.appended + token - self.pinned) % ring
            run = min(n - token, limit - slot)
            self._overwrite(slot, run)
            self._write(slot, narrow(state, token, token + run))
            token += run

    def _own_rows(self) -> int:
        """Rows of ``state`` in use, after whatever must not be shared with a fork any longer was copied."""
        if self.shared or (self.frozen and self.base * self.group < FEW):
            with torch.inference_mode(False):
                self.state = map_state(self.view(), torch.clone)
            self.frozen, self.shared, self.capacity = (), False, len(self)
        return self.appended - self.base

    def _overwrite(self, slot: int, count: int) -> None:
        """These rows are about to be written to; those in use are kept where that is wanted."""
        held = min(len(self) - slot, count)
        if held > 0:
            self.overwrote = True
            kept = None if self._kept is None else self._kept()
            if kept is not None:
                kept.append((slot, map_state(narrow(self.state, slot, slot + held), torch.clone)))

    def mark(self, keep: bool | None = False) -> tuple[dict[str, Any], Kept | None]:
        """Where the slab is, for ``recall``; ``keep``: also what it overwrites from now on (``None``: if it does so
        already), as long as the mark lives.

        A slab writes behind what it holds, or to new tensors: but for a full ring, its fields say what it held.
        """
        kept = Kept() if keep else self._kept() if keep is None and self._kept is not None else None
        self.overwrote, self._kept = False, None if kept is None else weakref.ref(kept)
        return {**vars(self), "_kept": None}, kept

    def recalls(self, mark: tuple[dict[str, Any], Kept | None]) -> bool:
        """Whether nothing was overwritten since ``mark`` that was not kept."""
        return not self.overwrote or bool(mark[1])

    def recall(self, mark: tuple[dict[str, Any], Kept | None]) -> None:
        """Be where ``mark`` was made. Only while ``recalls``."""
        fields, kept = mark
        for slot, state in reversed(kept or Kept()):
            self._write(slot, state)
        vars(self).update(fields)

    def _write(self, slot: int, state: Any) -> None:
        for mine, new in zip(self.state, state, strict=True):  # type: ignore[arg-type]
            mine[:, :, slot : slot + new.shape[2]] = new

    def _reserve(self, tokens: int, like: Any) -> None:
        """Room for ``tokens`` rows. The first allocation is exact; later ones add about 1/128."""
        if self.state is not None and tokens <= self.capacity:
            return
        capacity, held = tokens, len(self) - self.base
        if self.capacity:
            step = max(16 // self.group, tokens // 128, 1)
            capacity += step - (0 if self.grown else STAGGER * self.phase % step)
            self.grown = True
        if self.limit is not None:
            capacity = min(capacity, self.limit)
        # Plain tensors even under inference_mode: one made there could not be written to outside of it.
        with torch.inference_mode(False):
            grown = map_state(like, lambda t: t.new_empty((*t.shape[:2], capacity, *t.shape[3:])))
            if self.ragged:  # slots that a row does not use are masked, and finite all the same
                grown = map_state(grown, torch.Tensor.zero_)
        if self.state is not None:
            for new, old in zip(grown, self.state, strict=True):
                new[:, :, :held] = old[:, :, :held]
        self.state, self.capacity = grown, capacity

    def truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens. Only while nothing has been overwritten."""
        assert self.limit is None or self.appended <= self.limit
        self.appended = min(self.appended, tokens)
        frozen: list[Any] = []
        for piece in self.frozen:
            left = self.appended - sum(kept[0].shape[2] for kept in frozen)
            if left:
                frozen.append(narrow(piece, 0, left) if left < piece[0].shape[2] else piece)
        self.frozen = tuple(frozen)

    def select_rows(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` to every tensor; it may change the batch axis only, to a choice of its rows."""
        if self.state is None:
            return
        if self.frozen:
            rows, batch = fn(torch.arange(self.batch)), self.batch
            self.frozen = tuple(pick_rows(piece, rows, batch) for piece in self.frozen)
        self.state, self.shared = map_state(self.state, fn), False

    def adopt(self, state: Any, empty: Any, appended: int) -> None:
        """Hold tokens that lie elsewhere (a mapped file), without ever writing there.

        Args:
            state: the tokens in slot order.
            empty: a state like it of no tokens, which this slab may keep.
            appended: tokens ever written; a ring has forgotten some of them.
        """
        self.clear()
        self.appended = appended
        if self.limit is None and not self.ragged:
            self.frozen, self.state = (state,) if appended else (), empty
        else:
            self.state, self.shared, self.capacity = state, True, len(self)

    def fork(self) -> Slab:
        """A second slab of the same tokens. Both share what is written, and neither sees what the other does next."""
        self.freeze()
        return twin(self)

    def freeze(self) -> None:
        """What is written becomes immutable and shareable; a slab without a limit writes to new rows from now on."""
        if self.state is None or self.limit is not None or self.ragged:
            self.shared = self.state is not None
            return
        if not self.capacity:  # nothing was written since
            return
        own = len(self) - self.base
        pieces = [*self.frozen, narrow(self.state, 0, own)] if own else list(self.frozen)
        with torch.no_grad(), torch.inference_mode(False):
            while len(pieces) > 1 and _folds(pieces[-2], pieces[-1]):
                pieces[-2:] = [concat(pieces[-2:])]
            self.state = map_state(self.state, lambda t: t.new_empty((*t.shape[:2], 0, *t.shape[3:])))
        self.frozen, self.capacity, self.grown = tuple(pieces), 0, False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def clear(self) -> None:
        self.frozen, self.state, self.shared = (), None, False
        self.appended, self.capacity, self.grown = 0, 0, False

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and part."""
        return {"device": self.bytes_by_part()}

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes by part: payload (codes or plain values), scales, and rows not yet used."""
        parts = {"payload": 0, "scales": 0, "spare": 0}
        if self.state is None:
            return parts
        for piece in (*self.frozen, narrow(self.state, 0, len(self) - self.base)):
            for name, t in zip(piece._fields, piece, strict=True):
                parts["scales" if name in ("scale", "zero") else "payload"] += t.nbytes
                parts["spare"] += t.untyped_storage().nbytes() - t.nbytes
        return parts


def _folds(piece: Any, following: Any) -> bool:
    """Whether two frozen pieces become one: the first is not much longer, and they hold the same batch."""
    same = piece[0].shape[0] == following[0].shape[0]
    return same and piece[0].shape[2] < FOLD * following[0].shape[2]
