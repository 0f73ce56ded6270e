"""How does importance eviction free memory? A layer whose slots hold any tokens, in any order.

Softmax does not care about the order of its keys, so a kept token needs no neighbours: a *slot* holds one token of one
row and KV head as the codec stores it, and beside it the token's number among the row's own tokens and its score:

    state [B, H, C, ...]      position [B, H, C, g] int32, -1: empty      score [B, H, C] float32

What happens in one forward of q new tokens over m kept ones:

    1. the new tokens are encoded, once; attention reads kept slots and new tokens (evict after attending)
    2. the policy scores all m + q tokens
    3. q = 1: the new token takes a free slot, or that of the token with the lowest score; nothing else moves
       q > 1: the best ``budget`` tokens are gathered into new slots

Under our attention, steps 2 and 3 run when it has its output and knows pads and attention mass; under a stock one they
run inside ``update``, for policies that need keys only. Pads never get a slot; rows with fewer tokens have empty
slots at the end. With ``adaptive`` the heads of a layer hold different numbers of tokens, one after the other in flat
tensors (``Ragged``): nothing is masked to pretend.

Storages that keep tokens plain beside encoded ones have two such containers, ``tail`` and ``sealed``. A plain token
is evicted alone; encoded groups of g tokens, which cannot be taken apart without encoding anew, leave as a whole, by
their mean score.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from . import compat
from .attention import NAME, full_precision
from .codecs import CODECS
from .far_slots import FarSlots
from .layers import Held, KVLayer, refuse_positive
from .masked import ASK_FOR_OURS, PADDED
from .part import Part
from .placement import Home
from .plan import NOWHERE, Fed, Mask, Visible, causal
from .policies import Pool
from .retention import Importance
from .rope import Rope
from .slots import Ragged, Slots, add_bytes, by_number, choose, slots_used, take_part
from .spec import Storage
from .view import History, Stored

INF = float("inf")
KEYS_ONLY = "use 'knorm', 'keydiff' or 'random'"
FACTS = ("seen", "batch_size", "heads", "widths", "dtypes", "device")
SAFEGUARD = 0.2  # share of the budget that every head keeps under ``adaptive``


class Chunk(NamedTuple):
    """The new tokens of one forward, between their attention and their place in the slots."""

    part: Part  # as they will be stored (plain where a tail takes them)
    keys: torch.Tensor
    values: torch.Tensor
    first: int


class EvictionLayer(KVLayer):
    """A full-attention layer under importance eviction.

    Args:
        storage, retention, config, index: as ``KVLayer``.
        layers: how many layers the model has, for ``pyramid``.
        home: where kept tokens live, if not on the device; tokens that are plain beside encoded ones stay there.

    Raises:
        ValueError: ``adaptive`` with a storage that keeps plain tokens beside encoded ones, or a policy that needs
            positions which this model does not have.
    """

    retention: Importance

    def __init__(
        self,
        storage: Storage,
        retention: Importance,
        config: Any,
        index: int,
        layers: int,
        home: Home | None = None,
    ) -> None:
        self.budget = retention.for_layer(index, layers)
        self.policy = retention.policy
        self.mixed = retention.pyramid or retention.adaptive
        self.two = storage.has_tail or bool(storage.sinks)
        if retention.adaptive and self.two:
            raise ValueError(
                f"adaptive budgets with storage {storage.spec!r}, which keeps plain tokens beside encoded ones: not "
                "supported, use 'full', 'int8' or 'fp8', or leave out adaptive"
            )
        super().__init__(storage, retention, config, index, home)
        self.last_reader = compat.last_reader(config, index)
        rotates = self.policy.needs == "queries" and compat.uses_rotary(config, index)
        self.rope = self._find_rope() if rotates else None

    def _find_rope(self) -> Rope:
        try:
            return Rope(self.config, self.index)
        except ValueError as error:
            raise ValueError(f"policy {self.retention.name!r} turns queries, but {error}: use another policy") from None

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        storage, full = self.storage, CODECS["full"]
        codecs = (storage.key_codec, storage.value_codec, storage.group)
        self.kept_slots: Any = Slots(*codecs) if self.home is None else FarSlots(*codecs, self.home)
        self.tail_slots = Slots(full, full, 1)
        self.own: torch.Tensor | None = None  # [B] real tokens seen per row, once a pad was seen
        self.fed = Fed.of(0)  # which tokens were no pads, from then on
        self.memory: dict[str, torch.Tensor] = {}
        self.pending: Chunk | None = None
        self.touched = False  # whether the model took what is pending apart, so that no attention of ours will follow
        self.read: tuple[Any, Any, Any, float] | None = None  # what the first layer that read what is pending saw

    # -- transformers: growing ---------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """As ``KVLayer.update``; eviction follows the attention.

        Raises:
            ValueError: also a policy that needs queries or attention mass under an attention that does not hand them
                over, and gradients.
        """
        attention = self._attention()
        self._refuse_stock(attention)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError(f"{self.retention.spec!r} evicts tokens, which has no gradient: use torch.no_grad()")
        self._catch_up()
        self._check(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.home is not None:
            self.home.enter(key_states.device)
        if self.padded and self.retention.tokens(self.budget, self.seen + key_states.shape[2]) <= self.seen:
            raise ValueError(PADDED)
        with torch.no_grad(), full_precision(key_states.device):
            history = self._take(key_states, value_states)
            if attention == NAME:
                return Stored(history, 0), Stored(history, 1)
            self.touched = True  # what is beyond the budget goes when attention has taken the mask (``catch_up``)
            return history._replace(observer=None, watch=True).decode()

    def _refuse_stock(self, attention: str | None) -> None:
        if attention == NAME:
            return
        ours, model = compat.takes_attention(self.config), type(self.config).__name__.removesuffix("Config")
        stock = repr(attention) if ours else f"the attention of {model}"
        ask = ASK_FOR_OURS
        if ours and attention is None:
            stock = "a config without a model"
            ask = 'make the cache from model.config, of a model that has "kvcache" set'
        if self.policy.needs != "keys":
            raise ValueError(
                f"policy {self.retention.name!r} needs attention {self.policy.needs}, which {stock} does not hand "
                f"over: {ask if ours else KEYS_ONLY}"
            )
        if self.retention.pyramid or self.retention.adaptive:
            which = "pyramid" if self.retention.pyramid else "adaptive"
            out = ask if ours else f"leave out {which}"
            raise ValueError(f"{which} budgets differ, and {stock} has one mask for all layers: {out}")

    def _catch_up(self) -> None:
        """The last forward's tokens, where no attention of ours followed (a model that decodes what it was handed)."""
        if self.pending is None:
            return
        if self.pending.keys.shape[2]:
            self.refuse_touch()
        with torch.no_grad(), full_precision(self.pending.keys.device):
            self.settle(*(self.read or (None, None, None)))

    def catch_up(self) -> None:
        """Let go of what the last forward's tokens replace, where the model took them apart (latents of MLA)."""
        if self.touched and self.read is None:
            self._catch_up()

    def _take(self, keys: torch.Tensor, values: torch.Tensor) -> History:
        encoded = self.tail if self.two else self.sealed  # runs of the right codecs
        part = encoded.encode(keys, values)
        self.pending, self.touched = Chunk(part, keys, values, self.seen), False
        self.seen += keys.shape[2]
        held, new = [slots.part() for slots in self._containers()], keys.shape[2]
        fed = self.seen - new
        whole = self.own is None and self.kept == fed  # nothing was evicted
        rules = partial(self._rules, fed, new, self.kept, self._numbers()[0, 0] if whole else None)
        return History(
            [*held, part], rules, not whole and new > 1, *self.dtypes, observer=self, batch=self.batch_size, fed=fed,
            queries=new, pads=self.found_pads, columns=0 if self.mixed else None,
        )  # fmt: skip

    def _numbers(self) -> torch.Tensor:
        """The token in every slot, [B, H, n]; -1: none."""
        empty = torch.empty(self.batch_size, self.heads, 0, dtype=torch.int64, device=self.device)
        return torch.cat([empty, *(slots.positions().flatten(2) for slots in self._containers())], -1).long()

    def _rules(self, fed: int, new: int, held: int, number: torch.Tensor | None) -> Visible:
        """The slots for stock attention: kept tokens, then the new ones. Where some were evicted (``number`` is
        ``None``) heads hold different ones: all queries see all of them, and a mask can say nothing of them."""
        rules = causal(new, held + new).to(self.device)
        if number is None:
            order = torch.arange(held + new, device=self.device)
            column = torch.where(order < held, NOWHERE, order + fed - held)[None]
        else:
            column = torch.cat([number, torch.arange(fed, fed + new, device=self.device)])[None]
        return rules._replace(column=column, total=fed + new)

    def refuse_touch(self) -> None:
        """Raise where this model does not hand its keys to attention as they are, and only that would do."""
        if self.read is not None:
            return
        kept = "this model does not hand its keys to attention as they are (or the cache is not made from model.config)"
        if self.policy.needs != "keys":
            needs = f"policy {self.retention.name!r} needs what attention computes"
            raise ValueError(f"layer {self.index}: {needs}, and {kept}: {KEYS_ONLY}")
        if self.retention.adaptive:
            raise ValueError(f"layer {self.index}: heads of adaptive budgets differ, and {kept}: leave out adaptive")
        self.touched = True

    def mark(self, keep: bool | None = False) -> Any:
        """Where the layer is, for ``recall``."""
        return self.seen, self.is_initialized, self.padded, self.record_past

    def recall(self, mark: Any) -> None:
        """After an exception in ``update``, or where attention refuses the new tokens: nothing waits for an attention
        that will not come."""
        seen, initialized, padded, record_past = mark
        if self.torn:
            return
        if self.pending is not None and self.pending.first == seen:
            self._drop_pending()
            self.padded = padded
        if not initialized and not self.seen:
            self.reset()
            self.record_past = record_past

    def _drop_pending(self) -> None:
        """Forget the new tokens of the last forward, which are still beside the slots: exact."""
        assert self.pending is not None
        self.seen, self.pending, self.read, self.touched = self.pending.first, None, None, False

    # -- attention asks ----------------------------------------------------------------------------------------------

    def mask(self, facts: Mask | None, queries: int) -> Callable[[int, int], torch.Tensor] | None:
        """Who may attend to what: a function of queries ``start:stop``, [B or 1, H, Hq or 1, s, n]; ``None``: all of
        it, up to the query itself. There may be fewer queries than new tokens, the last ones.

        Of a mask, its last columns speak of the new tokens; the others matter where they hide a token that is held.
        """
        assert self.pending is not None
        held, new = self._empties(), self.pending.keys.shape[2]
        if facts is None and held is None:
            return None
        width, end = self.kept, 0 if facts is None else min(self.seen, facts.mask.shape[-1])
        place = self._columns(facts, end - new) if facts is not None and width else None

        def rows(start: int, stop: int) -> torch.Tensor:
            if facts is None:
                order = torch.arange(new, device=self.device)
                own = (order <= order[new - queries + start : new - queries + stop, None])[None, None]
                old = None
            else:
                some = facts.mask[..., start:stop, :] if facts.mask.shape[-2] > 1 else facts.mask
                own = some[..., end - new : end]
                old = None if place is None else _gather(some, place, self.seen - facts.mask.shape[-1])
            if old is None:
                old = torch.ones(1, 1, 1, width, dtype=torch.bool, device=self.device) if held is None else held
                if own.dtype != torch.bool:
                    old = torch.zeros(old.shape, dtype=own.dtype, device=old.device).masked_fill_(~old, -INF)
            elif held is not None:
                wide = max(old.shape[1], held.shape[1])
                hide = held.repeat_interleave(wide // held.shape[1], 1)
                old = old & hide if old.dtype == torch.bool else old.masked_fill(~hide, -INF)
            if 1 < own.shape[1] != old.shape[1] > 1:
                old = old.repeat_interleave(own.shape[1] // old.shape[1], 1)
            shape = torch.broadcast_shapes(old.shape[:3], own.shape[:3])
            return torch.cat([old.expand(*shape, width), own.expand(*shape, new)], -1)

        return rows

    def _columns(self, facts: Mask, old: int) -> torch.Tensor | None:
        """The mask's column, counted from the first token fed, of every token held, [B, H, n]; ``None`` where the mask
        hides no old token but pads, which are not held."""
        first = self.seen - facts.mask.shape[-1]
        real = facts.real[:, :old]
        if self.own is not None:
            real = real | ~self.fed.whole().to(real.device)[:, max(first, 0) : max(first, 0) + old]
        if facts.pads and bool(real.all()):
            return None
        number = self._numbers()
        if self.own is None:
            return number
        columns = self.fed.columns().to(number.device)[:, None].expand(-1, self.heads, -1)
        return columns.gather(-1, number.clamp(0, columns.shape[-1] - 1)).masked_fill(number < 0, NOWHERE)

    def _empties(self) -> torch.Tensor | None:
        """Slots that hold a token, [B, H, 1, n], where not all of them do."""
        if (self.own is None and not isinstance(self.kept_slots, Ragged)) or not self._containers():
            return None
        return (self._numbers() >= 0)[:, :, None]

    def first_observed(self, facts: Mask | None, queries: int) -> tuple[int | None, torch.Tensor | None]:
        """The first of these queries, the last new ones, whose attention mass is wanted (``None``: no mass), and which
        ones are, [B, 1, q, 1], where rows differ: each row counts its own, without pads."""
        if self.policy.needs != "mass" or self.read is not None:
            return None, None
        first, real = self.policy.first_observed(queries), self._real(facts)
        if real is None:
            return first, None
        real = real[:, -queries:]
        wanted = torch.tensor([n - self.policy.first_observed(n) for n in real.sum(-1).tolist()], device=real.device)
        observed = real & (real.flip(1).cumsum(1).flip(1) <= wanted[:, None])
        return int(observed.any(0).int().argmax()), observed[:, None, :, None]

    def _real(self, facts: Mask | None) -> torch.Tensor | None:
        """Which new tokens are no pads, [B, q]; ``None``: all of them."""
        assert self.pending is not None
        new = self.pending.keys.shape[2]
        real = None if facts is None else facts.new(self.seen - new, new)
        return None if real is None else real.expand(self.batch_size, -1)

    def observe(
        self,
        reader: int | None,
        query: torch.Tensor,
        mass: torch.Tensor | None,
        facts: Mask | None,
        scaling: float,
    ) -> None:
        """What the attention of layer ``reader`` saw; after the last layer that reads these keys, as ``settle``.

        Where layers share keys, only the one that made them counts: others may leave out queries.
        """
        self.read = self.read or (query, mass, facts, scaling)
        if reader is None or reader >= self.last_reader:
            self.settle(*self.read)

    # -- eviction ----------------------------------------------------------------------------------------------------

    def settle(
        self,
        query: torch.Tensor | None,
        mass: torch.Tensor | None,
        facts: Mask | None,
        scaling: float = 1.0,
    ) -> None:
        """Score everything, and let go of what is beyond the budget.

        Args:
            query: [B, Hq, q, D].
            mass: [B, H, m + q] float32.
            facts: of the attention mask; its last columns say which new tokens are pads.
            scaling: of the scores.
        """
        chunk = self.pending
        assert chunk is not None
        real = self._real(facts)
        self.pending, self.read, self.touched = None, None, False
        if not chunk.keys.shape[2]:
            return
        self.torn = True  # until all of it has its place
        self._settle(chunk, query, mass, real, scaling)
        self.torn = False

    def _settle(
        self,
        chunk: Chunk,
        query: torch.Tensor | None,
        mass: torch.Tensor | None,
        real: torch.Tensor | None,
        scaling: float,
    ) -> None:
        position = self._number(chunk, real)  # [B, H, q]
        if position.shape[2] == 1 and self.own is None and not self.two and isinstance(self.kept_slots, Slots):
            if slots_used(self.kept_slots):
                return self._step(chunk, position, query, mass, scaling)
        nothing = position.new_zeros(*position.shape[:2], 0)
        held = torch.cat([nothing, *(s.positions().flatten(2) for s in self._containers())], -1)
        before = [s.scores().repeat_interleave(s.group, -1) for s in self._containers()]
        queries = query if self.policy.needs == "queries" else None
        scores = self.policy.score(
            Pool(
                torch.cat([nothing.float(), *before], -1),
                held,
                chunk.keys,
                chunk.values,
                position,
                mass,
                queries,
                self.memory,
                self.index,
                self.rope,
                scaling,
            )
        )
        for slots in self._containers():
            mine, scores = scores.split([slots.tokens, scores.shape[-1] - slots.tokens], -1)
            slots.set_scores(mine if slots.group == 1 else mine.unflatten(-1, (-1, slots.group)).mean(-1))
        del held, before, nothing, queries, mass, query  # of all tokens, as what is laid out next is
        place = self._place_two if self.two else self._place
        place(chunk.part, position[..., None], scores)

    def _step(
        self,
        chunk: Chunk,
        position: torch.Tensor,
        query: torch.Tensor | None,
        mass: torch.Tensor | None,
        scaling: float,
    ) -> None:
        """``_settle`` of one token without a pad in slots of one token, with as few operators as it takes."""
        slots, policy, memory = self.kept_slots, self.policy, self.memory
        held, before = slots.positions()[..., 0], slots.scores()
        states = (before, held, chunk.keys, chunk.values, position, mass, query if policy.needs == "queries" else None)
        score = policy.step(Pool(*states, memory, self.index, self.rope, scaling, chunk.first))
        limit = self.retention.tokens(self.budget, self.seen)
        if slots.used < limit:
            return slots.append(chunk.part, position[..., None], score, limit)
        last = self.seen - self.retention.recent - 1  # what always stays lies outside of sinks .. last
        always = held.clamp(self.retention.sinks, last) != held
        worst = before.masked_fill(always, INF).argmin(-1, keepdim=True)
        slots.replace(worst, chunk.part, chunk.first, score)

    def _containers(self) -> list[Any]:
        self.catch_up()
        return [slots for slots in (self.kept_slots, self.tail_slots) if slots_used(slots)]

    def _number(self, chunk: Chunk, real: torch.Tensor | None) -> torch.Tensor:
        """The new tokens' numbers among their row's own, [B, H, q] int64; -1 for pads."""
        batch, heads, new = chunk.keys.shape[:3]
        device = chunk.keys.device
        if real is None and self.own is None:
            return _in_order(chunk.first, batch, heads, new, device)
        if self.own is None:
            self.own, self.fed = torch.full((batch,), chunk.first, device=device), Fed.of(batch, chunk.first, device)
        self.fed = self.fed.and_then(real, new)
        if real is None:
            real = torch.ones(batch, new, dtype=torch.bool, device=device)
        number = self.own[:, None] + real.cumsum(-1) - 1
        self.own = self.own + real.sum(-1)
        return number.masked_fill(~real, -1)[:, None].expand(-1, heads, -1)

    def _allowance(self) -> tuple[int, torch.Tensor | None]:
        """Tokens per head that stay now: the most of any row, and per row [B] where rows differ."""
        if self.own is None:
            return self.retention.tokens(self.budget, self.seen), None
        rows = [self.retention.tokens(self.budget, n) for n in self.own.tolist()]
        return max(rows), torch.tensor(rows, device=self.own.device)

    def _shielded(self, position: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [B, H, n] with those that always stay at +inf and empty slots at -inf."""
        end = self.seen if self.own is None else self.own[:, None, None]
        always = (position < self.retention.sinks) | (position >= end - self.retention.recent)
        shielded = scores.masked_fill(always, INF)
        return shielded if self.own is None else shielded.masked_fill(position < 0, -INF)

    def _place(self, part: Part, position: torch.Tensor, scores: torch.Tensor) -> None:
        """New tokens into slots of one token."""
        limit, rows = self._allowance()
        slots = self.kept_slots
        if scores.shape[-1] > 1 or not slots_used(slots):
            return self._gather(part, position, scores, limit, rows)
        if isinstance(slots, Slots) and rows is not None and slots.used < limit:
            slots.open(limit)  # only rows that may grow use theirs
        held = slots.positions()[..., 0]
        worst = self._shielded(held, slots.scores())
        if rows is not None or isinstance(slots, Ragged):
            worst = self._rooms(worst, held, rows)
        slots.put(worst.argmin(-1), part, position, scores, None if rows is None else position[:, 0, 0, 0] >= 0)

    def _rooms(self, worst: torch.Tensor, held: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """An empty slot comes first for a row that has not used up its budget, and never for one that has."""
        empty = held < 0
        if isinstance(self.kept_slots, Ragged):
            inside = self.kept_slots._inside()
            return worst.masked_fill(empty & inside, -INF).masked_fill(~inside, INF)
        assert rows is not None
        may_grow = ((~empty).sum(-1) < rows[:, None])[..., None]
        return torch.where(empty, torch.where(may_grow, -INF, INF), worst)

    def _gather(
        self, part: Part, position: torch.Tensor, scores: torch.Tensor, limit: int, rows: torch.Tensor | None
    ) -> None:
        """Choose among everything, and lay out anew."""
        slots = self.kept_slots
        if slots_used(slots):
            position = torch.cat([slots.positions(), position.int()], 2)
            scores = torch.cat([slots.scores(), scores], -1)
        shielded = self._shielded(position[..., 0], scores)
        if isinstance(slots, Ragged):
            shielded = shielded.masked_fill(position[..., 0] < 0, -INF)
        seen = self.seen if self.own is None else int(self.own.max())
        if self.retention.adaptive and (limit < seen or isinstance(slots, Ragged)):
            order = by_number(position[..., 0])  # ties go by age, not by slot
            position, scores = position.gather(2, order[..., None]), scores.gather(2, order)
            shielded = shielded.gather(2, order)
            return self._share_out(part, order, position, scores, shielded, limit, rows)
        index, position = choose(shielded, position, limit, rows)
        slots.keep(index, position, scores.gather(2, index), part)

    def _share_out(
        self,
        part: Part,
        order: torch.Tensor,
        position: torch.Tensor,
        scores: torch.Tensor,
        shielded: torch.Tensor,
        limit: int,
        rows: torch.Tensor | None,
    ) -> None:
        """Heads share their budgets; slots become ragged. A row within its budget gets room up to it.

        ``order`` [B, H, n]: which of the held units, and after them those of ``part``, the other tensors speak of.
        """
        batch, heads, _ = shielded.shape
        count = torch.full((batch, 1), limit, device=shielded.device) if rows is None else rows[:, None]
        chosen = _best(shielded, count) & (position[..., 0] >= 0)
        least = self.retention.sinks + self.retention.recent
        budget = self.budget if isinstance(self.budget, int) else count.clamp_min(least)
        room = (budget - chosen.sum(-1)).clamp_min(0) * (chosen.sum((1, 2))[:, None] < heads * budget)
        if rows is not None and int(room.max()):  # rows still below their budget: empty slots, to be used later
            extra = int(room.max())
            order = torch.cat([order, order[..., :1].expand(-1, -1, extra)], 2)
            position = torch.cat([position, position.new_full((batch, heads, extra, 1), -1)], 2)
            scores = torch.cat([scores, scores.new_full((batch, heads, extra), -INF)], 2)
            chosen = torch.cat([chosen, torch.arange(extra, device=room.device) < room[..., None]], 2)
        ragged = Ragged(self.storage.key_codec, self.storage.value_codec)
        ragged.fill(part, position, scores, chosen, self.kept_slots, order)
        self.kept_slots = ragged

    # -- eviction beside a plain tail --------------------------------------------------------------------------------

    def _place_two(self, part: Part, position: torch.Tensor, scores: torch.Tensor) -> None:
        """New tokens into the plain tail; from there they are evicted one by one, or sealed, group by group."""
        tail, new = self.tail_slots, scores.shape[-1]
        if new == 1 and self.own is None:
            tail.append(part, position, scores, None)
        else:
            if slots_used(tail):
                position = torch.cat([tail.positions(), position.int()], 2)
                scores = torch.cat([tail.scores(), scores], -1)
            real = (position[..., 0] >= 0).sum(-1)
            index, position = choose(self._by_age(position), position, int(real.max()), real[:, 0])
            tail.keep(index, position, scores.gather(2, index), part)
        self._drop_units(new)
        self._drop_plain()
        self._seal_units()

    def _held(self, slots: Any) -> torch.Tensor:
        """Units held per row, [B]; every head of a row holds as many."""
        if not slots_used(slots):
            return torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)
        return (slots.positions()[:, 0, :, 0] >= 0).sum(-1)

    def _always(self, slots: Any) -> torch.Tensor:
        """Units of any head that always stay, [B]."""
        return (self._shielded(slots.positions().amax(-1), slots.scores()) == INF).sum(-1).amax(-1)

    @property
    def plain(self) -> tuple[int, int]:
        """First and last tokens that are not sealed: a group leaves as a whole, and must not hold any that stay."""
        storage, retention = self.storage, self.retention
        if storage.group == 1:
            return storage.sinks, storage.residual
        return max(storage.sinks, retention.sinks), max(storage.residual, retention.recent)

    def _rows_allowed(self) -> torch.Tensor:
        limit, rows = self._allowance()
        return torch.full((self.batch_size,), limit, device=self.device) if rows is None else rows

    def _drop_units(self, new: int) -> None:
        """Encoded groups beyond the budget: the worst one while decoding, their share of what a chunk displaces."""
        slots, tail = self.kept_slots, self.tail_slots
        if not slots_used(slots):
            return
        group, limit = slots.group, self._rows_allowed()
        units, plain = self._held(slots), self._held(tail)
        excess = units * group + plain - limit
        if not bool((excess > 0).any()):
            return
        if new == 1:
            left = units - ((excess > 0) & (units > 0)).long()
        else:  # groups and plain tokens lose in proportion, whatever the scores: rows of a batch stay alike
            loose = (plain - self.retention.sinks - self.retention.recent).clamp_min(0)
            share = units * group / (units * group + loose).clamp_min(1)
            left = units - torch.minimum((excess.clamp_min(0) * share / group).round().long(), units)
            most = (limit - self._always(tail)).div(group, rounding_mode="floor")
            left = torch.minimum(left, most).maximum(self._always(slots))
        shielded = self._shielded(slots.positions().amax(-1), slots.scores())
        index, position = choose(shielded, slots.positions(), int(left.max()), left)
        slots.keep(index, position, slots.scores().gather(2, index))

    def _drop_plain(self) -> None:
        tail = self.tail_slots
        limit = (self._rows_allowed() - self._held(self.kept_slots) * self.kept_slots.group).clamp_min(0)
        plain = self._held(tail)
        if not bool((plain > limit).any()):
            return
        limit = torch.minimum(limit, plain)
        shielded = self._shielded(tail.positions()[..., 0], tail.scores())
        index, position = choose(shielded, tail.positions(), int(limit.max()), limit)
        tail.keep(index, position, tail.scores().gather(2, index))

    def _seal_units(self) -> None:
        """Whole groups of the oldest plain tokens, but for those of ``plain``."""
        tail, group = self.tail_slots, self.kept_slots.group
        if self.seen <= self.storage.quantize_after:
            return
        (sinks, residual), position = self.plain, tail.positions()[..., 0]
        # As if all sinks were there still: some heads may have evicted some, and all of them seal alike.
        count = (self._held(tail) - sinks - residual).clamp_min(0) // group
        most = int(count.max())
        if not most:
            return
        hidden = (position < 0) | (position < sinks)
        order = position.masked_fill(hidden, torch.iinfo(torch.int32).max).argsort(dim=-1, stable=True)
        index = order[..., : most * group]
        numbers = tail.positions().gather(2, index[..., None])[..., 0].unflatten(-1, (most, group))
        numbers = numbers.masked_fill((torch.arange(most, device=self.device) >= count[:, None])[:, None, :, None], -1)
        score = tail.scores().gather(2, index).unflatten(-1, (most, group)).mean(-1)
        plain = take_part(tail.units(), index)
        slots = self.kept_slots
        sealed = slots.fold(self.sealed.encode(plain.keys.values, plain.values.values))
        if slots_used(slots):
            numbers, score = torch.cat([slots.positions(), numbers], 2), torch.cat([slots.scores(), score], 2)
        units = (numbers[..., 0] >= 0).sum(-1)[:, 0]
        chosen, numbers = choose(self._by_age(numbers), numbers, int(units.max()), units)
        slots.keep(chosen, numbers, score.gather(2, chosen), sealed)
        left = self._held(tail) - count * group
        gone = torch.zeros_like(position, dtype=torch.bool).scatter(
            2,
            index,
            (torch.arange(most * group, device=self.device) < count[:, None] * group)[:, None].expand_as(index),
        )
        keep = self._by_age(tail.positions()).masked_fill(gone, -INF)
        chosen, numbers = choose(keep, tail.positions(), int(left.max()), left)
        tail.keep(chosen, numbers, tail.scores().gather(2, chosen))

    def _by_age(self, position: torch.Tensor) -> torch.Tensor:
        """A score that keeps everything that is a token."""
        return torch.zeros_like(position[..., 0], dtype=torch.float32).masked_fill(position[..., 0] < 0, -INF)

    def get_seq_length(self) -> int:
        """Tokens seen, evicted and waiting ones included."""
        return self.seen + self.skipped

    @property
    def defers(self) -> bool:
        return True

    # -- transformers: asking ----------------------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns of the mask for the next ``update``, position of the first); the last ones are the new tokens'."""
        total = self.seen + query_length
        slots = min(self.kept + query_length, total)  # rows that differ leave empty slots, in each container
        return slots, total - slots

    @property
    def kept(self) -> int:
        """Tokens held per row and head: the most of any."""
        return sum(slots.tokens for slots in self._containers())

    @property
    def quantized(self) -> int:
        return 0 if self.storage.lossless or not slots_used(self.kept_slots) else self.kept_slots.tokens

    def held_at(self, seen: int) -> list[Held]:
        """What the layer holds after one prompt of ``seen`` tokens; beside each token its number and score."""
        storage, full = self.storage, CODECS["full"]
        kept = self.retention.tokens(self.budget, seen)
        if not self.two:
            return [Held(storage.key_codec, storage.value_codec, kept, beside=8)]
        sealed = 0 if seen <= storage.quantize_after else max(kept - sum(self.plain), 0)
        sealed = sealed // storage.group * storage.group
        parts = [
            Held(storage.key_codec, storage.value_codec, sealed, beside=4),
            Held(full, full, kept - sealed, beside=8),
        ]
        return [part for part in parts if part.tokens]

    def remembered_at(self, seen: int, heads: int, query_heads: int, width: int) -> int:
        """Beside those: what the policy remembers, and where the heads of ``adaptive`` budgets lie."""
        ragged = self.retention.adaptive and self.retention.tokens(self.budget, seen) < seen
        return self.policy.memory_bytes(heads, query_heads, width, seen) + (16 * heads if ragged else 0)

    def far_at(self, seen: int) -> Held:
        """Of ``held_at``, what a placement may move off the device."""
        sealed = self.held_at(seen)[0]
        return sealed._replace(tokens=0) if self.two and sealed.key_codec.lossless else sealed

    @property
    def positions(self) -> torch.Tensor | None:
        """Which of its row's own tokens each head holds, ascending, [B, H, kept] int64; -1 after the last one."""
        if not self.kept:
            return None
        found = torch.cat([slots.positions().flatten(2) for slots in self._containers()], -1).long()
        return found.gather(-1, by_number(found))

    def _decoded(self, side: int) -> torch.Tensor | None:
        """Tokens in ascending order; zeros where a row or head holds fewer than others."""
        if not self.kept:
            return None
        position, pieces = [], []
        for slots in self._containers():
            part = slots.part().whole()
            state, codec = (part.keys, part.key_codec) if side == 0 else (part.values, part.value_codec)
            pieces.append(codec.decode(state, self.dtypes[side]))
            position.append(slots.positions().flatten(2).long())
        found, states = torch.cat(position, -1), torch.cat(pieces, 2)
        order = by_number(found)
        states = states.gather(2, order[..., None].expand(-1, -1, -1, states.shape[-1]))
        return states.masked_fill((found.gather(-1, order) < 0)[..., None], 0.0)

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Bytes by part: codes or plain values, scales, plain tokens beside encoded ones, positions and scores."""
        parts = dict.fromkeys(("payload", "scales", "residual", "indices", "scores", "spare"), 0)
        tiers = {"device": parts}
        for slots in self._containers():
            if isinstance(slots, FarSlots):
                tiers |= slots.bytes_by_tier(parts)
            else:
                plain = "residual" if slots is self.tail_slots and not self.storage.lossless else "payload"
                add_bytes(parts, plain, slots.keys, slots.values)
            parts["scores"] += slots.score.untyped_storage().nbytes()
            parts["indices"] += sum(t.untyped_storage().nbytes() for t in slots.numbers())
        parts["scores"] += sum(t.untyped_storage().nbytes() for t in self.memory.values())
        if self.pending is not None:  # no attention of ours has come yet
            waiting = [self.pending.keys, self.pending.values, *self.pending.part.keys, *self.pending.part.values]
            parts["residual"] += sum(
                {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in waiting}.values()
            )
        own = [] if self.own is None else [self.own, self.fed.real]
        tables = self.rope.tensors() if self.rope else ()
        parts["indices"] += sum(t.untyped_storage().nbytes() for t in (*own, *tables))
        return tiers

    # -- transformers: changing --------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """As ``KVLayer.crop``; exact only while nothing was evicted or sealed, and scores do not add up over time."""
        tokens_to_remove = int(tokens_to_remove)
        self.check_crop(tokens_to_remove)
        if not tokens_to_remove or not self.is_initialized:
            return
        left = max(self.seen + tokens_to_remove, 0)
        if self.pending is not None:
            self._drop_pending()
        if self.seen == left:
            return
        if not left:
            return self._forget_tokens()
        slots = self.tail_slots if self.two else self.kept_slots
        position = slots.positions()
        index, position = choose(
            self._by_age(position).masked_fill(position[..., 0] >= left, -INF), position, left, None
        )
        slots.keep(index, position, slots.scores().gather(2, index))
        self.seen = left

    def _forget_tokens(self) -> None:
        if not self.is_initialized:
            return
        shape = (self.batch_size, self.heads, self.widths, self.dtypes, self.device, self.is_initialized)
        self.reset()
        self.batch_size, self.heads, self.widths, self.dtypes, self.device, self.is_initialized = shape

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what ``crop`` would raise, and change nothing."""
        refuse_positive(tokens_to_remove)
        if self.pending is not None and tokens_to_remove and -tokens_to_remove < self.pending.keys.shape[2]:
            self._catch_up()
        why = self._refusal(tokens_to_remove)
        if why:
            raise ValueError(
                f"crop({tokens_to_remove}): layer {self.index} {why}; fork() the cache before the tokens that may be "
                "taken back, or use retention 'all'"
            )

    def _refusal(self, tokens_to_remove: int) -> str | None:
        """Why these tokens cannot be taken back exactly."""
        slots, waiting = self.kept_slots, self.waiting
        least = int(slots.size.min()) if isinstance(slots, Ragged) else self.kept  # of any head
        seen, tokens_to_remove = self.seen - waiting, min(tokens_to_remove + waiting, 0)
        if not tokens_to_remove or not self.kept or (seen + tokens_to_remove <= 0 and seen == least):
            return None
        if self.own is not None:
            return "holds padded rows"
        if seen != least:
            return f"has evicted {seen - least} tokens"
        if self.two and slots_used(self.kept_slots):
            return "has sealed tokens"
        if not self.policy.rolls_back:
            return f"has scores of policy {self.retention.name!r} that the removed tokens took part in"
        return None

    @property
    def exact(self) -> int:
        """How many tokens can be taken back exactly: any number up to this one."""
        self._catch_up()
        return next((n for n in range(self.seen) if self._refusal(-n - 1)), self.seen)

    @property
    def waiting(self) -> int:
        return 0 if self.pending is None else self.seen - self.pending.first

    @property
    def longest(self) -> int:
        return self.seen if self.own is None else int(self.own.max())

    def kept_at(self, seen: int) -> int:
        """Tokens that are kept of ``seen``."""
        return self.retention.tokens(self.budget, seen)

    def fork(self) -> EvictionLayer:
        """A layer that continues from here on its own: slots change in place, so they are copied."""
        self._catch_up()
        new = copy.copy(self)
        new.kept_slots, new.tail_slots = self.kept_slots.fork(), self.tail_slots.fork()
        new.memory = {name: t.clone() for name, t in self.memory.items()}
        return new

    def export(self) -> dict[str, Any]:
        """All that a snapshot has to hold, as plain values and tensors."""
        self._catch_up()
        if not self.is_initialized:
            return {}
        facts = {name: getattr(self, name) for name in FACTS}
        kinds = {"kept": self.kept_slots, "tail": self.tail_slots}
        held = {name: _export(slots) for name, slots in kinds.items() if slots_used(slots)}
        if self.home is not None and not self.home.in_place:
            self.home.discard()  # one staged copy at a time
        return {**facts, "own": self.own, "real": self.fed.real, "memory": self.memory, "held": held}

    def restore(self, facts: dict[str, Any]) -> None:
        """The inverse of ``export``."""
        self.reset()
        if not facts:
            return
        for name in FACTS:
            setattr(self, name, facts[name])
        self.is_initialized, self.own, self.memory = True, facts["own"], facts["memory"]
        self.fed = Fed(self.seen, facts["real"])
        if self.home is not None:
            self.home.device = self.device
        for name, fields in facts["held"].items():
            ragged = "size" in fields
            old = self.kept_slots if name == "kept" else self.tail_slots
            slots: Any = Ragged(old.key_codec, old.value_codec) if ragged else old
            codecs = (slots.key_codec, slots.value_codec)
            for side, codec, width in zip(("keys", "values"), codecs, self.widths, strict=True):
                kind: Any = type(codec.encode(torch.empty(1, 1, 0, width)))
                fields[side] = kind(*fields[side])
            for field, value in fields.items():
                setattr(slots, field, value)
            if isinstance(slots, FarSlots):
                slots.send_all()
                slots.home.discard()
            if name == "kept":
                self.kept_slots = slots

    def _map_rows(self, fn: Any) -> None:
        if not self.is_initialized:
            return
        self._catch_up()
        with torch.no_grad(), torch.inference_mode(False):
            probe = fn(torch.arange(self.batch_size))
            for slots in self._containers():
                slots.map_rows(fn)
            self.memory = {name: fn(t) for name, t in self.memory.items()}
            if self.own is not None:
                self.own, self.fed = fn(self.own), self.fed.map(fn)
        self.batch_size = probe.shape[0]


@lru_cache(maxsize=4)
def _in_order(first: int, batch: int, heads: int, new: int, device: torch.device) -> torch.Tensor:
    """Numbers of tokens none of which is a pad, [B, H, q]; made once for all layers."""
    with torch.inference_mode(False):
        return torch.arange(first, first + new, device=device).expand(batch, heads, new)


def _gather(mask: torch.Tensor, column: torch.Tensor, first: int) -> torch.Tensor:
    """Of a mask [B or 1, h, s, columns] what it says of ``column`` [B, H, n], [B, H or h, s, n]; what it does not speak
    of is seen. ``first`` is the token of its first column."""
    heads = max(mask.shape[1], column.shape[1])
    index = (column - max(first, 0)).repeat_interleave(heads // column.shape[1], 1)[:, :, None]
    index = index.expand(-1, -1, mask.shape[-2], -1)
    out = mask.expand(column.shape[0], heads, -1, -1).gather(-1, index.clamp(0, mask.shape[-1] - 1))
    return out.masked_fill(index < 0, True if mask.dtype == torch.bool else 0.0)


def _best(scores: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Which of a row's units are the best ``heads * count`` [B, 1], and of each head its ``SAFEGUARD`` share anyway;
    [B, H, n] bool."""
    batch, heads, n = scores.shape
    ranked = scores.argsort(dim=-1, descending=True, stable=True)
    floor = torch.arange(n, device=ranked.device) < (SAFEGUARD * count).int().clamp_min(1)  # [B, n], by rank
    floor = torch.zeros_like(ranked, dtype=torch.bool).scatter_(2, ranked, floor[:, None].expand_as(ranked))
    sure = scores.masked_fill(floor, INF).masked_fill(scores == -INF, -INF).flatten(1)
    best = sure.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(best).scatter_(1, best, torch.arange(heads * n, device=best.device).expand(batch, -1))
    return (rank < heads * count).view(batch, heads, n)


def _export(slots: Any) -> dict[str, Any]:
    names = ("position", "score", "used", "size", "start")
    fields = {name: getattr(slots, name) for name in names if hasattr(slots, name)}
    far = isinstance(slots, FarSlots)
    return fields | {side: tuple(t.cpu() if far else t for t in getattr(slots, side)) for side in ("keys", "values")}
