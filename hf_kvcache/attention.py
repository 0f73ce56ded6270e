"""How does attention read what is stored? From the codes, with the scales folded in.

``update`` hands out a pair of ``Stored`` handles instead of dequantized tensors (``view``); the attention function
registered as "kvcache" takes them apart into *parts* (runs of tokens, each with its codecs) and joins the parts in one
softmax:

    s_j = scaling * q . k_j   (per part, from the codes)       p = softmax over all parts      o = sum_j p_j v_j

    attend_compiled    CPU, decode: see ``cpu_decode``
    attend_triton      CUDA, decode: see ``triton_decode``
    attend_segments    prefill: see ``flash``
    attend_torch       anything else, on any device: see ``reference``
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch

from . import compat, cpu_decode, reference
from .codecs import fit
from .families import ADD_MASKS
from .flash import attend_masked, attend_segments
from .masked import FED_TWICE, MaskedStates, View, check_width, needs_grad, refusals, undo_of
from .part import Part
from .plan import Mask, Visible, causal, look, segments
from .reference import Rows, add_mass, attend_torch
from .view import History, Moved, Stored

NAME = "kvcache"
SMALL = 16  # queries that the Triton kernels take at most
# What models hand to any attention, and what does not change its result here: masks say the same.
HARMLESS = set("cache_position cu_seq_lens_k cu_seq_lens_q deterministic layer_idx max_length_k max_length_q".split())
HARMLESS |= set("num_items_in_batch output_attentions output_hidden_states output_router_logits position_ids".split())
HARMLESS |= set("return_dict seq_idx sliding_window use_cache".split())
HARMLESS |= set("ignore_index shift_labels".split())  # of the loss
KNOWN = {*HARMLESS, "position_bias"}


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
    mass: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attend_torch``, or for decode the compiled kernel (CPU) or the Triton kernels (CUDA) for what they can do.

    Same arguments, same result.
    """
    batch, query_heads, queries, _ = query.shape
    kept = 0 if mass is None or queries == 1 else query_heads * queries * mass[:, 0].numel()  # scores
    if not 0 < queries <= SMALL or kept > reference.ROWS:
        return attend_torch(query, parts, scaling, mask, softcap, s_aux, mass)
    whole = [part.expand(batch) for part in parts]
    if query.device.type == "cpu" and all(part.keys[0].shape[0] == batch for part in whole):
        out = cpu_decode.try_attend(query, whole, scaling, mask, softcap, s_aux, mass)
        if out is not None:
            return out
    if query.is_cuda and has_triton():
        from . import triton_decode

        if triton_decode.supports(query, whole, mask, softcap, s_aux):
            return triton_decode.attend_triton(query, whole, scaling, mask, softcap, s_aux, mass)
    return attend_torch(query, parts, scaling, mask, softcap, s_aux, mass)


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
        made_for = getattr(key, "made_for", NAME)
        if made_for != NAME:
            warnings.warn(
                f'attention "kvcache" gets decoded tensors: the config that the cache was made from says {made_for!r}. '
                "Make it from the model's own config, KVCache.from_spec(model.config, ...)",
                stacklevel=2,
            )
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
