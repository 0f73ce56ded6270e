"""How are the segments of a plan executed? By a flash kernel each, merged by log-sum-exp.

For one segment a kernel returns its own softmax's output o_s and log-sum-exp l_s; two of them are one softmax by

    l = log(exp(l_a) + exp(l_b))        o = o_a + sigmoid(l_b - l_a) (o_b - o_a)

exactly (FlashAttention, Dao et al., arXiv:2205.14135, section 3.1). Learned sinks are one more segment without a
value: o = sigmoid(l - s_aux) o. Merging is float32; kernels compute in the model's dtype with float32 sums, as stock
SDPA does.

Plain runs are read where they lie. Encoded ones are decoded a block at a time into the model's dtype, at most BLOCK
values, so that no decoded copy of the history exists. All G query heads of a KV head are rows of one product where
there is no mask; elsewhere keys are views that stand for G heads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import compat
from .plan import LEAF, Segment
from .store import repeat_rows

BLOCK = 1 << 20  # values that are decoded at a time, and at most half of a part of more than LONG tokens
LONG = 1024
ROWS = 1 << 22  # float32 scores of the plain path at a time
KEYS = 2048  # keys of a run under a mask of the caller's


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
    merged = Merged(query, parts)
    for start, stop, runs, mask in plan:
        rows = query[:, :, start:stop]
        if mask is None:
            for keys, values in _blocks(parts, runs, query):
                merged.add(start, stop, *partial(rows, keys, values, scaling, softcap))
        else:
            (keys, values), (bias, dead) = _joined(parts, runs, query), _as_bias(mask, query)
            merged.add(start, stop, *partial(rows, keys, values, scaling, softcap, bias, dead))
    return merged.result(s_aux)


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
    merged, heads, total = Merged(query, parts), parts[0].keys[0].shape[1], sum(part.tokens for part in parts)
    for start in range(0, query.shape[2], LEAF):
        stop = min(start + LEAF, query.shape[2])
        rows, seen = query[:, :, start:stop], mask(start, stop)
        for a in range(0, total, KEYS):
            b = min(a + KEYS, total)
            some = seen[..., a:b]
            if some.dtype == torch.bool and not bool(some.any()):
                continue
            keys, values = _joined(parts, ((a, b),), query)
            bias, dead = _bias(_by_query_head(some, heads, query.shape[1]), query.dtype)
            merged.add(start, stop, *partial(rows, keys, values, scaling, softcap, bias, dead))
    return merged.result(s_aux)


class Merged:
    """The softmax over all that was added so far, for blocks of LEAF queries."""

    def __init__(self, query: torch.Tensor, parts: list[Any]) -> None:
        batch, heads, queries, _ = query.shape
        width = parts[0].values[0].shape[-1]
        self.dtype = query.dtype
        precision = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.out = query.new_zeros(batch, heads, queries, width, dtype=precision)
        self.lse = query.new_full((batch, heads, queries), float("-inf"), dtype=precision)
        self.touched = bytearray(-(-queries // LEAF))

    def add(self, start: int, stop: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """What queries ``start:stop`` found: out [B, Hq, s, Dv], lse [B, Hq, s]."""
        blocks = slice(start // LEAF, -(-stop // LEAF))
        mine, level = self.out[:, :, start:stop], self.lse[:, :, start:stop]
        if not any(self.touched[blocks]):
            mine.copy_(out)
            level.copy_(lse)
            self.touched[blocks] = b"\1" * len(self.touched[blocks])
            return
        share = torch.sigmoid(lse - level).nan_to_num_(0.0)  # both -inf: nothing was seen yet
        mine.lerp_(out.to(mine.dtype), share[..., None])
        level.copy_(torch.logaddexp(level, lse.to(level.dtype)))

    def result(self, s_aux: torch.Tensor | None) -> torch.Tensor:
        """The output in the query's dtype."""
        if s_aux is not None:
            self.out.mul_(torch.sigmoid(self.lse - s_aux.to(self.lse.dtype)[None, :, None])[..., None])
        return self.out.to(self.dtype)


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
        wide = max(width, value_width)
        query, keys, values = (torch.nn.functional.pad(t, (0, wide - t.shape[-1])) for t in (query, keys, values))
    groups = query_heads // heads
    kernel = compat.flash_with_lse(query.device) if softcap is None else None
    q = query.reshape(batch * heads, groups, rows, query.shape[-1])
    k, v = (t.reshape(batch * heads, 1, *t.shape[2:]) for t in (keys, values))
    if bias is None:
        q = q.reshape(batch * heads, 1, groups * rows, -1)
    else:
        k, v = k.expand(-1, groups, -1, -1), v.expand(-1, groups, -1, -1)
        bias = _per_kv_head(bias, batch, heads, groups)
    out, lse = kernel(q, k, v, scaling, bias) if kernel else partial_reference(q, k, v, scaling, bias, softcap)
    out = out.reshape(batch, query_heads, rows, -1)[..., :value_width]
    lse = lse.reshape(batch, query_heads, rows)
    if dead is not None:
        lse = lse.masked_fill(dead, float("-inf"))
        out = out.masked_fill(dead[..., None], 0.0)
    return out, lse


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


def _blocks(
    parts: list[Any], runs: tuple[tuple[int, int], ...], query: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens of all runs, a bounded number of decoded ones at a time; short runs come with others."""
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
    held = 0
    for part, a, b in _slices(parts, runs):
        batch, heads, width = part.keys[0].shape[0], part.keys[0].shape[1], part.keys[0].shape[-1]
        most = min(BLOCK // (batch * heads * width), part.tokens // 2 if part.tokens > LONG else part.tokens)
        most = max(most // part.group, 1) * part.group
        as_it_is = part.key_codec.lossless and part.value_codec.lossless and part.keys[0].dtype == query.dtype
        if as_it_is and b - a > LEAF:
            yield _plain(part, a, b, query)
            continue
        for x in range(a, b, most):
            y = min(x + most, b)
            waiting.append(_plain(part, x, y, query))
            held += y - x
            if held >= most:
                yield _side_by_side(waiting)
                waiting, held = [], 0
    if waiting:
        yield _side_by_side(waiting)


def _side_by_side(pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([k for k, _ in pieces], 2), torch.cat([v for _, v in pieces], 2)


# -- masks -------------------------------------------------------------------------------------------------------------

_biases: OrderedDict[tuple[int, torch.dtype, torch.device], Any] = OrderedDict()


def _as_bias(mask: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A plan's mask [s, n] as ``_bias`` on the query's device, made once for all layers."""
    key = (id(mask), query.dtype, query.device)
    found = _biases.get(key)
    if found is None or found[0] is not mask:
        found = (mask, *_bias(mask.to(query.device)[None, None], query.dtype))
        _biases[key] = found
        while len(_biases) > 64:
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
