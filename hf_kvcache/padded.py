"""What if the rows of a batch start at different tokens? A layer that counts every row's own.

With left padding, slot j of the batch is another token in every row: pads would be kept as sinks, take part in groups
of 4-bit keys, and windows would end too early. ``KVLayer`` lays all rows alike, and turns into a ``PaddedLayer`` in its
first forward when attention shows it pads. From then on each row lies as it would alone, from the left; pads are not
stored at all. ``own`` [B] says how many tokens a row has, and all else follows from it, row by row:

    sinks [0, apart)  |  sealed [apart, boundary(own))  |  tail [boundary(own), own)

Runs are as long as the longest row needs; slots that a row does not use are zeros which nobody attends to. Which of the
new tokens are pads stands in the mask, and only attention has that: ``update`` keeps them as a ``Chunk``, and they are
stored when attention comes.
"""

from __future__ import annotations

from typing import Any

import torch

from .attention import NAME, full_precision
from .codecs import CODECS
from .layers import KVLayer, Run, join
from .masked import ASK_FOR_OURS, PADDED
from .part import Part, map_state
from .plan import NOWHERE, Fed, Visible, look
from .slots import by_number
from .view import History, Moved, Stored


class Chunk:
    """The new tokens of one forward, until attention shows the mask that says which of them are pads."""

    def __init__(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.layer, self.keys, self.values, self.fed = layer, keys, values, layer.seen
        self.slots = layer.get_mask_sizes(keys.shape[2])[0]
        self.history: History | None = None

    def shape(self, side: int) -> torch.Size:
        """Of what attention will see, pads taken for tokens."""
        new = (self.keys, self.values)[side]
        return torch.Size((*new.shape[:2], self.slots, new.shape[3]))

    def resolve(self, mask: torch.Tensor | None) -> History:
        """Store these tokens; what they attend to. Looks at the mask once, where the tokens are stored."""
        layer, new = self.layer, self.keys.shape[2]
        real = None if mask is None else look(mask, self.fed + new).new(self.fed, new)
        if self.history is not None and real is not None and not self.history.by_row:
            layer.padded = True  # stored without a mask, pads and all, before it came
            raise ValueError(PADDED)
        if self.history is None:
            layer.chunk = None
            mark = layer.mark(None)
            try:
                with torch.no_grad(), full_precision(self.keys.device):
                    if real is not None or isinstance(layer, PaddedLayer):
                        self.history = count_by_row(layer).take(self.keys, self.values, real)
                    else:
                        self.history = layer._append(self.keys, self.values, False)
            except BaseException:
                layer.recall(mark)
                raise
        return self.history


def count_by_row(layer: KVLayer) -> PaddedLayer:
    """Make a layer, whose shapes are known, one that counts every row's own tokens; so far, all of them are."""
    if isinstance(layer, PaddedLayer):
        return layer
    runs, seen = layer.runs, layer.seen
    layer.__class__ = PaddedLayer  # the same object: the cache, and whoever holds the layer, keep it
    assert isinstance(layer, PaddedLayer)
    layer.begin(runs, seen)
    return layer


class PaddedLayer(KVLayer):
    """``KVLayer`` for rows that start at different tokens; made from one, never directly.

    Raises (``update``):
        ValueError: as ``KVLayer.update``; also another attention than "kvcache", and gradients.
    """

    own: torch.Tensor  # [B] int64, on the CPU: tokens seen per row, pads left out
    solid: int  # last tokens of all rows that are no pads
    fed: Fed  # which tokens were no pads

    def begin(self, runs: tuple[Run, Run, Run] | None = None, seen: int = 0) -> None:
        """Hold what ``runs`` do after ``seen`` tokens that were none of them pads, in slots that each row uses by
        itself."""
        storage, retention, full = self.storage, self.retention, CODECS["full"]
        self.apart = max(retention.sinks, storage.sinks)
        limit = None if retention.window is None else -(-retention.window // storage.group) * storage.group
        self.rules = self.rules._replace(apart=self.apart, limit=limit, pinned=0)
        self.sinks, self.tail = Run(full, full, phase=self.index), Run(full, full)
        self.sealed = Run(storage.key_codec, storage.value_codec, limit, phase=self.index)
        for slab in (slab for run in self.runs for slab in run.slabs):
            slab.ragged = True
        self.own, self.solid = torch.full((self.batch_size,), seen), seen
        self.fed = Fed.of(self.batch_size, seen)
        if runs is not None and seen:
            self._take_over(*runs)

    def _take_over(self, sinks: Run, sealed: Run, tail: Run) -> None:
        """Copies of what was held, every token in the slot that it has here."""
        none = torch.zeros_like(self.own)
        first, rest = (sinks.part() if len(sinks) else None), sealed.last(len(sealed)) if len(sealed) else None
        if rest is not None and self.storage.lossless and self.apart:  # they lay in the ring until now
            cut = min(self.apart, rest.tokens)
            first, rest = rest.block(0, cut), rest.block(cut, rest.tokens)
        ended = (self.boundaries(self.own) - self.apart).clamp_min(0)
        for run, part, end in ((self.sinks, first, none), (self.sealed, rest, ended), (self.tail, None, none)):
            part = tail.part() if run is self.tail and len(tail) else part
            if part is None or not part.tokens:
                continue
            start = end - part.tokens if run is self.sealed else none
            run.put(part, start, torch.full_like(none, part.tokens))

    def reset(self) -> None:
        """Forget everything, the padding too."""
        for name in ("own", "solid", "fed"):
            self.__dict__.pop(name, None)
        self.__class__ = KVLayer  # type: ignore[assignment]
        self.reset()

    # -- where tokens lie --------------------------------------------------------------------------------------------

    def boundaries(self, own: torch.Tensor) -> torch.Tensor:
        """``boundary`` of every row, [B]."""
        storage, start = self.storage, own.clamp_max(self.apart)
        sealed = (own - self.apart - storage.residual).clamp_min(0) // storage.group * storage.group
        return torch.where(own <= storage.quantize_after, start, start + sealed)

    def _sealed_tokens(self, own: torch.Tensor) -> torch.Tensor:
        """The token in every slot of the sealed run, [B, n]; -1: none."""
        slots, limit = torch.arange(len(self.sealed)), self.sealed.limit
        sealed = (self.boundaries(own) - self.apart).clamp_min(0)[:, None]
        if limit is None:
            return torch.where(slots < sealed, slots + self.apart, -1)
        token = sealed - 1 - (sealed - 1 - slots) % limit
        return torch.where(token >= 0, token + self.apart, -1)

    def _run_tokens(self) -> list[tuple[Run, torch.Tensor]]:
        """The runs in use, and the token in each of their slots."""
        sinks = _numbers(torch.zeros_like(self.own), self.own.clamp_max(self.apart), len(self.sinks))
        start = self.boundaries(self.own)
        tokens = [sinks, self._sealed_tokens(self.own), _numbers(start, self.own - start, len(self.tail))]
        return [(run, token) for run, token in zip(self.runs, tokens, strict=True) if len(run)]

    # -- growing -----------------------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        self.catch_up()
        if self._attention() != NAME:
            raise ValueError(f"layer {self.index} holds rows that start at different tokens: {ASK_FOR_OURS}")
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError(f"layer {self.index} holds padded rows, which take no gradients: use torch.no_grad()")
        self._check(key_states, value_states)
        self.chunk, self.blind = Chunk(self, key_states, value_states), False
        columns = 0 if self.mixed else None
        history = History([], None, False, *self.dtypes, batch=self.batch_size, chunk=self.chunk, columns=columns)
        return Stored(history, 0), Stored(history, 1)

    def take(self, keys: torch.Tensor, values: torch.Tensor, real: torch.Tensor | None) -> History:
        """Store new tokens, of which ``real`` [B or 1, q] are no pads (``None``: all)."""
        if real is not None:
            real = real.expand(keys.shape[0], -1).cpu()
        self.torn = True  # until all of it is stored
        history = self._store(keys, values, real)
        self.torn = False
        return history

    def _store(self, keys: torch.Tensor, values: torch.Tensor, real: torch.Tensor | None) -> History:
        new, has_tail = keys.shape[2], self.storage.has_tail
        if real is None:
            real = torch.ones(self.batch_size, new, dtype=torch.bool)
        before, after = self.own, self.own + real.sum(-1)
        number = before[:, None] + real.cumsum(-1) - 1  # [B, q]; of a pad, that of the token before it
        self.fed = self.fed.and_then(None if bool(real.all()) else real, new)
        # Every row's tokens from the left; what follows them in shorter rows is never attended to.
        front = (~real).to(torch.int8).argsort(dim=-1, stable=True)[:, : max(int(real.sum(-1).max()), 1)]
        fresh = _take(self.tail.encode(keys, values), front)

        start = before.clamp_max(self.apart)
        self.sinks.put(fresh, start, after.clamp_max(self.apart) - start)
        # The plain tokens that are no sinks: [origin, after) of every row, out of the tail and the new ones.
        origin = torch.where(before < self.apart, after.clamp_max(self.apart), self.boundaries(before))
        seal = (self.boundaries(after) - origin).clamp_min(0)
        longest = int((after - origin).max())
        token = (origin[:, None] + torch.arange(longest)).minimum((after - 1).clamp_min(0)[:, None])
        held = len(self.tail)
        index = torch.where(
            token < before[:, None], token - self.boundaries(before)[:, None], held + token - before[:, None]
        )
        plain = _take(join(self.tail.part(), fresh) if held else fresh, index.clamp(0, held + front.shape[1] - 1))

        seen: list[tuple[Part, torch.Tensor, bool]] = []  # what the queries attend to: tokens [B, n], encoded or not
        ring = new > 1 and self.sealed.limit is not None  # early queries need what late tokens overwrite
        if ring and len(self.sealed):
            past = self.sealed.part()
            seen.append((_map(past, torch.clone), self._sealed_tokens(before), True))
        if most := int(seal.max()):
            encoded = self.sealed.encode(*(side.values[:, :, :most] for side in (plain.keys, plain.values)))
            self.sealed.put(encoded, origin - self.apart, seal)
            if ring:
                seen.append((encoded, _numbers(origin, seal, most), True))
        if has_tail:
            self._keep_plain(plain, origin, after, seal, new)
            if new > 1:
                seen.append((plain, _numbers(origin, after - origin, longest), False))
        self.own, self.seen = after, self.seen + new
        self.solid = self.solid + new if bool(real.all()) else int(real.flip(-1).int().cumprod(-1).sum(-1).min())
        for run, tokens in self._run_tokens():
            once = run is self.sinks or not (ring if run is self.sealed else new > 1)
            if once:
                seen.insert(0 if run is self.sinks else len(seen), (run.part(), tokens, run is self.sealed))
        seen = [piece for piece in seen if piece[0].tokens] or [(fresh, torch.full_like(front, -1), False)]
        return self._seen(seen, number)

    def _keep_plain(self, plain: Part, origin: torch.Tensor, after: torch.Tensor, seal: torch.Tensor, new: int) -> None:
        """The tail becomes what is not sealed of ``plain``, whose first tokens are ``origin``."""
        left = after - origin - seal
        if new == 1 and plain.tokens and not bool(seal.any()) and len(self.tail):  # at most one token is put there
            last = (left - 1).clamp_min(0)
            return self.tail.put(_take(plain, last[:, None]), last, left.clamp_max(1))
        self.tail.replace(
            _take(plain, (seal[:, None] + torch.arange(int(left.max()))).clamp_max(max(plain.tokens - 1, 0)))
        )

    def _seen(self, seen: list[tuple[Part, torch.Tensor, bool]], number: torch.Tensor) -> History:
        forms = [self.rules.forms(tokens, encoded) for _, tokens, encoded in seen]
        since, until = (torch.cat(pieces, -1) for pieces in zip(*forms, strict=True))
        tokens, columns = torch.cat([tokens for _, tokens, _ in seen], -1), self.fed.columns()
        if columns.shape[1]:
            columns = columns.gather(1, tokens.clamp(0, columns.shape[1] - 1))
        else:
            columns = tokens
        until = until.masked_fill(tokens < 0, NOWHERE)
        rules = Visible(tokens, since, until, number, columns, self.seen).to(self.device)
        moved = None
        if self.rope is not None and self.retention.window is not None and len(self.sinks):
            edge = self.retention.sinks + self.retention.window - 1
            moved = Moved(min(self.retention.sinks, len(self.sinks)), edge, number, number.shape[1], self.rope)
        parts, new = [part for part, _, _ in seen], number.shape[1]
        return History(
            parts, lambda: rules, True, *self.dtypes, moved=moved, window=self.retention.reach, batch=self.batch_size,
            by_row=True, real=self.fed.whole(), fed=self.seen - new, queries=new,
        )  # fmt: skip

    # -- transformers: asking ----------------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Tokens seen, pads and evicted ones included."""
        return super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns of the mask for the next ``update``, position of the first); of them, the new tokens' are read."""
        self.catch_up()
        slots, total = self.kept + query_length, self.seen + query_length
        slots = min(slots, total)
        return slots, total - slots

    @property
    def positions(self) -> torch.Tensor | None:
        """Which of its row's own tokens are held, ascending, [B, H, kept] int64; -1 after the last one."""
        self.catch_up()
        held = self._tokens()
        if not held.shape[-1]:
            return None
        return held.gather(-1, self._order(held))[:, None].expand(-1, self.heads, -1)

    def _order(self, held: torch.Tensor) -> torch.Tensor:
        return by_number(held)[:, : int((held >= 0).sum(-1).max())]

    @property
    def kept(self) -> int:
        """Tokens held: the most of any row."""
        self.catch_up()
        return int((self._tokens() >= 0).sum(-1).max())

    def _tokens(self) -> torch.Tensor:
        """The token in each slot of all runs, [B, n]; -1: none."""
        return torch.cat([self.own.new_zeros(self.batch_size, 0), *(tokens for _, tokens in self._run_tokens())], -1)

    def _decoded(self, side: int) -> torch.Tensor | None:
        """Tokens in ascending order; zeros where a row holds fewer than others."""
        self.catch_up()
        pieces = []
        for run, _ in self._run_tokens():
            slab, codec = (run.keys, run.key_codec) if side == 0 else (run.values, run.value_codec)
            pieces.append(codec.decode(slab.view(), self.dtypes[side]))
        if not pieces:
            return None
        held = self._tokens()
        order = self._order(held)
        states = torch.take_along_dim(torch.cat(pieces, 2), order[:, None, :, None].to(self.device), 2)
        return states.masked_fill((held.gather(-1, order) < 0)[:, None, :, None].to(self.device), 0.0)

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        self.catch_up()
        tiers = super().bytes_by_tier()
        parts = tiers.setdefault("device", {})
        held = (self.own, self.fed.real)
        parts["indices"] = parts.get("indices", 0) + sum(t.untyped_storage().nbytes() for t in held)
        return tiers

    # -- transformers: changing --------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """As ``KVLayer.crop``; exact while the removed tokens are real in every row."""
        tokens_to_remove = int(tokens_to_remove)
        self.check_crop(tokens_to_remove)
        tokens_to_remove = self._drop_waiting(tokens_to_remove)
        if not tokens_to_remove:
            return
        if -tokens_to_remove >= self.seen:
            return self.reset()
        left = self.own + tokens_to_remove
        self.sinks.truncate(int(left.clamp_max(self.apart).max()))
        self.tail.truncate(int((left - self.boundaries(left)).max()))
        if not self.storage.has_tail:
            self.sealed.truncate(int((left - self.apart).clamp_min(0).max()))
        self.own, self.seen, self.solid = left, self.seen + tokens_to_remove, self.solid + tokens_to_remove
        self.fed = self.fed.until(self.seen)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what ``crop`` would raise, and change nothing."""
        why = self._refusal(-self._stored_to_remove(tokens_to_remove))
        if why:
            raise ValueError(
                f"crop({tokens_to_remove}): layer {self.index} {why}; exact are up to {self.exact} tokens: "
                "fork() the cache before the tokens that may be taken back, or use retention 'all' with storage 'int8'"
            )

    def _refusal(self, tokens: int) -> str | None:
        """Why these last tokens cannot be taken back exactly."""
        if not tokens or tokens >= self.seen:
            return None
        if tokens > self.solid:
            return f"has a padded row, and only its last {self.solid} tokens are no pads in any row"
        limit, left = self.sealed.limit, self.own - tokens
        if limit is not None and bool((self.boundaries(self.own) - self.apart > limit).any()):
            return "has evicted tokens"
        if self.storage.has_tail and bool((self.boundaries(left) != self.boundaries(self.own)).any()):
            return "has sealed tokens that would have to be plain again"
        return None

    @property
    def longest(self) -> int:
        return int(self.own.max())

    def _exact_stored(self) -> int:
        return next((n for n in range(self.solid) if self._refusal(n + 1)), self.solid)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, next to each other."""
        self._map_rows(lambda t: t.repeat_interleave(repeats, dim=0))

    def _map_rows(self, fn: Any) -> None:
        self.catch_up()
        super()._map_rows(fn)
        self.own, self.fed = fn(self.own), self.fed.map(fn)

    def fork(self) -> KVLayer:
        """A layer that continues from here on its own; both share what is stored until one of them writes."""
        self.catch_up()
        new = super().fork()
        new.sinks, new.tail = self.sinks.fork(), self.tail.fork()
        return new

    def export(self) -> dict[str, Any]:
        """What a snapshot needs beside the runs and what every layer has."""
        self.catch_up()
        slots = [len(run) for run in self.runs]
        return {"own": self.own, "solid": self.solid, "real": self.fed.real, "slots": slots}

    def needed(self) -> tuple[int, int, int]:
        """The slots that the longest row takes of each run."""
        ends = self.boundaries(self.own)
        sealed = (ends - self.apart).clamp(0, self.sealed.limit)
        return int(self.own.clamp_max(self.apart).max()), int(sealed.max()), int((self.own - ends).max())

    def restore(self, own: torch.Tensor, solid: int, real: torch.Tensor) -> None:
        """What ``export`` gave, but the runs."""
        self.begin()
        self.own, self.solid, self.fed = own.cpu(), solid, Fed(self.seen, real.cpu())


def _numbers(start: torch.Tensor, count: torch.Tensor, slots: int) -> torch.Tensor:
    """Tokens ``start, start + 1, ...`` of every row, [B, slots]; -1 from the ``count``-th on."""
    slot = torch.arange(slots)
    return torch.where(slot < count[:, None], start[:, None] + slot, -1)


def _map(part: Part, fn: Any) -> Part:
    return part._replace(keys=map_state(part.keys, fn), values=map_state(part.values, fn))


def _take(part: Part, index: torch.Tensor) -> Part:
    """Plain tokens ``index`` [B, n], on the CPU, of every row."""
    where = index[:, None, :, None].to(part.keys.values.device)
    return _map(part, lambda t: torch.take_along_dim(t, where, 2))
