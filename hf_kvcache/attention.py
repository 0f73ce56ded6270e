"""How does attention read what is stored? From the codes, with the scales folded in.

``update`` hands out a pair of ``Stored`` handles instead of dequantized tensors; the attention function registered as
"kvcache" takes them apart into *parts* (runs of tokens, each with its codecs) and joins the parts in one softmax:

    s_j = scaling * q . k_j   (per part, from the codes)       p = softmax over all parts      o = sum_j p_j v_j

Query heads that share a KV head are rows of one matrix product, so keys and values are never repeated. Codes are cast
block by block into float32; no float copy of the history exists. Softmax and accumulation are float32.

    attend_reference   decode everything, float32, one line of mathematics: what the others are tested against
    attend_compiled    CPU, decode: see ``cpu_decode``
    attend_triton      CUDA, decode: see ``triton_decode``
    attend_torch       any device; workspace bounded by BLOCK values of codes and ROWS of scores

A model that does anything else with a handle (expands latents, casts, slices) gets the dequantized tensor: a handle
turns into it at the first touch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from . import compat
from .codecs import Codec
from .families import ADD_MASKS
from .masked import FED_TWICE, PADDED, MaskedStates, Visible, allowed, watched
from .store import map_state, narrow, repeat_rows

NAME = "kvcache"
BLOCK = 1 << 20  # float32 values that codes are cast to at a time: 4 MiB
ROWS = 1 << 22  # float32 scores at a time: 16 MiB
SMALL = 16  # queries that the Triton kernels take at most


class Part(NamedTuple):
    """A run of tokens: keys [B, H, n, Dk] and values [B, H, n, Dv] as their codecs store them."""

    key_codec: Codec
    keys: Any
    value_codec: Codec
    values: Any
    # Where heads hold different numbers of tokens (``slots.RaggedPart``): each head's first row and its rows, [B, H].
    starts: torch.Tensor | None = None
    sizes: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[2] * self.key_codec.group

    @property
    def group(self) -> int:
        """Tokens that cannot be told apart by slicing."""
        return max(self.key_codec.group, self.value_codec.group)

    def whole(self) -> Part:
        """All tokens, dense."""
        return self

    def block(self, start: int, stop: int) -> Part:
        """Tokens ``start:stop``, whole groups, as views."""
        k, v = self.key_codec.group, self.value_codec.group
        keys, values = narrow(self.keys, start // k, stop // k), narrow(self.values, start // v, stop // v)
        return Part(self.key_codec, keys, self.value_codec, values)

    def expand(self, batch: int) -> Part:
        """One row that stands for all of a batch, as a view of them all; anything else as it is."""
        if self.keys[0].shape[0] != 1 or batch == 1:
            return self
        keys, values = (map_state(s, lambda t: t.expand(batch, *t.shape[1:])) for s in (self.keys, self.values))
        return Part(self.key_codec, keys, self.value_codec, values)


class Moved(NamedTuple):
    """The first slots are ``sinks``, which queries beyond ``edge`` see as if they stood at ``edge`` (``rope.py``)."""

    sinks: int
    edge: int
    query: int | torch.Tensor  # token number of the first query; or of all of them, [B, Q], where rows differ
    queries: int
    rope: Any

    def deltas(self, queries: int, device: torch.device) -> torch.Tensor | None:
        """How far each of the last ``queries`` queries is to be turned, [Q] or [B, Q], all <= 0; ``None``: none is."""
        p = self.query if isinstance(self.query, torch.Tensor) else torch.arange(self.query, self.query + self.queries)
        p = p[..., p.shape[-1] - queries :]
        return (p.clamp_max(self.edge) - p).to(device) if queries and int(p.max()) > self.edge else None


class History(NamedTuple):
    """What one ``update`` returns, in stored form: the parts, and which of their keys each query may attend to."""

    parts: list[Part]
    visible: Visible | None  # None: all keys, up to the query's own token
    evicts: bool
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    moved: Moved | None = None
    observer: Any = None  # of importance eviction: gives the mask, and is told what attention saw
    batch: int | None = None  # rows; a part may hold fewer, each for several of them next to each other
    chunk: Any = None  # new tokens of which only the mask says which are pads (``padded.Chunk``)
    query: int = 0  # token number of the first query
    queries: int = 0

    def decode(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Plain keys and values, [B, H, n, D]; views where nothing needs decoding."""
        return self.decode_side(0), self.decode_side(1)

    def decode_side(self, side: int) -> torch.Tensor:
        """The keys (0) or the values (1) of ``decode``."""
        if self.moved is not None:
            raise ValueError(
                "reposition=True turns queries, so keys have to reach attention as they are: use eval() (no dropout), "
                "or leave out reposition"
            )
        if side == 0:
            pieces = [part.key_codec.decode(part.keys, self.key_dtype) for part in self.parts]
        else:
            pieces = [part.value_codec.decode(part.values, self.value_dtype) for part in self.parts]
        pieces = [repeat_rows(piece, self.batch or piece.shape[0]) for piece in pieces]
        return self.masked(pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2), side)

    def masked(self, states: torch.Tensor, side: int) -> torch.Tensor:
        """Plain states that carry their mask where a plain causal one is not enough."""
        if self.visible is None or (side == 1 and not self.visible.doubled):
            return states
        return MaskedStates.wrap(states, self.visible, ("keys", "values")[side])


class Stored:
    """Keys or values that are still encoded; any use other than our attention decodes them first."""

    def __init__(self, history: History, side: int) -> None:
        self.history, self._side = history, side
        self._plain: torch.Tensor | None = None
        self._touched: torch.Tensor | None = None

    def plain(self) -> torch.Tensor:
        """The dequantized tensor, [B, H, n, D]; keys carry their mask where a plain causal one is not enough."""
        if self._plain is None:
            chunk = self.history.chunk
            history = self.history if chunk is None else chunk.resolve(None)
            self._plain = history.decode_side(self._side)
        return self._plain

    def touched(self) -> torch.Tensor:
        """What a model gets that does something else with it than our attention: plain, but it looks for pads."""
        if self._touched is None:
            history, plain = self.history, self.plain()
            if history.observer is not None:
                history.observer.refuse_touch()
            if history.evicts and history.visible is None and self._side == 0:
                plain = watched(plain, history.query, history.queries, evicts=True)
            self._touched = plain
        return self._touched

    @property
    def shape(self) -> torch.Size:
        part = self.history.parts[0]
        state = part.keys if self._side == 0 else part.values
        n = self.history.chunk.tokens if self.history.chunk else sum(part.tokens for part in self.history.parts)
        batch = self.history.batch or state[0].shape[0]
        return torch.Size((batch, state[0].shape[1], n, state[0].shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.history.key_dtype if self._side == 0 else self.history.value_dtype

    @property
    def device(self) -> torch.device:
        return self.history.parts[0].keys[0].device

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself where this changes nothing: layers that share keys bring them to their device first."""
        out = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        same = (out.dtype, out.device) == (self.dtype, self.device)
        return self if same else self.touched().to(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.touched(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.touched()[index]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(plain, value))
            return value.touched() if isinstance(value, Stored) else value

        return func(*map(plain, args), **{k: plain(v) for k, v in (kwargs or {}).items()})


@lru_cache
def has_triton() -> bool:
    """Whether the Triton kernels can be imported; looked up once."""
    return importlib.util.find_spec("triton") is not None


def attend(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    visible: Visible | None = None,
) -> torch.Tensor:
    """``attend_torch``, or for decode the compiled kernel (CPU) or the Triton kernels (CUDA) for what they can do.

    Same arguments, same result.
    """
    batch = query.shape[0]
    if not 0 < query.shape[2] <= SMALL:
        return attend_torch(query, parts, scaling, mask, softcap, s_aux, visible)
    whole = [part.expand(batch) for part in parts]
    joined = mask if visible is None else _combine(mask, visible.rows())
    if query.device.type == "cpu" and all(part.keys[0].shape[0] == batch for part in whole):
        from . import cpu_decode

        out = cpu_decode.try_attend(query, whole, scaling, joined, softcap, s_aux)
        if out is not None:
            return out
    if query.is_cuda and has_triton():
        from . import triton_decode

        if triton_decode.supports(query, whole, joined, softcap, s_aux):
            return triton_decode.attend_triton(query, whole, scaling, joined, softcap, s_aux)
    return attend_torch(query, parts, scaling, mask, softcap, s_aux, visible)


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
    return (probs @ values.repeat_interleave(groups, 1)).to(query.dtype)


def attend_torch(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    visible: Visible | None = None,
    mass: torch.Tensor | None = None,
    turned: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attend_reference`` from the codes, with bounded workspace. Same arguments, same result.

    ``visible`` is a mask beside ``mask`` that is only written out for the queries at work. To ``mass`` [B, H, n]
    float32 the attention that each key gets is added: summed over queries, averaged over the heads of a KV head.
    ``turned`` are the queries as the first part sees them.
    """
    batch, query_heads, queries, _ = query.shape
    if not queries:
        return query.new_empty(batch, query_heads, 0, parts[0].values[0].shape[-1])
    tokens = sum(part.tokens for part in parts)
    rows = max(1, ROWS // max(batch * query_heads * tokens, 1))
    out = []
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        some = mask[..., start:stop, :] if mask is not None and mask.shape[-2] > 1 else mask
        if visible is not None:
            some = _combine(some, visible.rows(start, stop))
        other = None if turned is None else turned[:, :, start:stop]
        out.append(_attend_rows(query[:, :, start:stop], parts, scaling, some, softcap, s_aux, mass, other))
    return out[0] if len(out) == 1 else torch.cat(out, 2)


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
    return out.view(*query.shape[:3], -1).to(query.dtype)


def add_mass(
    mass: torch.Tensor,
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> None:
    """To ``mass`` [B, H, n] float32 the attention that each key gets from these queries, as in ``attend_torch``."""
    blocks = [block for part in parts for block in _blocks(part)]
    rows = max(1, ROWS // max(query.shape[0] * query.shape[1] * mass.shape[-1], 1))
    for start in range(0, query.shape[2], rows):
        stop = min(start + rows, query.shape[2])
        some = mask[..., start:stop, :] if mask is not None and mask.shape[-2] > 1 else mask
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
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
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
        peak = torch.maximum(by_head.amax(-1, keepdim=True), aux)
        by_head = by_head.sub_(peak).exp_()
        probs = by_head.div_(by_head.sum(-1, keepdim=True) + (aux - peak).exp())
    else:
        probs = torch.softmax(by_head, -1)
    if hidden is not None:
        probs = probs.masked_fill_(hidden, 0.0)
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


def kvcache_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function behind ``set_attn_implementation("kvcache")``.

    Args:
        query: [B, Hq, Q, Dk].
        key, value: the handles that ``update`` returned, or plain tensors [B, H, n, D].

    Returns:
        ([B, Q, Hq, Dv], None): attention weights are not kept.
    """
    if _autocasts(query.device):
        with full_precision(query.device):
            return kvcache_attention(
                module, query, key, value, attention_mask, scaling, dropout, is_causal, softcap, s_aux, **kwargs
            )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    special = softcap is not None or s_aux is not None
    if not isinstance(key, Stored) or not isinstance(value, Stored) or dropout:
        key, value = _plain(key, query.dtype), _plain(value, query.dtype)
        if not special:
            return compat.sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
            )
        if isinstance(key, MaskedStates) or dropout:
            raise ValueError("dropout and windowed keys beside softcap or learned sinks are not supported: use eval()")
        from .codecs import CODECS, Plain

        parts, visible = [Part(CODECS["full"], Plain(key), CODECS["full"], Plain(value))], None
    else:
        history = key.history if key.history.chunk is None else key.history.chunk.resolve(attention_mask)
        blind = history.evicts and history.visible is None and history.observer is None
        if blind and attention_mask is not None and _has_pads(attention_mask):
            raise ValueError(PADDED)
        parts, visible = history.parts, history.visible
    bias, queries, tokens = kwargs.get("position_bias"), query.shape[2], sum(part.tokens for part in parts)
    if bias is not None:
        if visible is not None:
            raise ValueError(
                "position_bias (relative positions) with a window or low bits is not supported: use 'full' or 'int8'"
            )
        if attention_mask is None and causal and queries > 1:
            attention_mask = _causal(queries, tokens, query.device)
        attention_mask = _combine(attention_mask, bias)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(key, Stored) and key.history.observer is not None:
        run = (module, query, key, value, attention_mask, scaling, softcap, s_aux)
        return _attend_observed(*run, **kwargs).transpose(1, 2).contiguous(), None
    mask = attention_mask
    if visible is not None:
        visible = visible.of_last(queries).looking(mask)
        mask = None if mask is None else visible.by_slot(mask)
    elif queries > 1 and (causal or mask is not None):
        if queries == tokens and not special and bias is None:  # a prompt: everything is new
            plain_key, plain_value = _plain(key, query.dtype), _plain(value, query.dtype)
            return compat.sdpa_attention_forward(module, query, plain_key, plain_value, mask, 0.0, scaling, **kwargs)
        mask = _causal(queries, tokens, query.device) if mask is None else mask
    moved, turned = history.moved if isinstance(key, Stored) else None, None
    if moved is not None:
        parts, turned = _move_sinks(query, parts, moved)
    if turned is None:
        out = attend(query, parts, scaling, mask, softcap, s_aux, visible)
    else:
        out = attend_torch(query, parts, scaling, mask, softcap, s_aux, visible, turned=turned)
    return out.transpose(1, 2).contiguous(), None


def _move_sinks(query: torch.Tensor, parts: list[Part], moved: Moved) -> tuple[list[Part], torch.Tensor | None]:
    """The sinks as a part of their own, first; and the queries turned for them.

    One query needs no turned copy of itself: its few sinks are turned the other way instead, for any backend.
    """
    first, deltas = parts[0], moved.deltas(query.shape[2], query.device)
    if deltas is None:
        return parts, None
    sinks, rest = first.block(0, moved.sinks), first.block(moved.sinks, first.tokens)
    parts = [sinks, *([rest] if rest.tokens else []), *parts[1:]]
    if query.shape[2] > 1:
        return parts, moved.rope.turn(query.float(), deltas)
    keys = sinks.key_codec.decode(sinks.keys, torch.float32)
    keys = moved.rope.turn(keys, (-deltas).expand(*deltas.shape[:-1], moved.sinks)).to(query.dtype)
    full = type(sinks.keys)(keys)
    return [sinks._replace(keys=full), *parts[1:]], None


def _attend_observed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Stored,
    value: Stored,
    attention_mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention under importance eviction: the layer says who sees what, and is told afterwards what was looked at."""
    history, queries = key.history, query.shape[2]
    parts, observer = history.parts, history.observer
    mask = observer.mask(attention_mask, queries)
    first, observed = observer.first_observed(attention_mask, queries)
    mass, tokens = None, sum(part.tokens for part in parts)
    if first is not None:
        mass = query.new_zeros(query.shape[0], parts[-1].keys[0].shape[1], tokens, dtype=torch.float32)
    with torch.no_grad(), full_precision(query.device):
        at_once = first == 0 and observed is None
        if at_once:
            seen = _causal(queries, tokens, query.device) if mask is None and queries > 1 else mask
            out = attend_torch(query, parts, scaling, seen, softcap, s_aux, mass=mass)
        elif queries == tokens > 1 and softcap is None and s_aux is None:
            plain = _plain(key, query.dtype), _plain(value, query.dtype)
            out = compat.sdpa_attention_forward(module, query, *plain, mask, 0.0, scaling, is_causal=True, **kwargs)[0]
            out = out.transpose(1, 2)
        else:
            seen = _causal(queries, tokens, query.device) if mask is None and queries > 1 else mask
            out = attend(query, parts, scaling, seen, softcap, s_aux)
        if mass is not None and not at_once:
            rows = _causal(queries, tokens, query.device) if mask is None else mask
            rows = (rows if observed is None else rows & observed)[..., first:, :]
            add_mass(mass, query[:, :, first:], parts, scaling, rows, softcap, s_aux)
        observer.observe(getattr(module, "layer_idx", None), query, mass, attention_mask, scaling)
    return out


def _causal(queries: int, tokens: int, device: torch.device) -> torch.Tensor:
    """[1, 1, q, n] bool: the last of n tokens are the queries' own."""
    return torch.ones(queries, tokens, dtype=torch.bool, device=device).tril(tokens - queries)[None, None]


def kvcache_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask function behind "kvcache": what sdpa gets, after a look at the padding mask.

    Raises:
        ValueError: the padding mask does not cover the new tokens (a prompt that is already cached is fed again).
    """
    if attention_mask is not None and attention_mask.dim() == 2 and isinstance(q_offset, int):
        if attention_mask.shape[-1] < q_offset + q_length and kv_length <= q_offset + q_length:
            raise ValueError(FED_TWICE)
    additive = getattr(kwargs.get("config"), "model_type", "") in ADD_MASKS
    make: Callable[..., Any] = compat.eager_mask if additive else compat.sdpa_mask
    return make(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask, **kwargs)


def register(compiled: bool | None = None) -> None:
    """Make "kvcache" known to transformers: ``model.set_attn_implementation("kvcache")`` works from then on.

    Idempotent. Nothing else of transformers is touched, and importing this package does not call it.

    Args:
        compiled: whether decode on a CPU uses the compiled kernel where it is built (``cpu_decode.status()`` says);
            ``None`` leaves it as it is: on, unless ``HF_KVCACHE_COMPILED=0`` is in the environment.
    """
    if compiled is not None:
        from . import cpu_decode

        cpu_decode.use(compiled)
    compat.AttentionInterface.register(NAME, kvcache_attention)
    compat.AttentionMaskInterface.register(NAME, kvcache_mask)


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast off: codes and scores need the precision they are computed in."""
    return torch.autocast(device.type, enabled=False) if _autocasts(device) else nullcontext()


def _autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def _plain(states: Any, dtype: torch.dtype) -> torch.Tensor:
    """Plain tensors in the query's dtype, to which autocast would bring them."""
    return (states.plain() if isinstance(states, Stored) else states).to(dtype)


def _has_pads(mask: torch.Tensor) -> bool:
    """Whether a mask hides a token from the last query."""
    return not bool(allowed(mask[..., -1, :]).all())


def _combine(mask: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Two masks as one: bool and bool stay bool, anything additive becomes additive."""
    if mask is None:
        return other
    if mask.dtype == other.dtype == torch.bool:
        return mask & other
    as_bias: Callable[[torch.Tensor], torch.Tensor] = lambda m: (  # noqa: E731
        torch.zeros(m.shape, device=m.device).masked_fill(~m, float("-inf")) if m.dtype == torch.bool else m
    )
    return as_bias(mask) + as_bias(other)
