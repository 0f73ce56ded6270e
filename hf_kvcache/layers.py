"""How does transformers call us? One attention layer: the only place where storage, retention and placement meet.

    update(k, v)  ->  encode once, append  ->  what this call's queries attend to

Every key and value that attention sees is what a later query will see too: plain while it is among the most recent
tokens, through the codec from the moment it is sealed, also within one chunk. That is what makes one-shot, chunked and
token-by-token feeding agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import torch

from . import compat, cpu_decode
from .attention import NAME, full_precision, has_triton
from .codecs import CODECS, Codec
from .masked import ASK_FOR_OURS, MASKABLE, PADDED
from .part import Part, concat
from .placement import Home
from .plan import FOREVER, Visible
from .retention import Retention
from .rope import find_rope
from .spec import Storage
from .store import Slab, slot_tokens, twin
from .view import History, Moved, Stored


class Run:
    """Keys and values of one run of tokens, each in a slab of its own codec. Lengths are in tokens.

    ``make`` says what kind of slab, that is where the bytes live.
    """

    def __init__(
        self,
        key_codec: Codec,
        value_codec: Codec,
        limit: int | None = None,
        pinned: int = 0,
        phase: int = 0,
        make: Callable[..., Slab] = Slab,
    ) -> None:
        self.key_codec, self.value_codec = key_codec, value_codec
        self.limit, self.pinned = limit, pinned
        self.keys, self.values = (
            make(None if limit is None else limit // codec.group, pinned, phase, codec.group)
            for codec in (key_codec, value_codec)
        )

    def __len__(self) -> int:
        return len(self.keys) * self.key_codec.group

    @property
    def slabs(self) -> tuple[Slab, Slab]:
        return self.keys, self.values

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Part:
        return Part(self.key_codec, self.key_codec.encode(keys), self.value_codec, self.value_codec.encode(values))

    def append(self, part: Part) -> None:
        self.keys.append(part.keys)
        self.values.append(part.values)

    def fuses(self, plain: Part) -> bool:
        """Whether one kernel can encode a token into its slot: 8 bits, on CUDA."""
        codecs = {self.key_codec.name, self.value_codec.name} <= set(cpu_decode.EIGHT_BITS)  # both kernels know these
        in_place = self.keys.in_place and self.keys.state is not None
        if not (codecs and plain.keys.values.is_cuda and in_place and has_triton()):
            return False
        from .triton_decode import can_append

        return can_append(plain.keys.values) and can_append(plain.values.values)

    def append_one(self, plain: Part) -> None:
        """Encode one token straight into its slot."""
        from .triton_decode import append_quantized

        for slab, codec, states in (
            (self.keys, self.key_codec, plain.keys.values),
            (self.values, self.value_codec, plain.values.values),
        ):
            slot = slab.open_slot()
            append_quantized(states, slab.state, slot, codec)  # type: ignore[arg-type]

    def append_direct(self, keys: torch.Tensor, values: torch.Tensor) -> str | None:
        """One token on a CPU, in one call; "keys" or "values" (and nothing is stored) where one is not finite."""
        slots = self.keys.open_slot(), self.values.open_slot()
        states = self.keys.state, self.values.state
        bad = cpu_decode.append(keys, values, (self.key_codec, self.value_codec), states, slots)
        if bad is not None:
            for slab in self.slabs:
                slab.appended -= 1
                slab.overwrote = False
        return bad

    def put(self, part: Part, start: torch.Tensor, count: torch.Tensor) -> None:
        """Write the first ``count[b]`` tokens of row b from token ``start[b]`` on; see ``Slab.put``."""
        k, v = self.key_codec.group, self.value_codec.group
        self.keys.put(start // k, count // k, part.keys)
        self.values.put(start // v, count // v, part.values)

    def replace(self, part: Part) -> None:
        for slab in self.slabs:
            slab.clear()
        self.append(part)

    def drop(self, tokens: int) -> None:
        """Forget the first ``tokens`` tokens."""
        for slab, codec in zip(self.slabs, (self.key_codec, self.value_codec), strict=True):
            slab.drop(tokens // codec.group)

    def truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens."""
        for slab, codec in zip(self.slabs, (self.key_codec, self.value_codec), strict=True):
            slab.truncate(tokens // codec.group)

    def part(self) -> Part:
        return Part(self.key_codec, self.keys.view(), self.value_codec, self.values.view())

    def parts(self) -> list[Part]:
        """``part`` in the pieces that it is stored in, without a copy; some may hold one row for several."""
        pieces = zip(self.keys.views(), self.values.views(), strict=True)
        return [Part(self.key_codec, keys, self.value_codec, values) for keys, values in pieces]

    def fork(self) -> Run:
        """Another run of the same tokens; see ``Slab.fork``."""
        new = twin(self)
        new.keys, new.values = self.keys.fork(), self.values.fork()
        return new

    def last(self, tokens: int, then: Part | None = None) -> Part:
        """The pinned tokens and the newest ``tokens`` others, in token order, and ``then`` after them, in one copy."""
        keys = self.keys.last(tokens // self.key_codec.group, then and then.keys)
        values = self.values.last(tokens // self.value_codec.group, then and then.values)
        return Part(self.key_codec, keys, self.value_codec, values)


class Layout(NamedTuple):
    """How one call finds its keys, in tokens: ``sinks``, then ``held`` sealed slots, then ``raw`` plain ones."""

    sinks: int
    seal: int  # tokens that this call seals
    held: int
    raw: int
    joins: bool  # sealed slots are copied out before new tokens overwrite them
    doubled: bool  # raw holds tokens that this call seals

    @property
    def slots(self) -> int:
        return self.sinks + self.held + self.raw


class Rules(NamedTuple):
    """When a token is encoded and when it leaves, in tokens; numbers only, so that layers of a kind share plans."""

    apart: int  # first tokens, which are never encoded
    sinks: int  # of them, those that never leave a window
    residual: int
    group: int
    quantize_after: int
    has_tail: bool
    window: int | None
    limit: int | None  # slots of the sealed ring
    pinned: int

    def boundary(self, seen: int) -> int:
        """Tokens before this one are sinks or sealed once ``seen`` tokens were seen."""
        start = min(self.apart, seen)
        if seen <= self.quantize_after:
            return start
        return start + max(seen - self.apart - self.residual, 0) // self.group * self.group

    def sealed_since(self, token: torch.Tensor) -> torch.Tensor:
        """The first query that sees a token in its encoded form."""
        group_end = (token - self.apart).div(self.group, rounding_mode="floor").add(1) * self.group
        return (group_end + self.apart + self.residual - 1).clamp_min(self.quantize_after)

    def forms(self, number: torch.Tensor, encoded: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(first query that sees these tokens in this form, first that does not any more), as ``number`` int64."""
        since, until = torch.zeros_like(number), torch.full_like(number, FOREVER)
        if self.has_tail and encoded:
            since = self.sealed_since(number)
        elif self.has_tail:
            until = torch.where(number < self.apart, until, self.sealed_since(number))
        if self.window is not None:
            until = torch.where(number < self.sinks, until, torch.minimum(until, number + self.window))
        return since, until


@lru_cache(maxsize=4)
def slots_of(rules: Rules, layout: Layout, seen: int, new: int, device: torch.device) -> Visible:
    """The rules of one call's slots: sinks, sealed ones, plain ones. Made once for all layers of a kind."""
    total = seen + new
    sealed = rules.boundary(total) - layout.sinks  # tokens ever sealed
    if layout.joins:
        recent = torch.arange(sealed - layout.held + rules.pinned, sealed)
        tokens = torch.cat([torch.arange(rules.pinned), recent])
    else:
        tokens = slot_tokens(sealed, rules.limit, rules.pinned)
    runs = [
        (torch.arange(layout.sinks), False),
        (tokens + layout.sinks, True),
        (torch.arange(total - layout.raw, total), False),
    ]
    forms = [rules.forms(number, encoded) for number, encoded in runs]
    number = torch.cat([number for number, _ in runs])
    since, until = (torch.cat(pieces) for pieces in zip(*forms, strict=True))
    query = torch.arange(seen, total)
    return Visible(number[None], since[None], until[None], query[None], number[None], total).to(device)


class Held(NamedTuple):
    """A run of tokens as the planner counts it."""

    key_codec: Codec
    value_codec: Codec
    tokens: int
    beside: int = 0  # bytes per token and KV head that are kept beside keys and values


class KVLayer(compat.CacheLayerMixin):
    """The cache of one full-attention layer.

    Tokens lie in up to three runs, in token order, and ``boundary`` says where the second one ends:

        sinks [0, apart) plain  |  sealed [apart, boundary) encoded  |  tail [boundary, seen) plain

    Args:
        storage: how bits are stored.
        retention: which tokens stay.
        config: the decoder's config; its ``_attn_implementation`` says at every call who reads the result.
        index: the layer's number, for messages and for spreading growth over steps.
        home: where sealed tokens live, if not on the device.
    """

    is_compileable = False
    is_sliding = False
    torn = False  # an exception came while it stored tokens, and what was there cannot be told from what is new
    record_past = False
    blind = False  # the last tokens were stored without an attention, by ``catch_up``
    touched = False  # the model took new tokens apart, so that they wait for no attention of ours
    given = skipped = 0  # see ``pretend``
    mixed = False  # other layers of the cache have other slots, and masks are made for those

    def __init__(
        self, storage: Storage, retention: Retention, config: Any, index: int, home: Home | None = None
    ) -> None:
        # CacheLayerMixin.__init__ would assign `keys` and `values`, which are views of the store here.
        self.storage, self.retention = storage, retention
        self.config, self.index, self.home = config, index, home
        self.rope = find_rope(config, index) if retention.reposition else None
        self.bias = compat.position_bias(config)
        self.is_initialized = False
        self.reset()

    def reset(self) -> None:
        """Forget everything, shapes and dtypes included: equal to a new layer."""
        storage, sinks, window = self.storage, self.retention.sinks, self.retention.window
        full = CODECS["full"]
        pinned = sinks if storage.lossless else 0
        limit = None if window is None else -(-window // storage.group) * storage.group + pinned
        self.apart = 0 if storage.lossless else max(sinks, storage.sinks)
        self.rules = Rules(
            self.apart, sinks, storage.residual, storage.group, storage.quantize_after, storage.has_tail, window, limit,
            pinned,
        )  # fmt: skip
        self.sinks = Run(full, full, phase=self.index)
        if self.home is not None:
            self.home.clear()
        make = Slab if self.home is None else self.home.slab
        self.sealed = Run(storage.key_codec, storage.value_codec, limit, pinned, self.index, make)
        self.tail = Run(full, full)
        self.seen = 0
        self.chunk: Any = None  # new tokens whose mask has not come yet (``padded.Chunk``)
        self.padded = False  # a mask has shown pads, and they lie in slots of their own
        self.peaks: torch.Tensor | None = None  # not looked at yet
        if self.rope is not None:
            self.rope.clear()
        self.is_initialized = False
        for name in ("batch_size", "torn", "blind", "record_past", "given", "skipped"):
            self.__dict__.pop(name, None)

    def pretend(self, tokens: int) -> None:
        """To have seen ``tokens`` tokens: those that are held, and others that were left out before they came here."""
        self.given, self.skipped = self.seen, tokens - self.seen

    # -- an update that fails ----------------------------------------------------------------------------------------

    def mark(self, keep: bool | None = False) -> Any:
        """Where the layer is, for ``recall``; ``keep``: also after a full window has gone on (see ``Slab.mark``)."""
        slabs = [slab for run in self.runs for slab in run.slabs]
        return self.__class__, dict(vars(self)), [(slab, slab.mark(keep)) for slab in slabs]

    def recall(self, mark: Any) -> None:
        """After an exception in ``update``, or where attention refuses what it stored: be where ``mark`` was made, or
        *torn* where that is gone."""
        kind, fields, slabs = mark
        if not fields["is_initialized"]:
            self.reset()
            self.record_past = fields.get("record_past", False)
            return
        far = self.home is not None and not self.home.in_place
        halfway = self.seen == fields["seen"] and any(slab.appended != old[0]["appended"] for slab, old in slabs)
        if not all(slab.recalls(old) for slab, old in slabs) or (far and halfway):
            self.torn = True
            return
        for slab, old in slabs:
            slab.recall(old)
        self.__class__ = kind
        vars(self).clear()
        vars(self).update(fields)

    # -- where tokens lie --------------------------------------------------------------------------------------------

    def boundary(self, seen: int) -> int:
        """Tokens before this one are sinks or sealed once ``seen`` tokens were seen."""
        return self.rules.boundary(seen)

    def held_at(self, seen: int) -> list[Held]:
        """What is held once ``seen`` tokens were seen; arithmetic only."""
        full, storage, limit = CODECS["full"], self.storage, self.sealed.limit
        sinks, end = min(self.apart, seen), self.boundary(seen)
        sealed = end - sinks if limit is None else min(end - sinks, limit)
        return [
            Held(full, full, sinks),
            Held(storage.key_codec, storage.value_codec, sealed),
            Held(full, full, seen - end),
        ]

    def remembered_at(self, seen: int, heads: int, query_heads: int, width: int) -> int:
        """Bytes per row beside the tokens of ``held_at``, for a layer of these heads and keys of this width."""
        return 0

    def far_at(self, seen: int) -> Held:
        """Of ``held_at``, what a placement may move off the device."""
        return self.held_at(seen)[1]

    def _layout(self, new: int, ordered: bool = False) -> Layout:
        """How the next call of ``new`` tokens will find its keys; arithmetic only."""
        storage, seen, total = self.storage, self.seen, self.seen + new
        sinks, limit = min(self.apart, total), self.sealed.limit
        seal = self.boundary(total) - self.boundary(seen) - max(sinks - seen, 0)
        held = len(self.sealed) + seal
        joins = limit is not None and held > limit and (new > 1 or ordered)
        if limit is not None and joins:  # early queries still need what late tokens overwrite: joined before writing
            held = min(len(self.sealed), limit - 1 if storage.group == 1 else limit) + seal
        elif limit is not None:
            held = min(held, limit)
        doubled = new > 1 and seal > 0 and storage.has_tail
        start = self.boundary(min(seen + 1, total) if doubled else total)
        return Layout(sinks, seal, held, total - max(start, sinks), joins, doubled)

    # -- transformers: growing ---------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.batch_size, self.heads = key_states.shape[:2]
        self.widths = (key_states.shape[-1], value_states.shape[-1])
        self.dtypes = (key_states.dtype, value_states.dtype)
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Store new tokens; return all that they attend to.

        Args:
            key_states: [B, H, q, Dk], rotated.
            value_states: [B, H, q, Dv].
            *args, **kwargs: whatever this transformers passes on; of it, ``position_ids`` is looked at.

        Returns:
            Keys and values, [B, H, ``get_mask_sizes(q)[0]``, D] in the dtype of the arguments: tensors, or handles that
            turn into tensors when touched (only while the model's attention is "kvcache").

        Raises:
            ValueError: another batch size, shape or dtype than before; a prompt fed a second time; non-finite states
                into a lossy storage; a chunk that needs a mask under an attention that cannot apply it.
        """
        self.catch_up()
        direct = self._direct(key_states, value_states) if key_states.shape[2] == 1 else None
        if direct is not None:
            return self._append_direct(direct, key_states, value_states)
        self._check(key_states, value_states)
        self._refuse(key_states.shape[2])
        with_grad = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if self.retention.reposition and with_grad:
            raise ValueError("reposition=True turns queries, which has no gradient here: use torch.no_grad()")
        fresh = not self.is_initialized
        try:
            if fresh:
                self.lazy_initialization(key_states, value_states)
            waits = key_states.shape[2] > 1 or (key_states.shape[2] and not self.seen)
            if self.by_row and waits and self._attention() == NAME and not with_grad:
                from .padded import Chunk

                self.chunk, self.blind = Chunk(self, key_states, value_states), False
                history = History(
                    [], None, False, *self.dtypes, batch=self.batch_size, chunk=self.chunk,
                    columns=0 if self.mixed else None,
                )  # fmt: skip
                return Stored(history, 0), Stored(history, 1)
            with torch.no_grad(), full_precision(key_states.device):
                history = self._append(key_states, value_states, with_grad)
        except BaseException:
            if fresh:  # a refused first update leaves nothing behind
                self.reset()
            raise
        history = history._replace(positions=position_ids(args, kwargs))
        return self._present(history, (key_states, value_states) if with_grad else None)

    @property
    def by_row(self) -> bool:
        """Whether it matters which of a row's own tokens a slot holds, and attention can still tell (``padded.py``).

        Where scores are biased by a key's column, slots are all tokens, pads too, until ``_refuse_bias``.
        """
        if self.bias:
            return False
        return (self.retention.evicts or self.storage.has_tail or self.apart > 0) and self.home is None

    def _refuse(self, new: int) -> None:
        """What these tokens would make impossible, before they do."""
        retention, total = self.retention, self.seen + new
        if retention.reposition and self._attention() != NAME:
            out = ASK_FOR_OURS if compat.takes_attention(self.config) else "this model takes none, leave out reposition"
            raise ValueError(f"reposition=True needs queries that an attention of ours can turn: {out}")
        evicts = retention.window is not None and total > retention.sinks + retention.window
        if evicts and self.padded:
            raise ValueError(PADDED)
        self._refuse_bias(total)
        attention = self._attention()
        if new > 1 and attention not in (*MASKABLE, NAME, None) and self._needs_mask(self._layout(new), new, False):
            raise ValueError(
                f"layer {self.index}: this chunk of {new} tokens needs a mask that attention {attention!r} cannot "
                f"apply: {ASK_FOR_OURS}"
            )

    def _refuse_bias(self, total: int) -> None:
        """Where scores are biased by a key's column, columns have to stay tokens."""
        if self.bias and total > self._in_order:
            raise ValueError(
                f"layer {self.index}: {type(self.config).__name__} biases scores by key position ({self.bias}), and "
                f"this cache keeps no more than {self._in_order} tokens in their order: use retention 'all' with "
                "storage 'full', 'int8' or 'fp8', or a longer window or residual"
            )

    @property
    def _in_order(self) -> int:
        """The most tokens of which none is evicted and none has two forms."""
        storage, window = self.storage, self.retention.window
        plain = max(storage.quantize_after, self.apart + storage.residual + storage.group - 1)
        limits = [plain] * storage.has_tail + ([] if window is None else [self.retention.sinks + window])
        return min(limits, default=FOREVER)

    def _needs_mask(self, layout: Layout, new: int, ordered: bool) -> bool:
        """Whether "all keys up to the query's own token" is not what these queries see."""
        retention = self.retention
        full_window = retention.window is not None and self.seen + new > retention.sinks + retention.window
        plain_ring = new == 1 and not ordered and self.storage.group == 1 and not self.storage.has_tail
        plain_ring = plain_ring and not self._hides_sinks
        return layout.doubled or (full_window and not plain_ring)

    def _append(self, keys: torch.Tensor, values: torch.Tensor, ordered: bool) -> History:
        new = keys.shape[2]
        if self.home is not None:
            self.home.enter(keys.device)
        layout = self._layout(new, ordered)
        needed = self._needs_mask(layout, new, ordered)
        rules = partial(slots_of, self.rules, layout, self.seen, new, self.device)
        own = max(layout.sinks - self.seen, 0)  # of the new tokens, those that are sinks
        if own:
            self.sinks.append(self.sinks.encode(keys[:, :, :own], values[:, :, :own]))
        plain = self.tail.encode(keys[:, :, own:], values[:, :, own:])
        in_place = self.storage.has_tail and new == 1
        if in_place:
            self.tail.append(plain)
            plain = self.tail.part()
        elif len(self.tail):
            plain = join(self.tail.part(), plain)
        sealed = self._seal(plain.block(0, layout.seal), layout)
        raw = None
        if in_place:
            self.tail.drop(layout.seal)
            raw = self.tail.part()
        elif self.storage.has_tail:
            self.tail.replace(plain.block(layout.seal, plain.tokens))
            raw = plain.block(plain.tokens - layout.raw, plain.tokens)
        self.seen += new
        runs = [*(self.sinks.parts() if layout.sinks else ()), *sealed, raw]
        parts = [part for part in runs if part is not None and part.tokens] or [self.sealed.part()]
        history = self._history(parts, rules, needed, layout.doubled, new)
        history = history._replace(columns=0 if self.mixed or ordered else layout.slots)
        return history._replace(again=self._again(keys, values)) if new == 1 else history

    def _history(
        self, parts: list[Part], rules: Callable[[], Visible], needed: bool, doubled: bool, new: int
    ) -> History:
        fed = self.seen - new
        moved, pads = self._moved(fed), self.found_pads if self.retention.evicts else None
        return History(
            parts, rules, needed, *self.dtypes, doubled=doubled, pads=pads, moved=moved, window=self.retention.reach,
            batch=self.batch_size, fed=fed, queries=new,
        )  # fmt: skip

    def found_pads(self) -> None:
        """A mask hides tokens from all queries, and they have slots of their own here.

        Raises:
            ValueError: tokens are evicted, among them perhaps the row's first ones.
        """
        self.padded = True
        if self.kept_at(self.seen) < self.seen:  # whatever is still there, no window reaches it
            raise ValueError(PADDED)

    @property
    def defers(self) -> bool:
        """Whether new tokens may wait for their attention."""
        return self.by_row

    @property
    def waiting(self) -> int:
        """Tokens of the last forward that are not stored yet: they wait for their attention."""
        return 0 if self.chunk is None else self.chunk.keys.shape[2]

    def catch_up(self) -> None:
        """Store tokens that wait for their mask, where no attention of ours followed."""
        if self.chunk is not None:
            self.chunk.resolve(None)
            self.blind = True

    def _moved(self, query: int) -> Moved | None:
        """Where ``reposition`` lets queries stand for the sinks; ``None`` where they may stay."""
        retention = self.retention
        if self.rope is None or retention.window is None or not retention.sinks:
            return None
        edge = retention.sinks + retention.window - 1
        return Moved(retention.sinks, edge, query, self.seen - query, self.rope) if self.seen - 1 > edge else None

    def _direct(self, keys: torch.Tensor, values: torch.Tensor) -> Run | None:
        """The run to which this token goes, where it is one more like those before and one compiled call stores it.

        ``None`` for all else: another shape or dtype, gradients, a group to seal, a mask of our own.
        """
        storage, seen = self.storage, self.seen
        if self.home is not None or not self.is_initialized or seen < self.apart:
            return None
        if self.bias or self.padded:
            return None
        if not cpu_decode.appends(keys, values):
            return None
        rows = (self.batch_size, self.heads, 1)
        if keys.shape != (*rows, self.widths[0]) or values.shape != (*rows, self.widths[1]):
            return None
        if keys.dtype is not self.dtypes[0] or values.dtype is not self.dtypes[1]:
            return None
        run = self.tail if storage.has_tail else self.sealed
        if run.keys.state is None or run.key_codec.name not in cpu_decode.WRITES:
            return None
        if run.value_codec.name not in cpu_decode.WRITES or self._hides_sinks:
            return None
        if storage.has_tail:
            sealing = self.boundary(seen + 1) != self.boundary(seen)
            return None if sealing or self.retention.window is not None else run
        return None if self.retention.evicts and self._attention() != NAME else run

    def _append_direct(self, run: Run, keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, Any]:
        if run is self.tail:  # plain now, but to be encoded
            self._check_finite(keys, values)
        with full_precision(keys.device):
            bad = run.append_direct(keys, values)
        if bad is not None:
            self.refuse_non_finite(bad)
        layout = self._layout(1)
        rules = partial(slots_of, self.rules, layout, self.seen, 1, self.device)
        self.seen += 1
        parts = [part for run in self.runs if len(run) for part in run.parts()]
        history = self._history(parts, rules, False, False, 1)
        history = history._replace(again=self._again(keys, values), columns=0 if self.mixed else None)
        return self._present(history, None)

    def _again(self, keys: torch.Tensor, values: torch.Tensor) -> Callable[[torch.Tensor], History] | None:
        """How to store one token anew, should its mask say that it is a pad in some rows."""
        return partial(self._store_again, keys, values) if self.by_row else None

    def _store_again(self, keys: torch.Tensor, values: torch.Tensor, real: torch.Tensor) -> History:
        """The token that was stored last is a pad where ``real`` [B or 1, 1] says so.

        Raises:
            ValueError: storing it has evicted or sealed others.
        """
        from .padded import count_by_row

        try:
            self.crop(-1)
        except ValueError:
            raise ValueError(PADDED) from None
        with torch.no_grad(), full_precision(keys.device):
            return count_by_row(self).take(keys, values, real)

    @property
    def _hides_sinks(self) -> bool:
        """Whether the storage keeps first tokens plain that leave the window: they stay in their run, unseen."""
        return self.retention.window is not None and self.apart > self.retention.sinks

    def _seal(self, plain: Part, layout: Layout) -> list[Part]:
        """Encode these tokens, once and for all; return the sealed run as this call sees it."""
        if layout.seal == 1 and not layout.joins and self.sealed.fuses(plain):
            self.sealed.append_one(plain)
            return self.sealed.parts()
        encoded = self.sealed.encode(plain.keys.values, plain.values.values)
        joined = None
        if layout.joins:
            past = layout.held - layout.seal - self.sealed.pinned
            joined = self.sealed.last(past, encoded) if len(self.sealed) else encoded
        if layout.seal or self.sealed.keys.state is None:
            self.sealed.append(encoded)
        return self.sealed.parts() if joined is None else [joined]

    def _present(self, history: History, with_grad: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[Any, Any]:
        if with_grad is None and self._attention() == NAME:
            return Stored(history, 0), Stored(history, 1)
        history = history._replace(watch=self.retention.evicts)
        if with_grad is None:
            return history.decode()
        decoded, lossless = history.plain(), self.storage.lossless
        keys, values = (_attach(out, new, lossless) for out, new in zip(decoded, with_grad, strict=True))
        return history.masked(keys, 0), history.masked(values, 1)

    def _attention(self) -> str | None:
        return getattr(self.config, "_attn_implementation", None)

    # -- transformers: asking ----------------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Tokens seen, evicted ones included."""
        return self.seen + self.skipped + self.waiting

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that the next ``update`` of ``query_length`` tokens returns, position of the first of them)."""
        self.catch_up()
        self._refuse_bias(self.seen + query_length)  # Falcon adds its bias to the mask, before any update
        slots, total = self._layout(query_length).slots, self.seen + query_length
        if self._attention() == NAME:  # ours finds two slots of a token by itself
            slots = min(slots, total)
        return slots, max(total - slots, 0) + self.skipped

    def get_max_length(self) -> int:
        """-1: any number of tokens may be fed."""
        return -1

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether ``crop`` of what was seen is exact: not where tokens are gone or sealed in groups, nor where they may
        be and nothing was seen yet. ``generate`` asks after the prompt's forward."""
        if not (self.retention.evicts or self.storage.has_tail):
            return True
        return 0 < self.get_seq_length() == self.exact

    @property
    def kept(self) -> int:
        """Tokens held per row."""
        self.catch_up()
        return self._stored

    @property
    def _stored(self) -> int:
        """``kept``, without tokens that wait."""
        return len(self.sinks) + len(self.sealed) + len(self.tail)

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """What is held, decoded, in token order: [B, H, kept, Dk]; ``None`` before the first update."""
        return self._decoded(0)

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """As ``keys``: [B, H, kept, Dv]."""
        return self._decoded(1)

    def _decoded(self, side: int) -> torch.Tensor | None:
        self.catch_up()
        if not self.is_initialized or self.sealed.keys.state is None:
            return None
        pieces = []
        for run in self.runs:
            slab, codec = (run.keys, run.key_codec) if side == 0 else (run.values, run.value_codec)
            if slab.state is not None:
                pieces.append(codec.decode(slab.last(len(slab)), self.dtypes[side]))
        return torch.cat(pieces, 2)

    @property
    def quantized(self) -> int:
        """Tokens held in encoded form, per row."""
        self.catch_up()
        return 0 if self.storage.lossless else len(self.sealed)

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and part, as ``KVCache.memory`` names them."""
        self.catch_up()
        tiers: dict[str, dict[str, int]] = {}
        for run in self.runs:
            for slab in run.slabs:
                for tier, sizes in slab.bytes_by_tier().items():
                    parts = tiers.setdefault(tier, {})
                    for name, size in sizes.items():
                        name = "residual" if name == "payload" and run is not self.sealed else name
                        parts[name] = parts.get(name, 0) + size
        if self.rope is not None:
            parts = tiers.setdefault("device", {})
            parts["indices"] = parts.get("indices", 0) + sum(t.untyped_storage().nbytes() for t in self.rope.tensors())
        return tiers

    @property
    def runs(self) -> tuple[Run, Run, Run]:
        return self.sinks, self.sealed, self.tail

    # -- transformers: changing --------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: a positive number, or tokens that would have to come back are evicted or sealed.
        """
        tokens_to_remove = int(tokens_to_remove)
        self.check_crop(tokens_to_remove)
        tokens_to_remove = self._drop_waiting(tokens_to_remove)
        if not tokens_to_remove:
            return
        left = max(self.seen + tokens_to_remove, 0)
        self.seen = left
        self.sinks.truncate(left)
        self.tail.truncate(max(left - self.boundary(left), 0))
        self.sealed.truncate(max(self.boundary(left) - self.apart, 0))

    def _drop_waiting(self, tokens_to_remove: int) -> int:
        """Forget tokens whose attention never came, where that is all of them; what is left to be removed."""
        if self.chunk is None or -tokens_to_remove < self.waiting:
            return tokens_to_remove
        tokens_to_remove, self.chunk = tokens_to_remove + self.waiting, None
        return tokens_to_remove

    def _stored_to_remove(self, tokens_to_remove: int) -> int:
        """Of the tokens that a ``crop`` would remove, those that are stored (negative); waiting ones of which it would
        leave some are stored first."""
        refuse_positive(tokens_to_remove)
        if not tokens_to_remove or -tokens_to_remove < self.waiting:
            self.catch_up()
        return min(tokens_to_remove + self.waiting, 0)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what ``crop`` would raise, and change nothing."""
        stored = self._stored_to_remove(tokens_to_remove)
        if not stored:
            return
        evicted, left = self.seen - self._stored, max(self.seen + stored, 0)
        if self.skipped and left < self.given:
            raise ValueError(
                f"crop({tokens_to_remove}): layer {self.index} began with {self.given} states of "
                f"{self.given + self.skipped} tokens, which cannot be told apart; exact are up to {self.exact} tokens: "
                "fork() the cache before the tokens that may be taken back"
            )
        if evicted:
            raise ValueError(
                f"crop({tokens_to_remove}): layer {self.index} has evicted {evicted} tokens, and a rollback would need "
                "them back; fork() the cache before the tokens that may be taken back, or use retention 'all'"
            )
        if self.boundary(left) not in (left, self.boundary(self.seen)):  # tokens would have to be plain again
            group = self.storage.group
            whole = "" if self.storage.residual else f", or back to a multiple of {group} after {self.apart}"
            raise ValueError(
                f"crop({tokens_to_remove}): layer {self.index} holds only its last {len(self.tail)} tokens plain and "
                f"has sealed those before; exact are up to {self.exact} tokens{whole}: fork() the cache before the "
                "tokens that may be taken back, or use storage 'int8', as assisted decoding has to"
            )

    @property
    def exact(self) -> int:
        """How many tokens can be taken back exactly: any number up to this one."""
        return self.waiting + self._exact_stored()

    def _exact_stored(self) -> int:
        if self._stored != self.seen:
            return 0
        sealed, most = self.boundary(self.seen), self.seen - (self.given if self.skipped else 0)
        if not self.storage.has_tail or sealed <= self.apart:
            return most
        lefts = range(self.seen - 1, self.seen - most - 1, -1)
        return next((n for n, left in enumerate(lefts) if self.boundary(left) not in (sealed, left)), most)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was."""
        beam_idx = as_rows(beam_idx)
        self._map_rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, next to each other; sealed tokens without a limit are shared, not copied."""
        self.catch_up()
        for slab in self.sealed.slabs if self.sealed.limit is None and self.home is None else ():
            slab.freeze()
        self._map_rows(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only the rows ``indices`` (integers or a bool mask; a list or tuple of them)."""
        indices = as_rows(indices)
        self._map_rows(lambda t: t[indices.to(t.device)])

    def _map_rows(self, fn: Any) -> None:
        if not self.is_initialized:
            return
        self.catch_up()
        with torch.no_grad(), torch.inference_mode(False):
            probe = fn(torch.arange(self.batch_size))
            for run in self.runs:
                for slab in run.slabs:
                    slab.select_rows(fn)
        self.batch_size = probe.shape[0]

    def activate_past_recording(self) -> None:
        """From now on no token leaves: what would need that is refused, so that a later ``crop`` is not."""
        self.record_past = True

    def check_recording(self, new: int) -> None:
        """Refuse ``new`` more tokens where the past is recorded and they would displace others."""
        longest = self.longest + new
        if self.record_past and self.kept_at(longest) < longest:
            raise ValueError(
                f"layer {self.index} records the past, as assisted decoding asks, and {new} more tokens would evict "
                f"others under {self.retention.spec!r}: use retention 'all', or fewer tokens (crop() or reset() before)"
            )

    @property
    def longest(self) -> int:
        """Own tokens of the longest row."""
        return self.seen

    def kept_at(self, seen: int) -> int:
        """Tokens that are kept of ``seen``."""
        window = self.retention.window
        return seen if window is None else min(seen, self.retention.sinks + window)

    def fork(self) -> KVLayer:
        """A layer that continues from here on its own; both share what is stored and never changes."""
        self.catch_up()
        new = twin(self)
        new.sealed = self.sealed.fork()
        if self.apart:  # otherwise there are no sinks, ever: nothing to keep apart
            new.sinks = self.sinks.fork()
        if self.storage.has_tail:
            new.tail = self.tail.fork()
        return new

    def offload(self) -> None:
        """Placement is the cache's own business (see ``placement``)."""

    def prefetch(self) -> None:
        """See ``offload``."""

    # -- checks ------------------------------------------------------------------------------------------------------

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.shape[:3] != values.shape[:3]:
            shapes = f"{tuple(keys.shape)} and {tuple(values.shape)}"
            raise ValueError(f"layer {self.index}: keys and values of shapes {shapes} differ in batch, heads or tokens")
        if not self.storage.lossless:
            self._check_finite(keys, values)
        if not self.is_initialized:
            return
        if keys.shape[0] != self.batch_size:
            raise ValueError(
                f"layer {self.index} holds a batch of {self.batch_size}, got {keys.shape[0]}: reset() the cache, or "
                "use batch_repeat_interleave / batch_select_indices first"
            )
        for name, states, width, dtype in zip(
            ("keys", "values"), (keys, values), self.widths, self.dtypes, strict=True
        ):
            if (states.shape[1], states.shape[3]) != (self.heads, width):
                expected = (self.batch_size, self.heads, keys.shape[2], width)
                raise ValueError(f"layer {self.index}: {name} of shape {tuple(states.shape)}, expected {expected}")
            if states.dtype != dtype:
                raise ValueError(
                    f"layer {self.index} holds {name} of {dtype}, got {states.dtype}: keep one dtype, or reset()"
                )

    def _check_finite(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """One maximum per side. Elsewhere than on a CPU, looking at it now would wait for the device in every layer:
        the cache looks once per forward, at the next one (``raise_if_suspect``)."""
        if not keys.shape[2] or keys.is_meta:
            return
        if keys.device.type == "cpu" and math.isfinite(keys.detach().sum() + values.detach().sum()):
            return  # a sum that is finite has finite terms; one that is not may only have overflowed
        peaks = torch.stack([states.detach().abs().amax().float() for states in (keys, values)])
        if keys.device.type == "cpu":
            self.raise_if_suspect(peaks)
        else:
            self.peaks = peaks if self.peaks is None else torch.maximum(self.peaks, peaks)

    def raise_if_suspect(self, peaks: torch.Tensor) -> None:
        """``peaks``: largest absolute key and value, [2]; NaN and infinity are refused by a lossy storage."""
        for name, peak in zip(("keys", "values"), peaks.tolist(), strict=True):
            if not math.isfinite(peak):
                self.refuse_non_finite(name)

    def refuse_non_finite(self, name: str) -> NoReturn:
        """Raise what says that these "keys" or "values" cannot be stored."""
        raise ValueError(
            f"layer {self.index}: non-finite {name} cannot be stored as {self.storage.name}; check the model's "
            "dtype (float16 overflows), or use storage 'full'"
        )


class WindowLayer(compat.DynamicSlidingWindowLayer):
    """The native window of a sliding or chunked layer: stock, except that ``reset`` leaves nothing behind, and that a
    refusal changes nothing."""

    torn = False
    waiting = 0

    def reset(self) -> None:
        self.__init__(self.sliding_window)  # type: ignore[misc]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As stock, but the window is no view that keeps a long prompt alive.

        Raises:
            ValueError: another batch size than before.
        """
        if self.cumulative_length and self.keys is not None and self.keys.shape[0] != key_states.shape[0]:
            raise ValueError(
                f"a sliding layer holds a batch of {self.keys.shape[0]}, got {key_states.shape[0]}: reset() the cache, "
                "or use batch_repeat_interleave / batch_select_indices first"
            )
        out = super().update(key_states, value_states, *args, **kwargs)
        keys, values = self.keys, self.values
        if keys is not None and values is not None and keys.untyped_storage().nbytes() > 2 * keys.nbytes:
            self.keys, self.values = keys.clone(), values.clone()
        return out

    def pretend(self, tokens: int) -> None:
        """To have seen ``tokens`` tokens, of which the last ones are held.

        Raises:
            ValueError: fewer are held than a query will see.
        """
        held, needed = self.keys.shape[2], min(tokens, self.sliding_window - 1)  # type: ignore[union-attr]
        if held < needed:
            raise ValueError(
                f"a sliding layer of window {self.sliding_window} needs the last {needed} of {tokens} tokens, got "
                f"states of {held}"
            )
        self.cumulative_length = tokens

    def mark(self, keep: bool | None = False) -> Any:
        """Where the layer is, for ``recall``; an update makes new tensors, and changes none."""
        return dict(vars(self))

    def recall(self, mark: Any) -> None:
        """As if ``update`` had not been called."""
        vars(self).clear()
        vars(self).update(mark)

    def fork(self) -> WindowLayer:
        """A layer that continues from here on its own; every update makes new tensors, so these can be shared."""
        return twin(self)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what ``crop`` would raise, and change nothing."""
        refuse_positive(tokens_to_remove)
        if not tokens_to_remove or not self.cumulative_length:
            return
        held, left = self.keys.shape[2], max(self.cumulative_length + tokens_to_remove, 0)  # type: ignore[union-attr]
        if max(held + tokens_to_remove, 0) < min(left, self.sliding_window - 1):
            raise ValueError(
                f"crop({tokens_to_remove}): a sliding layer has dropped tokens beyond its window of "
                f"{self.sliding_window}; call cache.activate_past_recording() before the tokens that may be taken back"
            )


def as_rows(indices: Any) -> torch.Tensor:
    """Rows of a batch by number (or a bool mask), given as a tensor, list or tuple."""
    if isinstance(indices, torch.Tensor):
        return indices
    return torch.as_tensor(indices if len(indices) else torch.empty(0, dtype=torch.int64))


def refuse_positive(tokens_to_remove: int) -> None:
    if tokens_to_remove > 0:
        raise ValueError(
            f"crop({tokens_to_remove}): pass minus the number of tokens to remove, crop(-{tokens_to_remove})"
        )


def join(first: Part, second: Part) -> Part:
    """Two runs of the same codecs as one."""
    keys, values = concat([first.keys, second.keys]), concat([first.values, second.values])
    return first._replace(keys=keys, values=values)


def position_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """``update`` is called with nothing more, with a dict in third place, or with ``kwargs={...}``."""
    extra = kwargs.get("kwargs") or next((a for a in args if isinstance(a, dict)), None) or kwargs
    found = extra.get("position_ids") if isinstance(extra, dict) else None
    return found if isinstance(found, torch.Tensor) else None


def _attach(stored: torch.Tensor, new: torch.Tensor, lossless: bool) -> torch.Tensor:
    """Stored states with the gradient path of the newest tokens put back (straight through the codec)."""
    past, current = stored.split([stored.shape[2] - new.shape[2], new.shape[2]], dim=2)
    return torch.cat([past.detach(), new if lossless else new + (current - new).detach()], 2)
