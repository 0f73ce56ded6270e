"""Where do kept tokens lie, when any may stay? Units in slots, in no order; beside each, which tokens it is.

    Slots    state [B, H, C, ...]   position [B, H, C, g] int32, -1: empty   score [B, H, C] float32
    Ragged   the same, flat [N, ...], for heads that hold different numbers of tokens

A unit is what the codec encodes together: one token, or a group of g.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch

from .codecs import Codec
from .part import Part, map_state, narrow


def take(state: Any, index: torch.Tensor) -> Any:
    """Slots ``index`` [B, H, k] of a state."""
    rows, heads = grid(index.shape[0], index.shape[1], index.device)
    return map_state(state, lambda t: t[rows, heads, index])


def map_pairs(first: Any, second: Any, fn: Any) -> Any:
    """``fn`` over every tensor of two states of one codec, joined along the tokens one by one."""
    return type(first)(*(fn(torch.cat(pair, 2)) for pair in zip(first, second, strict=True)))


@lru_cache(maxsize=8)
def grid(batch: int, heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [B, 1, 1] and heads [1, H, 1], to index with."""
    with torch.inference_mode(False):
        return torch.arange(batch, device=device)[:, None, None], torch.arange(heads, device=device)[None, :, None]


class Slots:
    """Units of ``group`` tokens per row and head, as many for each: [B, H, C, ...], of which ``used`` are in use."""

    def __init__(self, key_codec: Codec, value_codec: Codec, group: int) -> None:
        self.key_codec, self.value_codec, self.group = key_codec, value_codec, group
        self.keys: Any = None
        self.values: Any = None
        self.position = self.score = torch.empty(0)
        self.used = 0

    @property
    def tokens(self) -> int:
        return self.used * self.group

    @property
    def full(self) -> bool:
        """No spare slots: tensors are handed out as they are."""
        return self.used == self.score.shape[2]

    def units(self) -> Part:
        """What is held, unit by unit."""
        keys, values = self.keys, self.values
        if not self.full:
            keys, values = narrow(keys, 0, self.used), narrow(values, 0, self.used)
        return Part(self.key_codec, keys, self.value_codec, values)

    def part(self) -> Part:
        """What is held, as the codecs wrote it."""
        units = self.units()
        keys, values = (
            map_state(state, lambda t: t.flatten(2, 3)) if codec.group < self.group else state
            for codec, state in ((self.key_codec, units.keys), (self.value_codec, units.values))
        )
        return units._replace(keys=keys, values=values)

    def fold(self, part: Part) -> Part:
        """Rows as a codec of smaller groups wrote them, unit by unit: [B, H, m * r, ...] -> [B, H, m, r, ...]."""

        def folded(codec: Codec, state: Any) -> Any:
            if codec.group == self.group:
                return state
            return map_state(state, lambda t: t.unflatten(2, (-1, self.group // codec.group)))

        keys, values = folded(self.key_codec, part.keys), folded(self.value_codec, part.values)
        return part._replace(keys=keys, values=values)

    def positions(self) -> torch.Tensor:
        """[B, H, used, g]"""
        return self.position if self.full else self.position[:, :, : self.used]

    def scores(self) -> torch.Tensor:
        """[B, H, used]"""
        return self.score if self.full else self.score[:, :, : self.used]

    def set_scores(self, scores: torch.Tensor) -> None:
        self.score[:, :, : self.used] = scores

    def fill(self, part: Part, position: torch.Tensor, score: torch.Tensor) -> None:
        """Hold these units, and nothing else."""
        with torch.inference_mode(False):
            self.keys, self.values = (map_state(s, lambda t: t.clone()) for s in (part.keys, part.values))
            self.position, self.score = position.to(torch.int32).clone(), score.float().clone()
        self.used = score.shape[2]

    def keep(self, index: torch.Tensor, position: torch.Tensor, score: torch.Tensor, new: Part | None = None) -> None:
        """Hold, of the held units and after them those of ``new``, the units ``index`` [B, H, k], and nothing else.

        One tensor after the other: no copy of all of them exists beside what is held before and after.
        """
        rows, heads = grid(index.shape[0], index.shape[1], index.device)
        with torch.inference_mode(False):
            pick = lambda t: t[rows, heads, index]  # noqa: E731
            keys, values = self.each(pick, new)
            self.position, self.score = position.to(torch.int32).clone(), score.float().clone()
        self.keys, self.values, self.used = keys, values, score.shape[2]

    def each(self, fn: Any, new: Part | None) -> tuple[Any, Any]:
        """``fn`` over every tensor of the held units, with those of ``new`` after them: [B, H, m, ...]."""
        if new is None:
            units = self.units()
            return map_state(units.keys, fn), map_state(units.values, fn)
        if not self.used:
            return map_state(new.keys, fn), map_state(new.values, fn)
        mine = self.units()
        return map_pairs(mine.keys, new.keys, fn), map_pairs(mine.values, new.values, fn)

    def grow(self, limit: int | None) -> None:
        """Room for one more unit; about 1/16 spare, but never more than ``limit`` units."""
        if self.used < self.score.shape[2]:
            return
        capacity = self.used + max(8, self.used // 16)
        capacity = capacity if limit is None else max(min(capacity, limit), self.used + 1)

        def larger(t: torch.Tensor) -> torch.Tensor:
            # Zeros: a short row's empty slots are attended to with probability 0, which does not undo a NaN.
            new = t.new_zeros((*t.shape[:2], capacity, *t.shape[3:]))
            new[:, :, : self.used] = t[:, :, : self.used]
            return new

        with torch.inference_mode(False):
            self.keys, self.values = map_state(self.keys, larger), map_state(self.values, larger)
            self.position, self.score = larger(self.position), larger(self.score)

    def append(self, unit: Part, position: torch.Tensor, score: torch.Tensor, limit: int | None) -> None:
        """One more unit [B, H, 1, ...] for every row and head."""
        if not self.used:
            return self.fill(unit, position, score)
        self.grow(limit)
        slot = self.used
        for mine, new in zip((*self.keys, *self.values), (*unit.keys, *unit.values), strict=True):
            mine[:, :, slot : slot + 1] = new
        self.position[:, :, slot : slot + 1] = position
        self.score[:, :, slot : slot + 1] = score
        self.used += 1

    def open(self, limit: int) -> None:
        """One more slot for every row and head, empty: zeros that nobody attends to."""
        self.grow(limit)
        for t in (*self.keys, *self.values):
            t[:, :, self.used] = 0
        self.position[:, :, self.used], self.score[:, :, self.used] = -1, float("-inf")
        self.used += 1

    def put(
        self, index: torch.Tensor, unit: Part, position: torch.Tensor, score: torch.Tensor, real: torch.Tensor
    ) -> None:
        """Overwrite slot ``index`` [B, H] of every row of those in ``real``, [B] bool, and head with a unit
        [B, H, 1, ...]."""
        rows, heads = grid(index.shape[0], index.shape[1], index.device)
        where = (rows[real][..., 0], heads[..., 0], index[real])
        for mine, new in zip((*self.keys, *self.values), (*unit.keys, *unit.values), strict=True):
            mine[where] = new[real][:, :, 0]
        self.position[where] = position[real][:, :, 0].to(torch.int32)
        self.score[where] = score[real][:, :, 0]

    def replace(self, index: torch.Tensor, unit: Part, number: int, score: torch.Tensor) -> None:
        """``put`` in all rows a token of the same ``number``, ``index`` [B, H, 1]: tokens of decode come this way, so
        it is few operators."""
        where = (*grid(index.shape[0], index.shape[1], index.device), index)
        for mine, new in zip((*self.keys, *self.values), (*unit.keys, *unit.values), strict=True):
            mine.index_put_(where, new)  # scatter_ of 16-bit numbers takes ten times as long on a CPU
        self.position.scatter_(2, index[..., None], number)
        self.score.scatter_(2, index, score)

    def map_rows(self, fn: Any) -> None:
        """Apply ``fn``, which may change the batch axis only, to every tensor."""
        if self.keys is not None:
            self.keys, self.values = map_state(self.keys, fn), map_state(self.values, fn)
            self.position, self.score = fn(self.position), fn(self.score)

    def numbers(self) -> list[torch.Tensor]:
        """The tensors that say which tokens these are."""
        return [self.position]

    def fork(self) -> Slots:
        """A second container of the same units; slots are overwritten in place, so nothing is shared."""
        new = copy.copy(self)
        new.map_rows(torch.clone)
        return new


class RaggedPart:
    """A run whose heads hold different numbers of tokens. ``attend_torch`` gathers blocks of it; the kernels read
    ``keys`` and ``values`` as they lie: every head seems to begin at row 0, and its ``starts`` is to be added."""

    group = 1

    def __init__(self, slots: Ragged) -> None:
        self._slots = slots
        self.key_codec, self.value_codec, self.tokens = slots.key_codec, slots.value_codec, slots.used
        self.starts, self.sizes = slots.start, slots.size
        for t in (self.starts, self.sizes):  # as the kernels read them
            assert t.dim() == 2 and t.dtype == torch.int64 and t.is_contiguous(), t
        shape = (*slots.size.shape, slots.used)
        flat = lambda t: t.as_strided((*shape, *t.shape[1:]), (0, 0, *t.stride()))  # noqa: E731
        self.keys, self.values = map_state(slots.keys, flat), map_state(slots.values, flat)

    def expand(self, batch: int) -> RaggedPart:
        return self

    def whole(self) -> Part:
        return self.block(0, self.tokens)

    def block(self, start: int, stop: int) -> Part:
        index = self._slots.index(start, stop)
        keys, values = (self._slots.gather(state, index) for state in (self._slots.keys, self._slots.values))
        return Part(self.key_codec, keys, self.value_codec, values)


class Ragged:
    """Slots of which every row and head has its own number: flat tensors [N, ...], head after head.

    ``size`` [B, H] says how many, ``start`` [B, H] where they begin. N never changes between two ``fill``.
    """

    group = 1

    def __init__(self, key_codec: Codec, value_codec: Codec) -> None:
        self.key_codec, self.value_codec = key_codec, value_codec

    def fill(
        self,
        part: Part,
        position: torch.Tensor,
        score: torch.Tensor,
        chosen: torch.Tensor,
        held: Slots | Ragged | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        """Hold the units that ``chosen`` [B, H, n] bool marks; a unit without a token (-1) is room for a later one.

        They are those of ``part``; or of ``held`` and after them of ``part``, in ``order`` [B, H, n].
        """
        with torch.inference_mode(False):
            rows, heads, place = chosen.nonzero(as_tuple=True)
            place = place if order is None else order[rows, heads, place]
            pick = lambda t: t[rows, heads, place]  # noqa: E731
            if held is None:
                self.keys, self.values = map_state(part.keys, pick), map_state(part.values, pick)
            else:
                self.keys, self.values = held.each(pick, part)
            self.position, self.score = position[..., 0][chosen].to(torch.int32), score[chosen].float()
            self.size = chosen.sum(-1)
            self.start = (self.size.flatten().cumsum(0) - self.size.flatten()).view_as(self.size)
        self.used = int(self.size.max())

    @property
    def tokens(self) -> int:
        return self.used

    def index(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Where slots ``start:stop`` of each head lie, [B, H, n]; beyond a head's size some other slot."""
        slot = torch.arange(start, self.used if stop is None else stop, device=self.start.device)
        return (self.start[..., None] + slot).clamp_max(self.score.shape[0] - 1)

    def gather(self, state: Any, index: torch.Tensor) -> Any:
        return map_state(state, lambda t: t.index_select(0, index.flatten()).unflatten(0, index.shape))

    def _inside(self) -> torch.Tensor:
        return torch.arange(self.used, device=self.size.device) < self.size[..., None]

    def part(self) -> Any:
        return RaggedPart(self)

    def positions(self) -> torch.Tensor:
        position = self.position[self.index()]
        return position.masked_fill(~self._inside(), -1)[..., None]

    def scores(self) -> torch.Tensor:
        return self.score[self.index()]

    def set_scores(self, scores: torch.Tensor) -> None:
        self.score = scores[self._inside()]

    def each(self, fn: Any, new: Part) -> tuple[Any, Any]:
        """As ``Slots.each``; beyond a head's size some other slot."""
        index = self.index()
        dense = lambda t: t.index_select(0, index.flatten()).unflatten(0, index.shape)  # noqa: E731
        pairs = ((self.keys, new.keys), (self.values, new.values))
        keys, values = (
            type(mine)(*(fn(torch.cat([dense(a), b], 2)) for a, b in zip(mine, other, strict=True)))
            for mine, other in pairs
        )
        return keys, values

    def put(
        self, index: torch.Tensor, unit: Part, position: torch.Tensor, score: torch.Tensor, real: torch.Tensor | None
    ) -> None:
        some = slice(None) if real is None else real
        where = (self.start + index)[some]
        for mine, new in zip((*self.keys, *self.values), (*unit.keys, *unit.values), strict=True):
            mine[where] = new[some][:, :, 0]
        self.position[where] = position[some][:, :, 0, 0].to(torch.int32)
        self.score[where] = score[some][:, :, 0]

    def map_rows(self, fn: Any) -> None:
        """Rows are cut out of the flat tensors in their new order."""
        rows = fn(torch.arange(self.size.shape[0], device=self.size.device))
        size = self.size[rows]
        slot = torch.arange(int(size.max()), device=size.device)
        index = (self.start[rows][..., None] + slot)[slot < size[..., None]]
        pick = lambda t: t.index_select(0, index.to(t.device))  # noqa: E731
        self.keys, self.values = map_state(self.keys, pick), map_state(self.values, pick)
        self.position, self.score, self.size = pick(self.position), pick(self.score), size
        self.start = (size.flatten().cumsum(0) - size.flatten()).view_as(size)
        self.used = int(size.max())

    def numbers(self) -> list[torch.Tensor]:
        """The tensors that say which tokens these are."""
        return [self.position, self.size, self.start]

    def fork(self) -> Ragged:
        """A second container of the same units; slots are overwritten in place, so nothing is shared."""
        new = copy.copy(self)
        new.map_rows(lambda t: t)
        return new


def add_bytes(parts: dict[str, int], plain: str, *states: Any) -> None:
    """Bytes of states: scales and offsets to ``parts["scales"]``, all else to ``parts[plain]``."""
    for state in states:
        for name, t in zip(state._fields, state, strict=True):
            parts["scales" if name in ("scale", "zero") else plain] += t.untyped_storage().nbytes()


def slots_used(slots: Any) -> bool:
    return isinstance(slots, Ragged) or slots.used > 0


def take_part(part: Part, index: torch.Tensor) -> Part:
    """Units ``index`` [B, H, k]."""
    return part._replace(keys=take(part.keys, index), values=take(part.values, index))


def by_number(number: torch.Tensor) -> torch.Tensor:
    """Indices [B, H, n] that put tokens into the text's order; pads and empty slots, -1, come last."""
    return number.masked_fill(number < 0, torch.iinfo(number.dtype).max).argsort(dim=-1, stable=True)


def choose(
    scores: torch.Tensor, position: torch.Tensor, most: int, rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best units, oldest first.

    Args:
        scores: [B, H, n].
        position: [B, H, n, g].
        most: units to keep, in the row that keeps most.
        rows: [B] units to keep per row, where rows differ.

    Returns:
        Their indices [B, H, most], and their positions [B, H, most, g], -1 beyond a row's own number.
    """
    # Stable sorts, not topk: pooled scores have ties, and a row must choose alike wherever it and its tokens stand.
    order = by_number(position[..., 0])
    index = order.gather(2, scores.gather(2, order).argsort(dim=-1, descending=True, stable=True)[..., :most])
    first = position[..., 0].gather(2, index)
    if rows is not None:
        beyond = torch.arange(index.shape[-1], device=index.device) >= rows[:, None, None]
        first = torch.where(beyond, -1, first)
    order = by_number(first)
    index, empty = index.gather(2, order), first.gather(2, order) < 0
    kept = position.gather(2, index[..., None].expand(-1, -1, -1, position.shape[-1]))
    return index, kept.masked_fill(empty[..., None], -1)
