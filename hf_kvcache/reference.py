"""What is attention over stored parts? By definition, and from the codes with bounded workspace.

    attend_reference   decode everything, float32, one line of mathematics: what the others are tested against
    attend_torch       any device, gradients, any mask; ``BLOCK`` values of codes and ``ROWS`` scores at a time

Query heads that share a KV head are rows of one matrix product, so keys and values are never repeated. Codes are cast
block by block into float32; no float copy of the history exists. Softmax and accumulation are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .codecs import fit
from .part import Part, repeat_rows

BLOCK = 1 << 20  # float32 values that codes are cast to at a time: 4 MiB
ROWS = 1 << 22  # float32 scores at a time: 16 MiB

Rows = Callable[[int, int], torch.Tensor]  # the mask of queries start:stop, by slot


def attend_reference(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by definition, in float32 over decoded keys and values.

    Args:
        query: [B, Hq, Q, Dk], any float dtype.
        parts: tokens in any order; H divides Hq. A part may hold fewer rows than B, each for B / b rows in a row.
        mask: bool (True: may attend) or additive float, broadcastable to [B, Hq, Q, n]; ``None``: no mask.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).
        s_aux: [Hq] learned logits that take part in the softmax and have no value (gpt-oss).

    Returns:
        [B, Hq, Q, Dv] in the query's dtype; a query that may attend to nothing gets zeros.
    """
    batch, groups = query.shape[0], query.shape[1] // parts[0].keys[0].shape[1]
    keys = torch.cat([repeat_rows(p.key_codec.decode(p.keys, torch.float32), batch) for p in parts], 2)
    values = torch.cat([repeat_rows(p.value_codec.decode(p.values, torch.float32), batch) for p in parts], 2)
    scores = query.float() @ keys.repeat_interleave(groups, 1).transpose(-1, -2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if s_aux is not None:
        column = s_aux.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    probs = torch.softmax(scores, -1).nan_to_num(0.0)[..., : keys.shape[2]]
    return _narrow(probs @ values.repeat_interleave(groups, 1), query.dtype, parts)


def attend_torch(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: torch.Tensor | Rows | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    turned: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attend_reference`` from the codes, with bounded workspace. Same arguments, same result.

    ``mask`` may also be a function that writes it out for the queries at work. To ``mass`` [B, H, n] float32 the
    attention that each key gets is added: summed over queries, averaged over the heads of a KV head. ``turned`` are the
    queries as the first part sees them.
    """
    batch, query_heads, queries, _ = query.shape
    if not queries:
        return query.new_empty(batch, query_heads, 0, parts[0].values[0].shape[-1])
    tokens = sum(part.tokens for part in parts)
    rows = max(1, ROWS // max(batch * query_heads * tokens, 1))
    out = []
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        some, other = _some(mask, start, stop), None if turned is None else turned[:, :, start:stop]
        out.append(_attend_rows(query[:, :, start:stop], parts, scaling, some, softcap, s_aux, mass, other))
    return out[0] if len(out) == 1 else torch.cat(out, 2)


def _some(mask: torch.Tensor | Rows | None, start: int, stop: int) -> torch.Tensor | None:
    """The mask of queries ``start:stop``."""
    if callable(mask):
        return mask(start, stop)
    return mask[..., start:stop, :] if mask is not None and mask.shape[-2] > 1 else mask


def _attend_rows(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: torch.Tensor | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    mass: torch.Tensor | None = None,
    turned: torch.Tensor | None = None,
) -> torch.Tensor:
    blocks = [block for part in parts for block in _blocks(part)]
    probs = _probabilities(query, blocks, scaling, mask, softcap, s_aux, turned)  # [B, H, G*Q, n]
    if mass is not None:
        mass += probs.sum(2) * (probs.shape[1] / query.shape[1])
    out: torch.Tensor | None = None
    start = 0
    for block in blocks:
        mixed = _per_row(block.value_codec.mix, probs[..., start : start + block.tokens], block.values)
        out = mixed if out is None else out.add_(mixed)
        start += block.tokens
    assert out is not None
    return _narrow(out.view(*query.shape[:3], -1), query.dtype, parts)


def _narrow(out: torch.Tensor, dtype: torch.dtype, parts: list[Part]) -> torch.Tensor:
    """A mean of values, float32, as ``dtype``: rounded values may lie beyond what they were rounded from."""
    return out.to(dtype) if all(part.value_codec.lossless for part in parts) else fit(out, dtype)


def add_mass(
    mass: torch.Tensor,
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: Rows,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> None:
    """To ``mass`` [B, H, n] float32 the attention that each key gets from these queries, as in ``attend_torch``."""
    blocks = [block for part in parts for block in _blocks(part)]
    rows = max(1, ROWS // max(query.shape[0] * query.shape[1] * mass.shape[-1], 1))
    for start in range(0, query.shape[2], rows):
        stop = min(start + rows, query.shape[2])
        some = mask(start, stop)
        probs = _probabilities(query[:, :, start:stop], blocks, scaling, some, softcap, s_aux)
        mass += probs.sum(2) * (probs.shape[1] / query.shape[1])


def _probabilities(
    query: torch.Tensor,
    blocks: list[Part],
    scaling: float,
    mask: torch.Tensor | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    turned: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, H, G * Q, n] float32."""
    batch, query_heads, queries, width = query.shape
    heads = blocks[0].keys[0].shape[1]
    groups = query_heads // heads
    rows: list[Any] = [
        None if q is None else (q.float() * scaling).reshape(batch, heads, groups * queries, width)  # [B, H, G*Q, Dk]
        for q in (query, turned)
    ]
    folded = [rows[0]] * len(blocks) if turned is None else [rows[1], *[rows[0]] * (len(blocks) - 1)]
    pieces = [_per_row(block.key_codec.scores, q, block.keys) for q, block in zip(folded, blocks, strict=True)]
    scores = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)  # [B, H, G*Q, n]
    train = torch.is_grad_enabled() and (scores.requires_grad or (s_aux is not None and s_aux.requires_grad))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap if train else scores.div_(softcap).tanh_().mul_(softcap)
    by_head = scores.view(batch, heads, groups, queries, -1)
    hidden = None
    if mask is not None:
        # one for all heads, one per KV head, or one per query head
        mask = mask.unsqueeze(2) if mask.shape[1] in (1, heads) else mask.unflatten(1, (heads, groups))
        if mask.dtype == torch.bool:
            by_head.masked_fill_(~mask, float("-inf"))
        else:
            by_head.add_(mask)
        hidden = by_head.amax(-1, keepdim=True) == float("-inf")
    if s_aux is not None:
        aux = s_aux.float().view(1, heads, groups, 1, 1)
        peak = torch.maximum(by_head.amax(-1, keepdim=True), aux).detach()  # any shift gives the same
        by_head = by_head.sub_(peak).exp_()
        total = by_head.sum(-1, keepdim=True) + (aux - peak).exp()
        probs = by_head / total if train else by_head.div_(total)
    else:
        probs = torch.softmax(by_head, -1)
    if hidden is not None:
        probs = probs.masked_fill(hidden, 0.0) if train else probs.masked_fill_(hidden, 0.0)
    return probs.view_as(scores)


def _per_row(fold: Callable[[torch.Tensor, Any], torch.Tensor], x: torch.Tensor, state: Any) -> torch.Tensor:
    """``fold`` of x [B, H, M, *] with a state of b rows that stand for B: the rows that share one are more of its M.

    So a prefix that many rows share is read and cast once, not once for each of them.
    """
    batch, rows, held = x.shape[0], x.shape[2], state[0].shape[0]
    if held == batch:
        return fold(x, state)
    shared = x.unflatten(0, (held, -1)).transpose(1, 2).flatten(2, 3)  # [b, H, B / b * M, *]
    return fold(shared, state).unflatten(2, (-1, rows)).transpose(1, 2).flatten(0, 1).contiguous()


def _blocks(part: Part) -> list[Part]:
    """Runs of equal length, each small enough to be cast to float32; a run that needs no cast stays whole.

    A long run is cut at least once, so that no float copy of the history exists.
    """
    if part.keys[0].dtype == part.values[0].dtype == torch.float32:
        return [part.whole()]
    tokens, group, shape = part.tokens, part.group, part.keys[0].shape
    count = max(-(-shape[0] * shape[1] * tokens * shape[-1] // BLOCK), 2 if tokens > 1024 else 1)
    if count == 1:
        return [part.whole()]
    size = max(-(-tokens // (count * group)), 1) * group
    return [part.block(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size)]
