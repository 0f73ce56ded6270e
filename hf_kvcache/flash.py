"""How are the segments of a plan executed? By a flash kernel each, merged by log-sum-exp.

For one segment a kernel returns its own softmax's output o_s and log-sum-exp l_s; two of them are one softmax by

    l = log(exp(l_a) + exp(l_b))        o = o_a + sigmoid(l_b - l_a) (o_b - o_a)

exactly (FlashAttention, Dao et al., arXiv:2205.14135, section 3.1). Learned sinks are one more segment without a
value: o = sigmoid(l - s_aux) o. Merging is float32; kernels compute in the model's dtype with float32 sums, as stock
SDPA does.

Plain runs are read where they lie. Encoded ones are decoded a block at a time into the model's dtype, at most BLOCK
values, each block once for all segments that read it, so that no decoded copy of the history exists. The G query heads
of a KV head are rows of one product, and segments that look alike at equal distances are heads of one call: all of them
are views of queries that were laid out once.

    query [B, H, q G, D]  ->  [B H, times, size G, D]        keys [B, H, n, D]  ->  [B H, times, width, D]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from . import compat
from .part import repeat_rows
from .plan import FEW, LEAF, Segment

BLOCK = 1 << 21  # values that are decoded at a time, and at most half of a part of more than LONG tokens
LONG = 1024
ROWS = 1 << 22  # float32 scores of the plain path at a time
KEYS = 2048  # keys of a run under a mask of the caller's
QUERIES = 256  # and queries
SCATTERED = 8  # runs of one segment in one block that are worth a call each


def attend_segments(
    query: torch.Tensor,
    parts: list[Any],
    plan: list[Segment],
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of many queries, by a plan that holds for all rows and heads.

    Args:
        query: [B, Hq, q, Dk].
        parts: ``attention.Part``; the plan's slots are theirs, one after the other.
        plan: ``plan.segments``.
        scaling, softcap, s_aux: as ``attention.attend_reference``.

    Returns:
        [B, Hq, q, Dv] in the query's dtype; a query that sees nothing gets zeros.
    """
    heads, width = parts[0].keys[0].shape[1], parts[0].values[0].shape[-1]
    return _attend_blocks(query, _blocks(parts, query), heads, width, plan, scaling, softcap, s_aux)


def attend_plain(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: list[Segment], scaling: float
) -> torch.Tensor:
    """``attend_segments`` over plain keys [B, H, n, Dk] and values [B, H, n, Dv]."""
    wide = max(keys.shape[-1], values.shape[-1])
    block = Block(0, keys.shape[2], keys.shape[0], lambda: (_widened(keys, wide), _widened(values, wide)))
    return _attend_blocks(query, iter([block]), keys.shape[1], values.shape[-1], plan, scaling, None, None)


def _attend_blocks(
    query: torch.Tensor,
    blocks: Iterator[Block],
    heads: int,
    width: int,
    plan: list[Segment],
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    batch, groups = query.shape[0], query.shape[1] // heads
    rows = query.unflatten(1, (heads, groups)).transpose(2, 3).flatten(2, 3)  # [B, H, q G, D]
    merged = Merged(rows, width, LEAF * groups)
    for block in blocks:
        some = [slice(j, None, batch // block.rows) for j in range(batch // block.rows)]  # which may share its rows
        for piece in (piece for segment in plan for piece in _pieces(segment, block.first, block.last)):
            at = Window(piece.start * groups, piece.size * groups, piece.step * groups, piece.times)
            for these in some:
                out, lse = _attend_piece(at.of(rows[these]), block, piece, groups, scaling, softcap)
                merged.add(these, at, out[..., :width], lse)
    return merged.result(s_aux, groups)


class Window(NamedTuple):
    """``times`` runs of ``size`` rows, each ``step`` after the one before."""

    first: int
    size: int
    step: int = 0
    times: int = 1

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """Those of [B, H, n, ...], as a view [B, H, times, size, ...]; to be read only where they overlap."""
        a, b, n, *rest = t.stride()
        shape = (*t.shape[:2], self.times, self.size, *t.shape[3:])
        return t.as_strided(shape, (a, b, self.step * n, n, *rest), t.storage_offset() + self.first * n)


class Piece(NamedTuple):
    """What one block has of a segment: ``times`` windows of queries, over as many windows of its keys."""

    start: int  # of the first window of queries
    size: int
    step: int = 0
    times: int = 1
    keys: Any = (0, 0)  # (first, last + 1) of the first window, counted from the block's; or all keys, [n] int64
    shift: int = 0
    mask: torch.Tensor | None = None  # the segment's, of which these keys have columns ``x:y``, or [n] int64
    columns: Any = (0, 0)


def _pieces(segment: Segment, x: int, y: int) -> Iterator[Piece]:
    """A segment in slots ``x:y``: neighbouring windows of which the same part lies inside are one piece."""
    start, stop, runs, mask, times, step, shifts = segment
    size, column = stop - start, 0
    if times == 1 and sum(a < y and b > x for a, b in runs) > SCATTERED:
        slots = torch.cat([torch.arange(a, b) for a, b in runs])
        (columns,) = ((slots >= x) & (slots < y)).nonzero(as_tuple=True)
        yield Piece(start, size, keys=slots[columns] - x, mask=mask, columns=columns)
        return
    for (a, b), shift in zip(runs, shifts or (0,) * len(runs), strict=True):
        first, cut = 0, (0, 0)  # the first of the windows at work, and what of them lies inside
        for i in range(times + 1):
            low, high = max(a, x - i * shift), min(b, y - i * shift)
            now = (low, high) if i < times and low < high else (0, 0)
            if now == cut:
                continue
            if cut[1]:
                at, of = first * shift - x, column - a
                keys, some = (cut[0] + at, cut[1] + at), (cut[0] + of, cut[1] + of)
                yield Piece(start + first * step, size, step, i - first, keys, shift, mask, some)
            first, cut = i, now
        column += b - a


def _attend_piece(
    query: torch.Tensor, block: Block, piece: Piece, groups: int, scaling: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, H, times, s, Dv] and log-sum-exp [B, H, times, s] of queries [B, H, times, s, D]."""
    keys, values = block.decoded()  # [B, H, n, D]
    if isinstance(piece.keys, tuple):
        first, last = piece.keys
        there = Window(first, last - first, piece.shift, piece.times)
        k, v = there.of(keys), there.of(values)
    else:
        k, v = (t[:, :, None, piece.keys.to(t.device)] for t in (keys, values))
    bias, dead = (None, None) if piece.mask is None else _as_bias(piece, groups, query)
    q, k, v = (t.flatten(0, 1) for t in (_widened(query, keys.shape[-1]), k, v))
    out, lse = _cleared(*_run(q, k, v, scaling, bias, softcap), dead)
    return out.unflatten(0, query.shape[:2]), lse.unflatten(0, query.shape[:2])


def attend_masked(
    query: torch.Tensor,
    parts: list[Any],
    mask: Callable[[int, int], torch.Tensor],
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``attend_segments`` for a mask that is no plan: ``mask(start, stop)`` is that of queries ``start:stop``,
    [B or 1, 1, H or Hq, stop - start or 1, n], bool or additive."""
    heads, total = parts[0].keys[0].shape[1], sum(part.tokens for part in parts)
    merged = Merged(query, parts[0].values[0].shape[-1], QUERIES)
    for start in range(0, query.shape[2], QUERIES):
        stop = min(start + QUERIES, query.shape[2])
        rows, seen = query[:, :, start:stop], mask(start, stop)
        for a in range(0, total, KEYS):
            b = min(a + KEYS, total)
            some = seen[..., a:b]
            if some.dtype == torch.bool and not bool(some.any()):
                continue
            keys, values = _joined(parts, ((a, b),), query)
            bias, dead = _bias(_by_query_head(some, heads, query.shape[1]), query.dtype)
            out, lse = partial(rows, keys, values, scaling, softcap, bias, dead)
            merged.add(slice(None), Window(start, stop - start), out[:, :, None], lse[:, :, None])
    return merged.result(s_aux)


class Merged:
    """The softmax over all that was added so far: of rows [B, H, n, D], looked after in runs of ``unit``."""

    def __init__(self, rows: torch.Tensor, width: int, unit: int) -> None:
        self.dtype, self.unit = rows.dtype, unit
        precision = torch.float64 if rows.dtype == torch.float64 else torch.float32
        self.out = rows.new_zeros(*rows.shape[:3], width, dtype=precision)
        self.lse = rows.new_full(rows.shape[:3], float("-inf"), dtype=precision)
        self.touched = bytearray(-(-rows.shape[2] // unit))

    def add(self, some: slice, at: Window, out: torch.Tensor, lse: torch.Tensor) -> None:
        """What ``some`` of the batch found at a window of the rows: out [B, H, times, size, Dv], lse without Dv."""
        mine, level = at.of(self.out[some]), at.of(self.lse[some])
        starts = (at.first + i * at.step for i in range(at.times))
        runs = [slice(a // self.unit, -(-(a + at.size) // self.unit)) for a in starts]
        fresh = not any(any(self.touched[run]) for run in runs)
        for run in runs:
            self.touched[run] = b"\1" * len(self.touched[run])
        if fresh:
            mine.copy_(out)
            level.copy_(lse)
            return
        share = torch.sigmoid(lse - level).nan_to_num_(0.0)  # both -inf: nothing was seen yet
        mine.lerp_(out.to(mine.dtype), share[..., None])
        level.copy_(torch.logaddexp(level, lse.to(level.dtype)))

    def result(self, s_aux: torch.Tensor | None, groups: int = 1) -> torch.Tensor:
        """The output in the query's dtype, [B, Hq, q, Dv], of rows that are ``groups`` heads of each query."""
        if s_aux is not None:
            sinks = s_aux.to(self.lse.dtype).view(-1, 1, groups)
            self.out.unflatten(2, (-1, groups)).mul_(
                torch.sigmoid(self.lse.unflatten(2, (-1, groups)) - sinks)[..., None]
            )
        out = self.out.unflatten(2, (-1, groups)).transpose(1, 2)  # [B, q, H, G, Dv]: as models go on with it
        return out.to(self.dtype, memory_format=torch.contiguous_format).flatten(2, 3).transpose(1, 2)


def partial(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    dead: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One segment: output and log-sum-exp.

    Args:
        query: [B, Hq, s, D].
        keys, values: [B, H, n, D], any strides but the last.
        bias: additive, [B or 1, Hq or 1, s, n].
        dead: queries that ``bias`` lets see nothing, [B or 1, Hq or 1, s] bool; ``None``: there are none.

    Returns:
        out [B, Hq, s, Dv], lse [B, Hq, s]: 0 and -inf for dead queries.
    """
    batch, query_heads, rows, width = query.shape
    heads, value_width = keys.shape[1], values.shape[-1]
    if width != value_width:  # kernels want one width
        query, keys, values = (_widened(t, max(width, value_width)) for t in (query, keys, values))
    groups = query_heads // heads
    q = query.reshape(batch * heads, groups, rows, query.shape[-1])
    k, v = (t.reshape(batch * heads, 1, *t.shape[2:]) for t in (keys, values))
    if bias is None:
        q = q.reshape(batch * heads, 1, groups * rows, -1)
    else:
        k, v = k.expand(-1, groups, -1, -1), v.expand(-1, groups, -1, -1)
        bias = _per_kv_head(bias, batch, heads, groups)
    out, lse = _run(q, k, v, scaling, bias, softcap)
    out = out.reshape(batch, query_heads, rows, -1)[..., :value_width]
    return _cleared(out, lse.reshape(batch, query_heads, rows), dead)


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, bias: torch.Tensor | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The device's kernel, or its reference where there is none."""
    kernel = compat.flash_with_lse(q.device) if softcap is None else None
    return kernel(q, k, v, scaling, bias) if kernel else partial_reference(q, k, v, scaling, bias, softcap)


def _cleared(out: torch.Tensor, lse: torch.Tensor, dead: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """0 and -inf for queries that saw nothing."""
    if dead is None:
        return out, lse
    return out.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, float("-inf"))


def partial_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By definition, in float32, some rows at a time: what a kernel is compared with, and where there is none.

    All of [b, h, *, D]; out in the query's dtype, lse float32.
    """
    outs, lses = [], []
    step = max(1, ROWS // max(query.shape[0] * query.shape[1] * keys.shape[2], 1))
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    for start in range(0, query.shape[2], step):
        scores = query[:, :, start : start + step].to(precision) @ keys.to(precision).transpose(-1, -2) * scaling
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if bias is not None:
            scores = scores + (bias[:, :, start : start + step] if bias.shape[2] > 1 else bias)
        lse = scores.logsumexp(-1)
        probs = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp_()
        outs.append((probs @ values.to(precision)).to(query.dtype))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


# -- keys and values ---------------------------------------------------------------------------------------------------


def _slices(parts: list[Any], runs: tuple[tuple[int, int], ...]) -> Iterator[tuple[Any, int, int]]:
    """(part, first, last + 1) of its own tokens, for every run of slots."""
    for a, b in runs:
        offset = 0
        for part in parts:
            x, y = max(a - offset, 0), min(b - offset, part.tokens)
            if x < y:
                yield part, x, y
            offset += part.tokens


def _plain(part: Any, a: int, b: int, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``a:b`` of a part in the query's dtype, [B, H, b - a, D]; views where nothing has to be decoded."""
    first = a // part.group * part.group
    block = part.block(first, -(-b // part.group) * part.group)
    keys = block.key_codec.decode(block.keys, query.dtype)[:, :, a - first : b - first]
    values = block.value_codec.decode(block.values, query.dtype)[:, :, a - first : b - first]
    batch = query.shape[0]
    if keys.shape[0] == 1 < batch:
        return keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1)
    return repeat_rows(keys, batch), repeat_rows(values, batch)


def _joined(
    parts: list[Any], runs: tuple[tuple[int, int], ...], query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of all runs, side by side."""
    return _side_by_side([_plain(part, a, b, query) for part, a, b in _slices(parts, runs)])


def _widened(t: torch.Tensor, width: int) -> torch.Tensor:
    return t if t.shape[-1] == width else torch.nn.functional.pad(t, (0, width - t.shape[-1]))


class Block:
    """Neighbouring slots that are decoded together, when somebody asks, once."""

    def __init__(
        self, first: int, last: int, rows: int, decode: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self.first, self.last, self.rows, self._decode = first, last, rows, decode
        self._states: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def of(first: int, runs: list[tuple[Any, int, int]], dtype: torch.dtype) -> Block:
        """Of parts and what is wanted of each; all of them have as many rows."""

        def decode() -> tuple[torch.Tensor, torch.Tensor]:
            pieces = [part.block(a, b) for part, a, b in runs]
            keys, values = _side_by_side(
                [(p.key_codec.decode(p.keys, dtype), p.value_codec.decode(p.values, dtype)) for p in pieces]
            )
            wide = max(keys.shape[-1], values.shape[-1])  # kernels want one width
            return _widened(keys, wide), _widened(values, wide)

        return Block(first, first + sum(b - a for _, a, b in runs), runs[0][0].keys[0].shape[0], decode)

    def decoded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [r, H, n, D] of the rows that the parts hold."""
        self._states = self._states or self._decode()
        return self._states


def _blocks(parts: list[Any], query: torch.Tensor) -> Iterator[Block]:
    """All slots in order; where a part has to be decoded, a bounded number of them at a time. Short plain parts
    before it come with its first block."""
    first = 0
    waiting: list[tuple[Any, int, int]] = []
    for part in parts:
        rows, heads, width = part.keys[0].shape[0], part.keys[0].shape[1], part.keys[0].shape[-1]
        plain = part.key_codec.lossless and part.value_codec.lossless and part.keys[0].dtype == query.dtype
        if waiting and (waiting[0][0].keys[0].shape[0] != rows or (plain and part.tokens > FEW)):
            yield (block := Block.of(first, waiting, query.dtype))
            first, waiting = block.last, []
        if plain and part.tokens <= FEW:
            waiting.append((part, 0, part.tokens))
            continue
        most = min(BLOCK // (rows * heads * width), part.tokens // 2 if part.tokens > LONG else part.tokens)
        most = part.tokens if plain else max(most // part.group, 1) * part.group
        for a in range(0, part.tokens, max(most, 1)):
            yield (block := Block.of(first, [*waiting, (part, a, min(a + most, part.tokens))], query.dtype))
            first, waiting = block.last, []
    if waiting:
        yield Block.of(first, waiting, query.dtype)


def _side_by_side(pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([k for k, _ in pieces], 2), torch.cat([v for _, v in pieces], 2)


# -- masks -------------------------------------------------------------------------------------------------------------

_biases: OrderedDict[tuple[Any, ...], Any] = OrderedDict()


def _as_bias(piece: Piece, groups: int, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A piece's mask as ``_bias`` on the query's device, for ``groups`` rows of each query; once for all layers."""
    mask, columns = piece.mask, piece.columns
    assert mask is not None
    scattered = not isinstance(columns, tuple)
    key = (id(mask), tuple(columns.tolist()) if scattered else columns, groups, query.dtype, query.device)
    found = _biases.get(key)
    if found is None or found[0] is not mask:
        some = mask[:, columns] if scattered else mask[:, slice(*columns)]
        found = (mask, *_bias(some.repeat_interleave(groups, 0)[None, None].to(query.device), query.dtype))
        _biases[key] = found
        while len(_biases) > 32:
            _biases.popitem(last=False)
    return found[1], found[2]


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Additive, and the queries that see nothing, ``None`` where all see something."""
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    else:
        lowest = torch.finfo(mask.dtype).min / 2
        bias = mask.masked_fill(mask < lowest, float("-inf")).to(dtype)
    dead = (bias == float("-inf")).all(-1)
    return bias, dead if bool(dead.any()) else None


def _by_query_head(mask: torch.Tensor, heads: int, query_heads: int) -> torch.Tensor:
    """One for all heads, or one per query head: a mask per KV head stands for all query heads of it."""
    if mask.shape[1] in (1, query_heads):
        return mask
    assert mask.shape[1] == heads, (mask.shape, heads)
    return mask.repeat_interleave(query_heads // heads, 1)


def _per_kv_head(bias: torch.Tensor, batch: int, heads: int, groups: int) -> torch.Tensor:
    """[B or 1, Hq or 1, s, n] -> [B * H or 1, G or 1, s, n]."""
    if bias.shape[1] > 1:
        return bias.expand(batch, -1, -1, -1).reshape(batch * heads, groups, *bias.shape[2:])
    if bias.shape[0] > 1:
        return bias.repeat_interleave(heads, 0)
    return bias
