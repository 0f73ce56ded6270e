"""Who sees what? One forward's slots, queries and mask as data, and the segments that attention executes.

Every token has a *number*, its place among the row's own tokens, pads left out; so has every query. A slot holds one
token in one form (plain or encoded), and what a query may see of it are two rules, joined by "and":

    form and window     since[j] <= p < until[j]        p: the query's number
    mask                mask[i, column[j]]               without a mask: number[j] <= p

A token that is sealed while a chunk is running has two slots, its plain form until then and its encoded form since
then, so that each query of the chunk sees what it would have seen alone. A window ends with ``until``. Causality is
the mask's business wherever there is a mask, whatever it says: trees of drafts, images that look ahead, pads. Its
columns are tokens in the order in which they were fed; the last column is the last new token.

``segments`` turns the rules without a mask into runs, by halving the queries: keys that all of them see are one
run without a mask, then each half goes on with what is left; fewer than LEAF queries take their rest with a small mask.

    queries 0..n, causal                          window of w
    [#. . . . . . .]   "#": small masks           [#              ]
    [o #           ]   "o": no mask               [# #            ]     O(n w): what nobody sees is never touched
    [o o # . . . . ]                              [  # #          ]
    [o o o # . . . ]   log2(n / LEAF) runs        [    # #        ]     for each query
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

FOREVER = torch.iinfo(torch.int64).max
NOWHERE = -1  # number of an empty slot: nobody sees it
LEAF = 64  # queries that share a mask
FEW = 128  # keys that are not worth a run of their own beside others that only some queries see

Run = tuple[int, int]  # slots a .. b - 1
Numbers = np.ndarray[Any, np.dtype[np.int64]]


def allowed(mask: torch.Tensor) -> torch.Tensor:
    """A mask of transformers, bool or additive, as bool."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


class Mask(NamedTuple):
    """What a forward's mask says, looked at once for all layers."""

    mask: torch.Tensor  # [B or 1, H or 1, q or 1, columns]: bool, or additive where it is more than yes and no
    pads: bool  # it is causal but for columns that no query sees
    real: torch.Tensor  # [B or 1, columns] bool: columns that some query sees
    padding: bool  # it was made of a padding mask (``from_padding``), and is not the caller's own

    def new(self, fed: int, tokens: int) -> torch.Tensor | None:
        """Which of the ``tokens`` tokens after ``fed`` others are no pads, [B or 1, tokens]; ``None``: all of them."""
        end = min(fed + tokens, self.real.shape[-1])
        real = self.real[:, end - tokens : end]
        if not self.padding:  # whom nobody sees yet at the end, later forwards may see
            real = real | (real.flip(1).cumsum(1).flip(1) == 0)
        return None if bool(real.all()) else real


BRANCHES = (
    "drafts that branch under a window: what it reaches depends on their position_ids, which this model does not hand "
    "over: feed branch by branch from a fork(), or use retention 'all'"
)


def branches(mask: torch.Tensor, total: int, queries: int) -> bool:
    """Whether a new token is hidden from one of the later ones, and seen again by one that comes after that."""
    end = min(total, mask.shape[-1])
    if mask.shape[-2] != queries or end < queries:
        return False
    seen = allowed(mask[..., end - queries : end])
    hidden = ~seen & torch.ones_like(seen).tril(-1)
    return bool((hidden.to(torch.uint8).cummax(-2).values.bool() & seen).any())


_looked: list[tuple[weakref.ref[torch.Tensor], torch.Tensor, int, Mask]] = []


def look(mask: torch.Tensor, total: int) -> Mask:
    """The facts of a mask [B or 1, H or 1, q or 1, columns] of a forward after which ``total`` tokens were fed."""
    for held, copy, then, facts in _looked:
        if held() is mask and then == total and torch.equal(copy, mask):  # written to in place, it is another mask
            return facts
    seen = allowed(mask)
    if mask.dtype != torch.bool and bool(((mask == 0) | ~seen).all()):
        mask_, seen_ = seen, seen
    else:
        mask_, seen_ = mask, seen
    real = seen_.any(-2).any(1)  # [B, columns]
    queries, columns = mask.shape[-2:]
    pads = mask_.dtype == torch.bool and mask.shape[1] == 1
    if pads and queries > 1:
        last = min(total, columns)
        order = torch.arange(columns, device=mask.device) - (last - queries)
        causal_ = order <= torch.arange(queries, device=mask.device)[:, None]
        pads = bool((seen_ == (causal_ & real[:, None, None, :])).all())
    facts = Mask(mask_, pads, real, getattr(mask, "from_padding", False))
    _looked[:] = [entry for entry in _looked[:3] if entry[0]() is not None]
    _looked.insert(0, (weakref.ref(mask), mask.detach().clone(), total, facts))
    return facts


class Fed(NamedTuple):
    """Which of the ``tokens`` that a layer was fed were no pads, row by row; shared by forks, never changed in place.

    ``real`` [B, k] bool speaks of the first k; after the last pad there are only real ones, which need no room.
    """

    tokens: int
    real: torch.Tensor

    @staticmethod
    def of(batch: int, tokens: int = 0, device: torch.device | str = "cpu") -> Fed:
        """No pads so far."""
        return Fed(tokens, torch.ones(batch, 0, dtype=torch.bool, device=device))

    def and_then(self, real: torch.Tensor | None, tokens: int) -> Fed:
        """So many more, of which ``real`` [B, tokens] are no pads (``None``: all)."""
        return Fed(self.tokens + tokens, self.real if real is None else torch.cat([self.whole(), real], 1))

    def whole(self) -> torch.Tensor:
        """[B, tokens] bool."""
        rest = self.real.new_ones(self.real.shape[0], self.tokens - self.real.shape[1])
        return torch.cat([self.real, rest], 1)

    def until(self, tokens: int) -> Fed:
        """All but the first ``tokens`` forgotten."""
        return Fed(tokens, self.real[:, :tokens])

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Fed:
        """After ``fn`` of the rows."""
        return Fed(self.tokens, fn(self.real))

    def columns(self) -> torch.Tensor:
        """The column of every row's own tokens, [B, most of any row] int64; NOWHERE beyond a row's last one."""
        whole = self.whole()
        count = whole.sum(-1)
        order = (~whole).to(torch.int8).argsort(dim=1, stable=True)[:, : int(count.max()) if len(count) else 0]
        beyond = torch.arange(order.shape[1], device=order.device) >= count[:, None]
        return order.masked_fill(beyond, NOWHERE)


class Visible(NamedTuple):
    """The rules of one forward. R is 1, or the batch where rows differ; the last axis of all is what they speak of."""

    number: torch.Tensor  # [R, n] int64, of the token in each slot; NOWHERE: none
    since: torch.Tensor  # [R, n] int64: the first query, by number, that sees this form
    until: torch.Tensor  # [R, n] int64: the first one that does not any more
    query: torch.Tensor  # [R, q] int64, of the queries; of a pad, that of the token before it
    column: torch.Tensor  # [R, n] int64, of the mask; ``number`` where nothing was padded
    total: int  # tokens fed, these queries' included: the columns of a full mask

    @property
    def queries(self) -> int:
        return self.query.shape[-1]

    def to(self, device: torch.device) -> Visible:
        """On another device; itself if it is there."""
        if self.number.device == device:
            return self
        return self._map(lambda t: t.to(device))

    def last(self, queries: int) -> Visible:
        """For the last ``queries`` only: layers without keys of their own may leave out the others."""
        return self if queries >= self.queries else self._replace(query=self.query[:, self.queries - queries :])

    def row(self, index: int) -> Visible:
        """One row of a batch whose rows differ."""
        if self.number.shape[0] == 1:
            return self
        return self._map(lambda t: t[index : index + 1])

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Visible:
        return Visible(fn(self.number), fn(self.since), fn(self.until), fn(self.query), fn(self.column), self.total)

    def rows(self, mask: torch.Tensor | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """What queries ``start:stop`` see, [R or B, 1 or H, stop - start, n]: bool, or additive where ``mask`` is.

        Args:
            mask: as transformers makes it, [B or 1, H or 1, q or 1, columns]; it may lack the oldest columns.
        """
        p = self.query[:, start:stop, None]
        seen = (self.since[:, None] <= p) & (p < self.until[:, None])  # [R, s, n]
        if mask is None:
            return (seen & (self.number[:, None] <= p))[:, None]
        mask = mask[..., start:stop, :] if mask.shape[-2] > 1 else mask
        own = self.by_slot(mask)
        if own.dtype == torch.bool:
            return own & seen[:, None]
        return own.masked_fill(~seen[:, None], float("-inf"))

    def by_depth(self, positions: torch.Tensor | None, mask: torch.Tensor, sinks: int, window: int) -> Visible:
        """The same for drafts that branch: a window reaches back from a draft's own place in its branch.

        Args:
            positions: of the queries, [B or 1, q], from whoever brings the mask, too; ``None``: they are not known.
            mask: as in ``rows``, the caller's own.

        Raises:
            ValueError: drafts branch, a window is left, and nobody says where they are.
        """
        queries = self.queries
        if queries < 2 or int(self.query.max()) < sinks + window or bool((self.query.diff() != 1).any()):
            return self  # no window is left, or some are pads
        if positions is None or positions.dim() != 2 or positions.shape[1] != queries:
            if branches(mask, self.total, queries):
                raise ValueError(BRANCHES)
            return self
        depth = (positions - positions[:, :1]).to(self.query.device)
        order = torch.arange(queries, device=depth.device)
        if bool((depth < 0).any()) or bool((depth > order).any()):  # something else that is side by side
            return self
        start = self.query[:, :1]
        late = (self.number - start).expand(max(len(depth), len(self.number)), -1)
        own = start + depth.expand(len(late), -1).gather(1, late.clamp(0, queries - 1))
        until = self.until.expand(len(late), -1)
        until = torch.where((late >= 0) & (own >= sinks), torch.minimum(until, own + window), until)
        stays = (late >= 0) & (own < sinks) & (until == self.number + window)  # a sink by its own place
        until = until.masked_fill(stays, FOREVER)
        return self._replace(query=start + depth, until=until)

    def rows_of(self, start: int, stop: int) -> torch.Tensor:
        """``rows`` without a mask."""
        return self.rows(None, start, stop)

    def by_slot(self, mask: torch.Tensor) -> torch.Tensor:
        """The columns of a mask [B, H, q, columns], slot by slot, [B, H, q, n]; what it does not speak of is seen."""
        column = self.column - max(self.total - mask.shape[-1], 0)
        silent = column < 0
        column = column.clamp(0, mask.shape[-1] - 1)
        if column.shape[0] == 1:
            out = mask.index_select(-1, column[0])
        else:
            index = column[:, None, None].expand(-1, *mask.shape[1:3], -1)
            out = mask.expand(column.shape[0], -1, -1, -1).gather(-1, index)
        if not bool(silent.any()):
            return out
        return out.masked_fill(silent[:, None, None], True if mask.dtype == torch.bool else 0.0)


class Segment(NamedTuple):
    """Queries ``start:stop`` see these runs of slots: all of them, or by ``mask`` [stop - start, keys] bool, whose
    columns are the runs one after the other. So do ``times - 1`` further blocks of queries, each ``step`` queries after
    the one before it, with runs that lie ``shifts`` slots later each time."""

    start: int
    stop: int
    runs: tuple[Run, ...]
    mask: torch.Tensor | None
    times: int = 1
    step: int = 0
    shifts: tuple[int, ...] = ()


@lru_cache(maxsize=4)
def causal(queries: int, slots: int) -> Visible:
    """One form, no window, nothing padded: the last of the slots are the queries' own."""
    number = torch.arange(slots)[None]
    return Visible(
        number, torch.zeros_like(number), torch.full_like(number, FOREVER), number[:, slots - queries :], number, slots
    )


_plans: OrderedDict[bytes, list[Segment]] = OrderedDict()


def segments(visible: Visible) -> list[Segment]:
    """The segments of one row of rules (R = 1) without a mask. Queries that see nothing are in none.

    Planned once for all layers that have the same rules in one forward.
    """
    assert visible.number.shape[0] == 1, "rows that differ are planned one by one"
    visible = visible.to(torch.device("cpu"))
    digest = hashlib.blake2b(digest_size=16)
    for t in (visible.number, visible.since, visible.until, visible.query):
        digest.update(t.contiguous().numpy().tobytes())
        digest.update(b";")
    key = digest.digest()
    found = _plans.get(key)
    if found is None:
        found = _plans[key] = _planned(visible)
        while len(_plans) > 16:
            _plans.popitem(last=False)
    return found


def _planned(visible: Visible) -> list[Segment]:
    number, since, until, query = (t[0].numpy() for t in visible[:4])
    start, end = np.where(number < 0, FOREVER, np.maximum(since, number)), until
    found: list[Segment] = []

    def halve(a: int, b: int, runs: list[Run]) -> None:
        low, high = int(query[a:b].min()), int(query[a:b].max())
        every, rest = [], []
        for run in runs:
            sees, misses = _split(start[run[0] : run[1]], end[run[0] : run[1]], low, high, run[0])
            every += sees
            rest += misses
        beside = {edge for run in rest for edge in run}
        alone = [run for run in every if run[1] - run[0] >= FEW or not beside & {*run}]
        if alone:
            found.append(Segment(a, b, tuple(alone), None))
        rest = _joined(rest + [run for run in every if run not in alone])
        if not rest:
            return
        if b - a <= LEAF:
            keys = np.concatenate([np.arange(x, y) for x, y in rest])
            p = query[a:b, None]
            mask = (start[keys] <= p) & (p < end[keys])
            used = mask.any(0)  # what only other queries see
            found.append(Segment(a, b, tuple(_runs(keys[used])), _shared(mask[:, used])))
            return
        middle = a + max((b - a) // 2 // LEAF, 1) * LEAF
        halve(a, middle, rest)
        halve(middle, b, rest)

    if visible.queries:
        halve(0, visible.queries, [(0, len(number))])
    return _repeated(found)


def _repeated(found: list[Segment]) -> list[Segment]:
    """Segments that look alike, at equal distances, as one: their runs move with the queries."""
    alike: dict[object, list[Segment]] = {}
    for segment in found:
        runs = tuple((x - segment.start, y - segment.start) for x, y in segment.runs)
        alike.setdefault((segment.stop - segment.start, runs, id(segment.mask)), []).append(segment)
    out: list[Segment] = []
    for group in alike.values():
        last = group[0]
        for segment in group[1:]:
            far = segment.start - last.start
            if last.times == 1 or far == last.times * last.step:
                step = last.step or far
                last = last._replace(times=last.times + 1, step=step, shifts=(step,) * len(last.runs))
            else:
                out.append(last)
                last = segment
        out.append(last)
    return out


def _split(start: Numbers, end: Numbers, low: int, high: int, offset: int) -> tuple[list[Run], list[Run]]:
    """Of slots from ``offset`` on, the runs that all queries ``low..high`` see, and those that only some do."""
    kind = ((start <= high) & (end > low)).astype(np.int8) + ((start <= low) & (end > high))
    edges = [0, *(np.flatnonzero(kind[1:] != kind[:-1]) + 1).tolist(), len(kind)]
    runs = [(offset + x, offset + y, kind[x]) for x, y in zip(edges, edges[1:], strict=False) if x < y]
    return [(x, y) for x, y, k in runs if k == 2], [(x, y) for x, y, k in runs if k == 1]


def _joined(runs: list[Run]) -> list[Run]:
    """In order, and neighbours as one."""
    out: list[Run] = []
    for x, y in sorted(runs):
        if out and out[-1][1] == x:
            out[-1] = (out[-1][0], y)
        else:
            out.append((x, y))
    return out


def _runs(slots: Numbers) -> list[Run]:
    """Ascending slot numbers as runs."""
    pieces = np.split(slots, np.flatnonzero(slots[1:] != slots[:-1] + 1) + 1) if len(slots) else []
    return [(int(p[0]), int(p[-1]) + 1) for p in pieces]


_masks: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()


def _shared(mask: Any) -> torch.Tensor:
    """One tensor for all leaves that look alike (those of a window all do)."""
    key = (*mask.shape, hash(mask.tobytes()))
    found = _masks.get(key)
    if found is None or not np.array_equal(found.numpy(), mask):
        _masks[key] = found = torch.from_numpy(np.ascontiguousarray(mask))
        while len(_masks) > 64:
            _masks.popitem(last=False)
    return found
