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
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from . import compat
from .codecs import Codec, fit
from .families import ADD_MASKS
from .flash import attend_masked, attend_segments
from .masked import FED_TWICE, MaskedStates, View, check_width, needs_grad, refusals, undo_of, undoes
from .plan import Mask, Visible, causal, look, segments
from .store import map_state, narrow, repeat_rows

NAME = "kvcache"
BLOCK = 1 << 20  # float32 values that codes are cast to at a time: 4 MiB
ROWS = 1 << 22  # float32 scores at a time: 16 MiB
SMALL = 16  # queries that the Triton kernels take at most
# What models hand to any attention, and what does not change its result here: masks say the same.
HARMLESS = set("cache_position cu_seq_lens_k cu_seq_lens_q deterministic layer_idx max_length_k max_length_q".split())
HARMLESS |= set("num_items_in_batch output_attentions output_hidden_states output_router_logits position_ids".split())
HARMLESS |= set("return_dict seq_idx sliding_window use_cache".split())
KNOWN = {*HARMLESS, "position_bias"}


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

    def row(self, index: int, batch: int) -> Part:
        """One of ``batch`` rows."""
        at = index * self.keys[0].shape[0] // batch
        keys, values = (map_state(s, lambda t: t[at : at + 1]) for s in (self.keys, self.values))
        return Part(self.key_codec, keys, self.value_codec, values)

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
    rules: Callable[[], Visible] | None  # of the parts' slots; None: there is an observer, which is asked
    needed: bool  # False: without a mask, queries see all keys up to their own token
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    doubled: bool = False  # some tokens have two slots
    watch: bool = False  # somebody has to look at the mask
    pads: Callable[[], None] | None = None  # told of tokens that the mask hides from all queries
    moved: Moved | None = None
    window: tuple[int, int] | None = None  # (sinks, window), where tokens leave
    positions: torch.Tensor | None = None  # of the queries, where they are known
    columns: int | None = None  # that a mask may have beside those of all tokens; 0: any number
    observer: Any = None  # of importance eviction: gives the mask, and is told what attention saw
    batch: int | None = None  # rows; a part may hold fewer, each for several of them next to each other
    chunk: Any = None  # new tokens of which only the mask says which are pads (``padded.Chunk``)
    again: Callable[[torch.Tensor], History] | None = None  # store the one new token anew, now that some rows' are pads
    by_row: bool = False  # pads are not stored: rules without a mask are the rows' own
    real: torch.Tensor | None = None  # then: which tokens fed were no pads, [B, tokens] bool
    fed: int = 0  # tokens fed before
    queries: int = 0

    def decode(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Plain keys and values, [B, H, n, D]; views where nothing needs decoding. They carry their mask where a plain
        causal one is not enough, or has to be looked at."""
        return self.decode_side(0), self.decode_side(1)

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``decode`` without a mask."""
        return self._plain(0), self._plain(1)

    def decode_side(self, side: int) -> torch.Tensor:
        """The keys (0) or the values (1) of ``decode``."""
        return self.masked(self._plain(side), side)

    def _plain(self, side: int) -> torch.Tensor:
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
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)

    def masked(self, states: torch.Tensor, side: int) -> torch.Tensor:
        """Plain states that carry their mask."""
        carries = self.needed or (self.watch and side == 0)
        if not carries or self.rules is None or (side == 1 and not self.doubled):
            return states
        view = View(
            self.rules(), self.fed, self.needed, self.doubled, self.pads, self.window, self.positions, self.columns
        )
        return MaskedStates.wrap(states, view, ("keys", "values")[side])


class Stored:
    """Keys or values that are still encoded; any use other than our attention decodes them first."""

    def __init__(self, history: History, side: int) -> None:
        self.history, self._side = history, side
        self._plain: torch.Tensor | None = None
        self.undo: Callable[[], None] | None = None  # what is refused now has not happened

    def plain(self) -> torch.Tensor:
        """The dequantized tensor, [B, H, n, D]; keys carry their mask where a plain causal one is not enough."""
        if self._plain is None:
            chunk = self.history.chunk
            history = self.history if chunk is None else chunk.resolve(None)
            self._plain = history._replace(watch=history.pads is not None).decode_side(self._side)
            undoes(self._plain, self.undo)
        return self._plain

    def touched(self) -> torch.Tensor:
        """What a model gets that does something else with it than our attention: plain, but it looks for pads."""
        with refusals(self.undo):
            if self.history.observer is not None:
                self.history.observer.refuse_touch()
            return self.plain()

    @property
    def shape(self) -> torch.Size:
        history = self.history
        if history.chunk is not None:
            return history.chunk.shape(self._side)
        state = history.parts[0].keys if self._side == 0 else history.parts[0].values
        n = sum(part.tokens for part in history.parts)
        n = n if history.rules is None else min(n, history.fed + history.queries)
        return torch.Size((history.batch or state[0].shape[0], state[0].shape[1], n, state[0].shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.history.key_dtype if self._side == 0 else self.history.value_dtype

    @property
    def device(self) -> torch.device:
        chunk = self.history.chunk
        return self.history.parts[0].keys[0].device if chunk is None else chunk.keys.device

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


Rows = Callable[[int, int], torch.Tensor]  # the mask of queries start:stop, by slot


def attend(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attend_torch``, or for decode the compiled kernel (CPU) or the Triton kernels (CUDA) for what they can do.

    Same arguments, same result.
    """
    batch, query_heads, queries, _ = query.shape
    kept = 0 if mass is None or queries == 1 else query_heads * queries * mass[:, 0].numel()  # scores
    if not 0 < queries <= SMALL or kept > ROWS:
        return attend_torch(query, parts, scaling, mask, softcap, s_aux, mass)
    whole = [part.expand(batch) for part in parts]
    if query.device.type == "cpu" and all(part.keys[0].shape[0] == batch for part in whole):
        from . import cpu_decode

        out = cpu_decode.try_attend(query, whole, scaling, mask, softcap, s_aux, mass)
        if out is not None:
            return out
    if query.is_cuda and has_triton():
        from . import triton_decode

        if triton_decode.supports(query, whole, mask, softcap, s_aux):
            return triton_decode.attend_triton(query, whole, scaling, mask, softcap, s_aux, mass)
    return attend_torch(query, parts, scaling, mask, softcap, s_aux, mass)


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

    Raises:
        ValueError: an argument that is neither known nor in ``HARMLESS``, or one that cannot be honoured here.
    """
    run = (module, query, key, value, attention_mask, scaling, dropout, is_causal, softcap, s_aux)
    with full_precision(query.device), refusals(undo_of(key)):
        return _attend(*run, **kwargs)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    is_causal: bool | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    ordered = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    special = softcap is not None or s_aux is not None
    if not isinstance(key, Stored) or not isinstance(value, Stored) or dropout:
        key, value = _plain(key, query.dtype), _plain(value, query.dtype)
        queries, tokens = query.shape[2], key.shape[2]
        if attention_mask is not None and not isinstance(key, MaskedStates) and 1 != attention_mask.shape[-1] != tokens:
            raise ValueError(
                f"the attention mask has {attention_mask.shape[-1]} columns for {tokens} keys, of a layer that keeps "
                "no more (a native window): pass the 2-D mask of all tokens, or one mask for each layer type"
            )
        if attention_mask is None and ordered and 1 < queries < tokens:  # ``kvcache_mask`` leaves out what is causal
            own = isinstance(key, MaskedStates) and key.kind == "keys"
            columns = key.carried.visible.total if own else tokens  # slots may be more, or fewer
            attention_mask = causal(queries, columns).to(query.device).rows()
        if not special:
            return compat.sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
            )
        view = key.carried if isinstance(key, MaskedStates) else View(causal(queries, tokens), tokens - queries, False)
        if dropout:
            raise ValueError("dropout beside softcap or learned sinks is not supported: use eval()")
        if view.doubled:
            raise ValueError(
                "gradients through a residual of plain tokens beside softcap or learned sinks are not supported: use "
                "torch.no_grad() or storage 'full', 'int8' or 'fp8'"
            )
        from .codecs import CODECS, Plain

        key, value = (states.as_subclass(torch.Tensor) for states in (key, value))
        part = Part(CODECS["full"], Plain(key), CODECS["full"], Plain(value))
        history = History(
            [part], lambda: view.visible, view.needed, key.dtype, value.dtype, fed=view.fed, queries=queries,
            pads=view.pads,
        )  # fmt: skip
    else:
        unknown = [name for name, given in kwargs.items() if given is not None and name not in KNOWN]
        if unknown:
            raise ValueError(
                f"attention 'kvcache' does not know the argument {unknown[0]!r} that {type(module).__name__} hands "
                'over: leave it out, or call model.set_attn_implementation("sdpa")'
            )
        _check_width(key.history, attention_mask)
        history = key.history if key.history.chunk is None else key.history.chunk.resolve(attention_mask)
        if history.positions is None and history.window is not None:
            history = history._replace(positions=kwargs.get("position_ids"))
        if attention_mask is None and history.fed and query.shape[2] == history.queries:
            ordered = True  # ``kvcache_mask`` left out a causal mask, whatever the module says of itself (PaliGemma)
    bias = kwargs.pop("position_bias", None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if bias is not None:
        attention_mask = _with_bias(attention_mask, bias, history, query, ordered)
    if history.observer is not None:
        run = (module, query, history, attention_mask, scaling, softcap, s_aux)
        return _attend_observed(*run, **kwargs).transpose(1, 2).contiguous(), None
    history = _without_pads(history, attention_mask)
    queries, tokens = query.shape[2], sum(part.tokens for part in history.parts)
    alone = queries == tokens > 1 and not history.needed and not special and bias is None
    if alone and (ordered or attention_mask is not None):  # a prompt: everything is new
        keys, values = (side.to(query.dtype) for side in history.plain())
        return compat.sdpa_attention_forward(module, query, keys, values, attention_mask, 0.0, scaling, **kwargs)
    out = _attend_history(query, history, attention_mask, scaling, softcap, s_aux, ordered)
    return out.transpose(1, 2).contiguous(), None


def _check_width(history: History, mask: torch.Tensor | None) -> None:
    """Refuse a mask that speaks of other tokens than those there are, before anything is stored."""
    if mask is None:
        return
    chunk = history.chunk
    if chunk is not None:
        total, columns, new = chunk.fed + chunk.keys.shape[2], chunk.slots, chunk.keys.shape[2]
    else:
        total, new = history.fed + history.queries, history.queries
        columns = min(sum(part.tokens for part in history.parts), total)
    if history.columns != 0 or not new <= mask.shape[-1] <= total:
        check_width(mask, total, columns)


def _without_pads(history: History, mask: torch.Tensor | None) -> History:
    """Where new tokens that have slots turn out to be pads: rows are counted one by one, or it is refused in time."""
    if mask is None or history.by_row or (history.again is None and history.pads is None):
        return history
    real = look(mask, history.fed + history.queries).new(history.fed, history.queries)
    if real is None:
        return history
    if history.again is not None:
        return history.again(real)
    assert history.pads is not None
    history.pads()
    return history


def _with_bias(
    mask: torch.Tensor | None, bias: torch.Tensor, history: History, query: torch.Tensor, ordered: bool
) -> torch.Tensor:
    """A mask together with scores by position (T5), [B or 1, H, q, tokens]; both have tokens as columns."""
    if mask is None and ordered and query.shape[2] > 1:
        mask = causal(query.shape[2], history.fed + history.queries).to(query.device).rows()
    return _combine(mask, bias)


def _attend_history(
    query: torch.Tensor,
    history: History,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    ordered: bool,
) -> torch.Tensor:
    """Attention over what a layer holds, [B, Hq, q, Dv]; who sees what is the plan's business."""
    parts, queries = history.parts, query.shape[2]
    facts = None if mask is None else look(mask, history.fed + history.queries)
    if facts is None and not history.needed and (queries == 1 or not ordered):
        visible = None  # one query sees all there is
    else:
        assert history.rules is not None
        visible = history.rules().last(queries)
        if facts is not None and history.window is not None and not facts.padding:
            straight, visible = visible, visible.by_depth(history.positions, facts.mask, *history.window)
            if history.moved is not None and visible is not straight:
                history = history._replace(moved=history.moved._replace(query=visible.query.cpu()))
    turned = None
    if history.moved is not None:
        parts, turned = _move_sinks(query, parts, history.moved)
    if visible is None:
        return attend(query, parts, scaling, None, softcap, s_aux)
    written: Rows = partial(visible.rows, None if facts is None else facts.mask)
    if turned is not None or needs_grad(query, parts[0].keys[0], parts[0].values[0]):
        return attend_torch(query, parts, scaling, written, softcap, s_aux, turned=turned)
    if queries <= SMALL:
        seen = _seen_by_few(visible) if facts is None else written(0, queries)
        return attend(query, parts, scaling, seen, softcap, s_aux)
    if facts is not None and not _says_pads_alone(facts, history):
        return attend_masked(query, parts, written, scaling, softcap, s_aux)
    if visible.number.shape[0] == 1:
        return attend_segments(query, parts, segments(visible), scaling, softcap, s_aux)
    rows = [
        attend_segments(
            query[b : b + 1],
            [part.row(b, query.shape[0]) for part in parts],
            segments(visible.row(b)),
            scaling,
            softcap,
            s_aux,
        )  # fmt: skip
        for b in range(query.shape[0])
    ]
    return torch.cat(rows)


def _says_pads_alone(facts: Mask, history: History) -> bool:
    """Whether a mask says no more than that attention is causal, and which tokens are pads: those not stored."""
    if history.real is None or not facts.pads:
        return False
    columns = min(facts.real.shape[-1], history.real.shape[-1])
    mine, theirs = history.real[:, -columns:], facts.real[:, :columns].to(history.real.device)
    return torch.equal(mine, theirs.expand_as(mine))


_few: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []


def _seen_by_few(visible: Visible) -> torch.Tensor:
    """``visible.rows()``, once for all layers that share the rules of this forward."""
    for number, query, seen in _few:
        if number is visible.number and len(query) == len(visible.query) and torch.equal(query, visible.query):
            return seen
    seen = visible.rows()
    _few.insert(0, (visible.number, visible.query, seen))
    del _few[2:]
    return seen


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
    keys = moved.rope.turn(keys, (-deltas).expand(*deltas.shape[:-1], moved.sinks))
    full = type(sinks.keys)(fit(keys, query.dtype))
    return [sinks._replace(keys=full), *parts[1:]], None


def _attend_observed(
    module: torch.nn.Module,
    query: torch.Tensor,
    history: History,
    attention_mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention under importance eviction: the layer says who sees what, and is told afterwards what was looked at."""
    queries, parts, observer = query.shape[2], history.parts, history.observer
    facts = None if attention_mask is None else look(attention_mask, history.fed + history.queries)
    mask: Rows | None = observer.mask(facts, queries)
    first, observed = observer.first_observed(facts, queries)
    mass, tokens = None, sum(part.tokens for part in parts)
    written: Rows = mask or (lambda a, b: causal(queries, tokens).to(query.device).rows_of(a, b))
    if first is not None:
        mass = query.new_zeros(query.shape[0], parts[-1].keys[0].shape[1], tokens, dtype=torch.float32)
    with torch.no_grad(), full_precision(query.device):
        at_once = first == 0 and observed is None
        if at_once and queries > SMALL:
            out = attend_torch(query, parts, scaling, written, softcap, s_aux, mass=mass)
        elif not at_once and queries == tokens > 1 and not history.fed and softcap is None and s_aux is None:
            keys, values = (side.to(query.dtype) for side in history.plain())
            own = None if mask is None else attention_mask
            run = (module, query, keys, values, own, 0.0, scaling)
            out = compat.sdpa_attention_forward(*run, is_causal=True, **kwargs)[0].transpose(1, 2)
        elif queries <= SMALL:
            few = None if mask is None and queries == 1 else written(0, queries)
            out = attend(query, parts, scaling, few, softcap, s_aux, mass if at_once else None)
        elif mask is None:
            out = attend_segments(query, parts, segments(causal(queries, tokens)), scaling, softcap, s_aux)
        else:
            out = attend_masked(query, [part.whole() for part in parts], mask, scaling, softcap, s_aux)
        if mass is not None and not at_once:
            shift: Rows = lambda a, b: _observed(written(first + a, first + b), observed, first + a, first + b)  # noqa: E731
            add_mass(mass, query[:, :, first:], parts, scaling, shift, softcap, s_aux)
        observer.observe(getattr(module, "layer_idx", None), query, mass, facts, scaling)
    return out


def _observed(seen: torch.Tensor, observed: torch.Tensor | None, start: int, stop: int) -> torch.Tensor:
    """The mask of some queries, of which only those ``observed`` [B, 1, q, 1] look."""
    if observed is None:
        return seen
    some = observed[..., start:stop, :]
    return seen & some if seen.dtype == torch.bool else seen.masked_fill(~some, float("-inf"))


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
    known = isinstance(q_offset, int) and isinstance(kv_offset, int)
    ordered = not kwargs.get("allow_is_bidirectional_skip") and compat.is_causal_mask(kwargs.get("mask_function"))
    if attention_mask is not None and attention_mask.dim() == 2 and known and q_offset and ordered:
        if attention_mask.shape[-1] < q_offset + q_length and kv_length + kv_offset <= q_offset + q_length:
            raise ValueError(FED_TWICE)
    additive = getattr(kwargs.get("config"), "model_type", "") in ADD_MASKS
    plain = known and not additive and compat.is_plain_causal(kwargs)
    if plain and kv_length + kv_offset == q_offset + q_length:
        # What is causal needs no mask: attention finds out by itself who is new.
        if attention_mask is None or bool(attention_mask[:, kv_offset : kv_offset + kv_length].all()):
            if attention_mask is None or attention_mask.shape[-1] >= kv_offset + kv_length:
                return None
    if known and q_offset and kwargs.get("allow_is_bidirectional_skip"):
        kwargs["allow_is_bidirectional_skip"] = False  # beside what is cached, no mask means a causal one
    make: Callable[..., Any] = compat.eager_mask if additive else compat.sdpa_mask
    mask = make(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask, **kwargs)
    if mask is not None:
        mask.from_padding = True  # whom it hides is a pad (``plan.look``)
    return mask


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
