"""How does a window get through stock attention? Keys that bring their own mask.

transformers builds one causal mask from two numbers, a key length and an offset. That cannot say that, inside one
chunk of queries, each query has its own window, or that a token is plain for one query and encoded for the next. Where
a chunk needs that, ``update`` hands out its keys as ``MaskedStates``: a tensor that behaves as any other, except that
the place where it turns into scores applies the missing part of the mask.

    sdpa    scaled_dot_product_attention(q, K, v, mask)   ->  mask & visible
    eager   softmax(q @ K^T * scale + mask)               ->  hidden scores are -inf before the softmax

Where tokens have two slots, values come wrapped too: with an empty cache and no mask, the stock sdpa function takes
keys beyond the number of queries for unused slots of a static cache and cuts them off; ``MaskedStates`` do not let it.

A decode step needs none of this (one query sees all that is held) and gets plain tensors.

A model may turn what it gets into other keys first (latents of MLA). Their mask cannot follow, which is refused where
one is needed; where none is, the states go on as "watch" and "glance": they change nothing, but look at the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

KEEPS_STATES = set("__getitem__ expand reshape view transpose permute contiguous unsqueeze flatten to float".split())
KEEPS_STATES |= set("half bfloat16 repeat_interleave __get__ repeat clone detach unflatten swapaxes movedim".split())
# What a model does to keys that are not keys yet (latents): the mask cannot follow.
BREAKS_KEYS = set("linear split split_with_sizes chunk tensor_split cat concat stack einsum".split())
MAKES_SCORES = set("matmul __matmul__ bmm baddbmm".split())
KEEPS_SCORES = set("mul __mul__ __rmul__ div __truediv__ true_divide add __add__ __radd__ tanh to float".split())
RESHAPES = ("view", "reshape", "unflatten")

FED_TWICE = (
    "the cache already holds these tokens, and the attention mask does not cover them again: "
    "call cache.rollback(1) before generating from a prompt that is fully cached; with use_cache=False pass no cache"
)
ASK_FOR_OURS = 'call hf_kvcache.register() and model.set_attn_implementation("kvcache")'
PADDED = (
    "this retention evicts tokens and the batch has padding: rows would keep pads as their first tokens; use rows of "
    f"equal length, or retention 'all', or (for rows that are padded from the first forward on) {ASK_FOR_OURS}"
)


def allowed(mask: torch.Tensor) -> torch.Tensor:
    """A mask of transformers, bool or additive, as bool."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


class Visible(NamedTuple):
    """Which keys each query attends to: query p sees slot j iff ``since[j] <= p < until[j]``.

    A window ends with ``until``. A token that is sealed while a chunk is running has two slots, its plain form until
    then and its encoded form since then, so that each query of the chunk sees what it would have seen alone.
    """

    since: torch.Tensor  # [n] int64
    until: torch.Tensor  # [n] int64
    position: torch.Tensor  # [n] int64, token number
    query: int  # token number of the first query
    queries: int
    evicts: bool
    doubled: bool  # some tokens have two slots
    needed: bool = True  # False: a plain causal mask says the same, and keys only carry this to look at the mask
    ahead: torch.Tensor | None = None  # [B or 1, 1, q, n] bool: later tokens that a query sees too (of its image)

    def rows(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Queries ``start:stop`` of the call, [1 or B, 1, stop - start, n] bool."""
        stop = self.queries if stop is None else stop
        p = torch.arange(self.query + start, self.query + stop, device=self.since.device)[:, None]
        seen = ((self.since <= p) & (p < self.until))[None, None]
        return seen if self.ahead is None else seen | self.ahead[..., start:stop, :]

    def of_last(self, queries: int) -> Visible:
        """For the last ``queries`` of the call only: layers without keys of their own may leave out the others."""
        if queries >= self.queries:
            return self
        ahead = None if self.ahead is None else self.ahead[..., -queries:, :]
        return self._replace(query=self.query + self.queries - queries, queries=queries, ahead=ahead)

    def looking(self, mask: torch.Tensor | None) -> Visible:
        """With what a mask made by transformers lets queries see of later tokens: the rest of their image.

        A later token is seen in the form that it comes in.
        """
        if mask is None or self.queries == 1 or mask.shape[-2] != self.queries:
            return self
        end = min(self.query + self.queries, mask.shape[-1])
        new = allowed(mask)[..., end - self.queries : end]  # [B, 1, q, q]
        if not new.diagonal(1, -2, -1).any():
            return self
        offset = self.position - self.query
        later = (offset > torch.arange(self.queries, device=offset.device)[:, None]) & (self.since == self.position)
        return self._replace(ahead=new[..., offset.clamp_min(0)] & later & (self.until > self.position))

    def by_slot(self, mask: torch.Tensor) -> torch.Tensor | None:
        """What a mask made by transformers for this call says about the slots, after a look at it.

        It counts its columns as consecutive tokens of some layer. A window without pads needs nothing of it, ``rows``
        say it all; where tokens have two slots, only its last row (which tokens are real) is used, by token number.

        Raises:
            ValueError: pads under an evicting retention, or queries that may not see themselves (a prompt fed twice).
        """
        last = allowed(mask)[..., -1, :]
        total = self.query + self.queries
        own = min(total, mask.shape[-1]) - 1
        if not last[..., own].any():
            raise ValueError(FED_TWICE)
        if self.evicts and not last[..., :total].all():
            raise ValueError(PADDED)
        if self.evicts:
            return None
        return mask[..., -1:, :][..., self.position] if self.doubled else mask


def watched(keys: torch.Tensor, seen: int, queries: int, evicts: bool = False) -> torch.Tensor:
    """Keys [B, H, n, D] of ``queries`` tokens after ``seen`` others, that look at their mask but do not change it."""
    total = seen + queries
    position = torch.arange(total - keys.shape[2], total, device=keys.device)
    forever = torch.full_like(position, torch.iinfo(torch.int64).max)
    return MaskedStates.wrap(keys, Visible(position, forever, position, seen, queries, evicts, False, False), "keys")


class MaskedStates(torch.Tensor):
    """Keys or values ``[B, H, n, D]``, or scores ``[.., q, n]``, with what each query may see of them.

    "watch" is anything made of keys that are no keys yet, "glance" are their scores: they only look at the mask.
    """

    visible: Visible
    kind: str  # "keys", "scores", "values"; "glance", "watch"

    @staticmethod
    def wrap(data: torch.Tensor, visible: Visible, kind: str) -> MaskedStates:
        states = data.as_subclass(MaskedStates)
        states.visible, states.kind = visible, kind
        return states

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        carriers = [a for a in _leaves((args, kwargs)) if isinstance(a, MaskedStates) and hasattr(a, "visible")]
        if not carriers:
            return super().__torch_function__(func, types, args, kwargs)
        carrier, name = min(carriers, key=lambda a: a.kind), func.__name__  # in this order
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.scaled_dot_product_attention and carrier.kind == "keys":
                return carrier._attend(*args, **kwargs)
            if carrier.kind == "scores":
                return carrier._score(func, args, kwargs)
            if carrier.kind in ("glance", "watch"):
                return carrier._look(func, args, kwargs)
            if name == "__getitem__" and carrier._cuts_slots(args[1]):
                return carrier
            out = func(*_map(_plain, args), **_map(_plain, kwargs))
            if name in KEEPS_STATES and isinstance(out, torch.Tensor):
                return cls.wrap(out, carrier.visible, carrier.kind)
            if carrier.kind == "values":
                return out
            if name in MAKES_SCORES and carrier._fits(out):
                return cls.wrap(out, carrier.visible.of_last(out.shape[-2]), "scores")
            if (name in MAKES_SCORES or name in BREAKS_KEYS) and carrier.visible.needed:
                raise ValueError(
                    f"this model applies {name} to its keys before attention, so a mask of our own cannot be applied: "
                    "feed token by token, or use retention 'all' with storage 'full', 'int8' or 'fp8'"
                )
            return _map(lambda t: carrier._as(t, "watch"), out) if name in BREAKS_KEYS else out

    def _as(self, other: Any, kind: str) -> Any:
        return MaskedStates.wrap(other, self.visible, kind) if isinstance(other, torch.Tensor) else other

    def _look(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the model does, after a look at the mask where it is used."""
        name, masks = func.__name__, [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 4 and a is not self]
        attends = func is F.scaled_dot_product_attention
        if attends:
            masks = [mask for mask in (*args[3:4], kwargs.get("attn_mask")) if mask is not None]
        if attends or (self.kind == "glance" and name in KEEPS_SCORES):
            for mask in masks:
                self.visible.by_slot(mask)
        out = func(*_map(_plain, args), **_map(_plain, kwargs))
        if self.kind == "glance":
            return self._as(out, "glance") if name in KEEPS_SCORES else out
        if name in MAKES_SCORES:
            return self._as(out, "glance") if self._fits(out) else out
        return out if attends else _map(lambda t: self._as(t, "watch"), out)

    def _fits(self, scores: torch.Tensor) -> bool:
        return scores.shape[-1] == len(self.visible.since) and scores.shape[-2] <= self.visible.queries

    def _cuts_slots(self, index: Any) -> bool:
        visible = self.visible
        cut = index[2] if isinstance(index, tuple) and len(index) > 2 else None
        return visible.doubled and not visible.query and cut == slice(None, visible.queries, None)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        # Not the query's own axis: the heads of one token may lie there. Several tokens without a mask are causal.
        queries = attn_mask.shape[-2] if attn_mask is not None else query.shape[-2] if is_causal else 1
        visible = self.visible.of_last(queries).looking(attn_mask)
        mask = visible.rows()  # includes causality
        slots = None if attn_mask is None else visible.by_slot(attn_mask)
        if slots is not None:
            mask = slots & mask if slots.dtype == torch.bool else slots.masked_fill(~mask, float("-inf"))
        return F.scaled_dot_product_attention(query, _plain(key), _plain(value), mask, dropout_p, **kwargs)

    def _score(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Scaling, capping and adding a mask keep scores what they are; anything else sees hidden ones as -inf."""
        if func.__name__ in RESHAPES:  # rows and heads in one axis for the product (GPT-NeoX Japanese)
            out = func(*_map(_plain, args), **kwargs)
            if out.shape[-2:] == self.shape[-2:]:
                return MaskedStates.wrap(out, self.visible, "scores")
        if func.__name__ not in KEEPS_SCORES:
            seen = self.visible.rows()
            seen = seen[0] if self.dim() == 3 and len(seen) == 1 else seen  # rows and heads in one axis (FSMT)
            hidden = _plain(self).masked_fill(~seen, float("-inf"))
            return func(*_map(lambda a: hidden if a is self else a, args), **kwargs)
        others = [a if a is self else self._operand(a) for a in args]
        visible = self.visible.looking(next(filter(self._is_mask, args), None))
        return MaskedStates.wrap(func(*map(_plain, others), **kwargs), visible, "scores")

    def _operand(self, other: Any) -> Any:
        """The other side of an addition: a mask made by transformers is translated to slots.

        A 4-D one may have the columns of a layer with other slots (``skip_layers``), but has as many rows as queries.
        """
        if not self._is_mask(other):
            return other
        slots = self.visible.by_slot(other)
        return 0.0 if slots is None else slots

    def _is_mask(self, other: Any) -> bool:
        if other is self or not isinstance(other, torch.Tensor) or other.dim() < 2:
            return False
        columns = other.dim() == 4 or other.shape[-1] == len(self.visible.since)
        return columns and other.shape[-2] == self.visible.queries


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, MaskedStates) else value


def _map(fn: Callable[[Any], Any], values: Any) -> Any:
    """``fn`` over the leaves of nested lists, tuples and dicts."""
    if isinstance(values, dict):
        return {key: _map(fn, value) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(_map(fn, value) for value in values)
    return fn(values)


def _leaves(values: Any) -> list[Any]:
    found: list[Any] = []
    _map(found.append, values)
    return found
