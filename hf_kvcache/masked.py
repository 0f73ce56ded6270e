"""How does a window get through stock attention? Keys that bring their own mask.

transformers builds one causal mask from two numbers, a key length and an offset. That cannot say that, inside one
chunk of queries, each query has its own window, or that a token is plain for one query and encoded for the next. Where
a chunk needs that, ``update`` hands out its keys as ``MaskedStates``: a tensor that behaves as any other, except that
the place where it turns into scores applies the missing part of the mask (``plan.Visible``).

    sdpa    scaled_dot_product_attention(q, K, v, mask)   ->  the rules of the slots, and ``mask`` by their tokens
    eager   softmax(q @ K^T * scale + mask)               ->  the same, where the mask is added

Where tokens have two slots, values come wrapped too: with an empty cache and no mask, the stock sdpa function takes
keys beyond the number of queries for unused slots of a static cache and cuts them off; ``MaskedStates`` do not let it.

A decode step needs none of this (one query sees all that is held) and gets plain tensors, unless somebody has to look
at the mask: for pads, which an evicting layer must not keep, and for a prompt that is fed a second time.

A model may turn what it gets into other keys first (latents of MLA). Their mask cannot follow, which is refused where
one is needed; where none is, the states go on as "watch" and "glance": they change nothing, but look at the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .flash import attend_plain
from .plan import FOREVER, LEAF, Mask, Visible, look, segments

MASKABLE = ("sdpa", "eager")  # stock attention functions that read their keys through torch ops
KEEPS_STATES = set("__getitem__ expand reshape view transpose permute contiguous unsqueeze flatten to float".split())
KEEPS_STATES |= set("half bfloat16 repeat_interleave __get__ repeat clone detach unflatten swapaxes movedim".split())
# What a model does to keys that are not keys yet (latents): the mask cannot follow.
BREAKS_KEYS = set("linear split split_with_sizes chunk tensor_split cat concat stack einsum".split())
MAKES_SCORES = set("matmul __matmul__ bmm baddbmm".split())
KEEPS_SCORES = set("mul __mul__ __rmul__ div __truediv__ true_divide add __add__ __radd__ tanh to float".split())
HIDES = ("masked_fill", "masked_fill_")
RESHAPES = ("view", "reshape", "unflatten")

ROLL_BACK = "call cache.rollback(1)"
FED_TWICE = (
    "the cache already holds these tokens, and the attention mask does not cover them again: "
    f"{ROLL_BACK} before generating from a prompt that is fully cached, or rewind() where it is shorter or "
    "differs; with use_cache=False pass no cache"
)
HIDES_ALL = (  # a mask that ends too early looks like this, too
    "the attention mask covers none of the new tokens: leave out a forward of pads alone; if they are none, "
    f"{FED_TWICE}"
)
ASK_FOR_OURS = 'call hf_kvcache.register() and model.set_attn_implementation("kvcache")'
PADDED = (
    "this retention evicts tokens and the mask hides some (padding): rows would keep them as their first tokens; use "
    f"rows of equal length, or retention 'all', or {ASK_FOR_OURS}, with placement 'device'"
)


def check_width(mask: torch.Tensor, total: int, columns: int | None = None) -> None:
    """Refuse a mask whose columns are neither the ``total`` tokens so far nor the ``columns`` that were asked for."""
    if mask.shape[-1] not in (total, columns):
        held = "" if columns in (None, total) else f" or the {columns} that get_mask_sizes() names"
        raise ValueError(
            f"the attention mask has {mask.shape[-1]} columns, and not the {total} of all tokens so far{held}: give it "
            "one for each token, the new ones included, or pass the 2-D mask of all tokens"
        )


class View(NamedTuple):
    """What the keys of one forward carry."""

    visible: Visible
    fed: int  # tokens fed before
    needed: bool  # False: the mask that the model applies says it all, and keys only look at it
    doubled: bool = False  # some tokens have two slots
    pads: Callable[[], None] | None = None  # called where the mask hides tokens from all queries
    window: tuple[int, int] | None = None  # (sinks, window), where tokens leave
    positions: torch.Tensor | None = None  # of the queries, where they are known
    columns: int | None = None  # that a mask may have beside those of all tokens; 0: any number
    causal_only: bool = False  # the model applies the mask, which can say nothing else
    undo: Callable[[], None] | None = None  # what is refused now has not happened

    @property
    def plain(self) -> bool:
        """Whether each query sees every slot up to its own, so that a causal mask of as many columns says it all."""
        rules, slots = self.visible, torch.arange(self.visible.number.shape[-1])[None]
        if self.doubled or bool((rules.since > 0).any()) or bool((rules.until < FOREVER).any()):
            return False
        number, query = rules.number.cpu(), rules.query.cpu()
        return torch.equal(number, slots) and torch.equal(query, slots[:, slots.shape[1] - rules.queries :])

    def of_last(self, queries: int) -> View:
        """For the last ``queries`` of the call only."""
        return self._replace(visible=self.visible.last(queries))

    def look(self, mask: torch.Tensor) -> Mask:
        """The facts of a mask.

        Raises:
            ValueError: no query of any row may see itself (a prompt fed twice), what ``pads`` raises, a mask that is
                not causal where slots are no tokens, or one of a wrong width.
        """
        if self.columns != 0 and mask.shape[-1] != self.visible.number.shape[-1]:
            check_width(mask, self.visible.total, self.columns)
        facts, queries = look(mask, self.visible.total), self.visible.queries
        end = min(self.visible.total, mask.shape[-1])
        if self.fed and not bool(facts.real[:, max(end - queries, 0) : end].any()):
            raise ValueError(HIDES_ALL)
        if self.pads is not None and not bool(facts.real[:, :end].all()):
            self.pads()
        if self.causal_only and not (facts.pads and mask.shape[-1] == self.visible.number.shape[-1]):
            raise ValueError(
                "tokens are evicted, and this model changes its keys before attention: a mask that is more than causal "
                "cannot be applied; leave it out, or use retention 'all'"
            )
        return facts

    def seen(self, mask: torch.Tensor | None) -> torch.Tensor:
        """Who sees what, by the rules and by a mask, [R or B, 1 or H, q, n] bool or additive."""
        if mask is None:
            return self.visible.rows()
        self.look(mask)
        visible = self.visible
        if self.window is not None:
            visible = visible.by_depth(self.positions, mask, *self.window)
        return visible.rows(mask)


@contextmanager
def refusals(undo: Callable[[], None] | None) -> Iterator[None]:
    """A refusal in here leaves the cache as it was before the forward."""
    try:
        yield
    except ValueError:
        if undo is not None:
            undo()
        raise


def undo_of(states: Any) -> Callable[[], None] | None:
    """What ``undoes`` gave to these keys."""
    return states.carried.undo if isinstance(states, MaskedStates) else getattr(states, "undo", None)


def undoes(states: Any, undo: Callable[[], None] | None) -> None:
    """What attention or these states refuse, ``undo`` takes back."""
    if isinstance(states, MaskedStates):
        states.carried = states.carried._replace(undo=undo)
    elif hasattr(states, "undo"):
        states.undo = undo


class MaskedStates(torch.Tensor):
    """Keys or values ``[B, H, n, D]``, or scores ``[.., q, n]``, with what each query may see of them.

    "watch" is anything made of keys that are no keys yet, "glance" are their scores: they only look at the mask.
    """

    carried: View
    kind: str  # "keys", "scores", "values"; "glance", "watch"

    @staticmethod
    def wrap(data: torch.Tensor, view: View, kind: str) -> MaskedStates:
        states = data.as_subclass(MaskedStates)
        states.carried, states.kind = view, kind
        return states

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        carriers = [a for a in _leaves((args, kwargs)) if isinstance(a, MaskedStates) and hasattr(a, "carried")]
        if not carriers:
            return super().__torch_function__(func, types, args, kwargs)
        carrier = min(carriers, key=lambda a: a.kind)  # in this order
        with torch._C.DisableTorchFunctionSubclass(), refusals(carrier.carried.undo):
            return cls._carry(carrier, func, args, kwargs)

    @classmethod
    def _carry(cls, carrier: MaskedStates, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__
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
            return cls.wrap(out, carrier.carried, carrier.kind)
        if carrier.kind == "values":
            return out
        if name in MAKES_SCORES and carrier._fits(out):
            return cls.wrap(out, carrier.carried.of_last(out.shape[-2]), "scores")
        if name in BREAKS_KEYS and carrier.carried.needed and carrier.carried.plain:
            view = carrier.carried._replace(needed=False, causal_only=True)
            return _map(lambda t: cls.wrap(t, view, "watch") if isinstance(t, torch.Tensor) else t, out)
        if (name in MAKES_SCORES or name in BREAKS_KEYS) and carrier.carried.needed:
            alone = carrier.carried.visible.queries == 1 or (carrier.carried.doubled and carrier.carried.pads)
            single = "" if alone else "feed token by token, or "
            raise ValueError(
                f"this model applies {name} to its keys before attention, so a mask of our own cannot be applied: "
                f"{single}use retention 'all' with storage 'full', 'int8' or 'fp8'"
            )
        return _map(lambda t: carrier._as(t, "watch"), out) if name in BREAKS_KEYS else out

    def _as(self, other: Any, kind: str) -> Any:
        return MaskedStates.wrap(other, self.carried, kind) if isinstance(other, torch.Tensor) else other

    def _look(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the model does, after a look at the mask where it is used."""
        name, masks = func.__name__, [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 4 and a is not self]
        attends = func is F.scaled_dot_product_attention
        if attends:
            masks = [mask for mask in (*args[3:4], kwargs.get("attn_mask")) if mask is not None]
            slots = self.carried.visible.number.shape[-1]
            if args[1].shape[-2] > slots:  # an encoder's keys follow (T5Gemma 2), and their columns
                masks = [mask[..., :slots] for mask in masks]
        if attends or (self.kind == "glance" and name in KEEPS_SCORES):
            for mask in masks:
                self.carried.look(mask)
        out = func(*_map(_plain, args), **_map(_plain, kwargs))
        if self.kind == "glance":
            return self._as(out, "glance") if name in KEEPS_SCORES else out
        if name in MAKES_SCORES:
            return self._as(out, "glance") if self._fits(out) else out
        return out if attends else _map(lambda t: self._as(t, "watch"), out)

    def _fits(self, scores: torch.Tensor) -> bool:
        visible = self.carried.visible
        return scores.shape[-1] == visible.number.shape[-1] and scores.shape[-2] <= visible.queries

    def _cuts_slots(self, index: Any) -> bool:
        view = self.carried
        cut = index[2] if isinstance(index, tuple) and len(index) > 2 else None
        return view.doubled and not view.fed and cut == slice(None, view.visible.queries, None)

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
        view, key, value = self.carried.of_last(queries), _plain(key), _plain(value)
        fits = attn_mask is None or attn_mask.shape[-1] == view.visible.number.shape[-1]
        if view.needed and dropout_p == 0 and queries > LEAF and not needs_grad(query, key, value):
            facts = None if attn_mask is None else view.look(attn_mask)
            says = facts is not None and not (facts.pads and bool(facts.real[:, : view.visible.total].all()))
            if view.visible.number.shape[0] == 1 and not says:
                scale = kwargs.get("scale") or query.shape[-1] ** -0.5
                return attend_plain(query, key, value, segments(view.visible), scale)
        if view.needed or not fits:
            attn_mask, is_causal = view.seen(attn_mask), False
            if attn_mask.dtype != torch.bool:
                attn_mask = attn_mask.to(query.dtype)
        elif attn_mask is not None:
            view.look(attn_mask)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)

    def _score(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Scaling and capping keep scores what they are; an added mask, or anything else, hides what is hidden."""
        if func.__name__ in RESHAPES:  # rows and heads in one axis for the product (GPT-NeoX Japanese)
            out = func(*_map(_plain, args), **kwargs)
            if out.shape[-2:] == self.shape[-2:]:
                return MaskedStates.wrap(out, self.carried, "scores")
        mask = next(filter(self._is_mask, args), None)
        if func.__name__ in KEEPS_SCORES and mask is None:
            return MaskedStates.wrap(func(*map(_plain, args), **kwargs), self.carried, "scores")
        view = self.carried
        if mask is not None:  # of the model's; a 4-D one may have the columns of a layer with other slots (skip_layers)
            hides = func.__name__ in HIDES  # what it marks, where others mark what is seen
            whole = _plain(mask)[(None,) * (4 - mask.dim())]
            whole = ~whole if hides else whole
            fits = whole.shape[-1] == view.visible.number.shape[-1]
            bias = whole if fits and not view.needed else view.seen(whole)
            if bias is whole:
                view.look(whole)
            bias = ~bias if hides else bias
            bias = bias[0] if self.dim() == 3 and len(bias) == 1 else bias
            return func(*(_plain(bias if a is mask else a) for a in args), **kwargs)
        hidden = _plain(self)
        if view.needed:
            seen = view.visible.rows()
            seen = seen[0] if self.dim() == 3 and len(seen) == 1 else seen  # rows and heads in one axis (FSMT)
            hidden = hidden.masked_fill(~seen, float("-inf"))
        return func(*_map(lambda a: hidden if a is self else a, args), **kwargs)

    def _is_mask(self, other: Any) -> bool:
        if other is self or not isinstance(other, torch.Tensor) or other.dim() < 2:
            return False
        visible = self.carried.visible
        if other.dim() == 3 and visible.queries == 1:  # a bias, head by head (MPT)
            return False
        columns = other.dim() == 4 or other.shape[-1] == visible.number.shape[-1]
        return columns and other.shape[-2] == visible.queries


def needs_grad(*states: torch.Tensor) -> bool:
    """Flash kernels have no gradient of the log-sum-exp that merging needs."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in states)


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
