"""Any sequence of operations leaves what a plain list of tensors says, for every kind of cache.

The model of a cache is, per row, every token in full precision. From it follows, by the documented rules written a
second time here, what is stored (to the bit, and within half a step of what came), which tokens are held, what each
query attends to, and every counter. Operations that are refused change nothing.

``HYPOTHESIS_PROFILE=long pytest tests/test_state_machine.py`` tries many and longer new sequences; the default is a
fixed choice of a few short ones.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from models import llama_config, low_bits, round_trip
from test_caches import memory_total, reachable_bytes
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_kvcache import KVCache, placement, snapshot, store
from hf_kvcache.attention import kvcache_attention
from hf_kvcache.codecs import rotation
from hf_kvcache.eviction import EvictionLayer
from hf_kvcache.slots import Ragged

LAYERS, HEADS, GROUPS, WIDTHS = 2, 2, 2, (8, 4)
LOW = "int4(group=4,residual=4,sinks=2)"
RESIDENT = [
    "full",
    "int8",
    "fp8",
    "fp8_e5m2",
    "int8(residual=5)",
    "int8(sinks=3,quantize_after=9,skip_layers=1)",
    "int8(rotate=on)",
    LOW,
    "int2(group=4,residual=0,sinks=0)",
    "int4(group=8,residual=3,sinks=1,key_axis=token)",
    "k4v2(group=8,residual=2,sinks=1,rotate=on)",
    "k8v2(group=4,residual=4,quantize_after=20)",
    "sink(2,6)",
    "sink(0,1)",
    "int8+sink(2,6)",
    "fp8+sink(0,5)",
    "int8(residual=3)+sink(1,7)",
    f"{LOW}+sink(3,9)",
]
FAR = [
    "cpu",
    "int8+cpu(keep_recent=3)",
    f"{LOW}+cpu",
    "int8+sink(2,6)+cpu",
    "int8+staged",
    f"{LOW}+staged(keep_recent=6)",
    "disk(DIR)",
    "int8+disk(DIR,keep_layers=0)",
    f"{LOW}+disk(DIR)",
    "sink(2,9)+disk(DIR,keep_recent=2)",
    "k8v2(group=4,residual=2,sinks=1)+sink(1,12)+disk(DIR)",
]
KEYS_ONLY = [
    "knorm(budget=9,sinks=2,recent=3)",
    "int8+random(budget=9,sinks=2,recent=3)",
    "fp8+keydiff(budget=0.5,sinks=1,recent=2)",
    f"{LOW}+knorm(budget=14,sinks=2,recent=3)",
    "k8v2(group=4,residual=2,sinks=1)+random(budget=15,sinks=1,recent=4)",
    "int4(group=4,residual=2,sinks=0)+knorm(budget=12,sinks=3,recent=4)",
    "int2(group=4,residual=6,sinks=5)+random(budget=14,sinks=1,recent=2)",
]
OURS = [
    "sink(2,6,reposition=on)",
    "tova(budget=9,sinks=2,recent=3)",
    "int8+h2o(budget=9,sinks=2,recent=3,pyramid=on)",
    "int8(residual=3)+snapkv(budget=12,sinks=2,recent=3,window=4,kernel=3)",
    "expected(budget=10,sinks=2,recent=3,future=16)",
    "knorm(budget=9,sinks=2,recent=3,adaptive=on)",
    "int8+snapkv(budget=10,sinks=2,recent=3,window=4,kernel=3,adaptive=on)",
    "random(budget=0.4,sinks=1,recent=3,adaptive=on,pyramid=on)",
    f"{LOW}+h2o(budget=14,sinks=2,recent=3)",
]
FAR_CHOSEN = [
    "knorm(budget=9,sinks=2,recent=3)+cpu",
    "int8+random(budget=9,sinks=2,recent=3)+staged",
    f"{LOW}+h2o(budget=14,sinks=2,recent=3)+staged",
]
CASES = [(spec, name) for spec in RESIDENT + KEYS_ONLY for name in ("sdpa", "kvcache")]
CASES += [(spec, ("sdpa", "kvcache")[i % 2]) for i, spec in enumerate(FAR)] + [
    (spec, "kvcache") for spec in OURS + FAR_CHOSEN
]

quick = settings(
    max_examples=4, stateful_step_count=16, derandomize=True, deadline=None, database=None, print_blob=False,
    suppress_health_check=list(HealthCheck), report_multiple_bugs=False, phases=(Phase.generate, Phase.shrink),
)  # fmt: skip
PROFILES = {"quick": quick, "long": settings(quick, max_examples=150, stateful_step_count=40, derandomize=False)}


# -- what is right -----------------------------------------------------------------------------------------------------


class Model:
    """All that was ever fed and not taken back, row by row."""

    def __init__(self):
        self.rows = []  # per row (keys [L, H, n, 8], values [L, H, n, 4])
        self.codes = []  # per row {(layer, side, head, first token): bytes}
        self.kept = []  # per row, layer and head: the tokens held under importance eviction
        self.bytes_out = 0

    def copy(self):
        return copy.deepcopy(self)

    @property
    def seen(self):
        return self.rows[0][0].shape[2] if self.rows else 0

    def states(self, layer, side):
        """[B, H, n, D]"""
        return torch.stack([row[side][layer] for row in self.rows])

    def append(self, states):
        """``states``: two of [L, B, H, n, D]."""
        if not self.rows:
            self.rows = [tuple(s[:, b, :, :0] for s in states) for b in range(states[0].shape[1])]
            self.codes, self.kept = [{} for _ in self.rows], [[[[]] * HEADS] * LAYERS for _ in self.rows]
        self.rows = [
            tuple(torch.cat([old, s[:, b]], 2) for old, s in zip(row, states, strict=True))
            for b, row in enumerate(self.rows)
        ]

    def select(self, rows):
        self.rows = [self.rows[i] for i in rows]
        self.codes = [dict(self.codes[i]) for i in rows]
        self.kept = [copy.deepcopy(self.kept[i]) for i in rows]

    def crop(self, left):
        self.rows = [tuple(s[:, :, :left] for s in row) for row in self.rows]
        self.codes = [{unit: code for unit, code in row.items() if unit[3] < left} for row in self.codes]
        self.kept = [[[[t for t in head if t < left] for head in layer] for layer in row] for row in self.kept]


def encoded(x, codec):
    """``x`` [B, H, whole groups, D] as it comes back; each value within half a step."""
    if codec.lossless or not x.shape[2]:
        return x
    y, turned = x.float(), x.shape[-1] in codec.rotated
    y = y @ rotation(x.shape[-1], "cpu") if turned else y
    if codec.group > 1:
        out, half = grouped(y, codec)
    else:
        out, amax = round_trip(y, codec.name), y.abs().amax(-1, keepdim=True)
        half = {
            "int8": amax / 254,
            "fp8_e4m3": torch.maximum(y.abs() / 16, amax / 448 / 2**10),
            "fp8_e5m2": torch.maximum(y.abs() / 8, amax / 57344 / 2**17),
        }[codec.name]
    assert ((out - y).abs() <= half * 1.0001 + 1e-30).all()
    return (out @ rotation(x.shape[-1], "cpu").T if turned else out).to(x.dtype)


def grouped(x, codec):
    """Keys by channel over ``group`` tokens, or by token over ``group`` channels; and half a step."""
    groups = x.unflatten(2, (-1, codec.group))
    if codec.axis == "channel":
        pieces, over = [groups], 3
    else:
        pieces, over = groups.split(codec.group, -1), -1
    out, steps = zip(*(low_bits(piece, over, codec.bits) for piece in pieces), strict=True)
    half = [(step / 2).expand_as(piece) for step, piece in zip(steps, pieces, strict=True)]
    return torch.cat(out, -1).flatten(2, 3), torch.cat(half, -1).flatten(2, 3)


def codecs(layer):
    return layer.storage.key_codec, layer.storage.value_codec


def attend(query, keys, values, other_keys, other_values, sealed, allowed):
    """Softmax attention; where ``sealed`` a query sees the other form of a key. All float64, [B, H, n, D]."""
    query = query.double().unflatten(1, (HEADS, GROUPS))  # [B, H, G, q, D]
    keys, values, other_keys, other_values = (t.double()[:, :, None] for t in (keys, values, other_keys, other_values))
    scores = torch.where(sealed, query @ other_keys.transpose(-1, -2), query @ keys.transpose(-1, -2))
    probs = (scores / math.sqrt(WIDTHS[0])).masked_fill(~allowed, -math.inf).softmax(-1)
    return ((probs * sealed) @ other_values + (probs * ~sealed) @ values).flatten(1, 2)


class Plain:
    """What a ``KVLayer`` holds of a model's tokens."""

    def __init__(self, layer, index):
        self.layer, self.index, self.storage = layer, index, layer.storage
        self.sinks, self.window = layer.retention.sinks, layer.retention.window
        self.apart = 0 if self.storage.lossless else max(self.sinks, self.storage.sinks)

    def sealed_end(self, seen):
        start = min(self.apart, seen)
        if seen <= self.storage.quantize_after:
            return start
        return start + max(seen - self.apart - self.storage.residual, 0) // self.storage.group * self.storage.group

    def tokens(self, seen):
        """(plain sinks, sealed tokens, plain tail)"""
        start, end = min(self.apart, seen), self.sealed_end(seen)
        sealed = list(range(start, end))
        if self.window is not None:
            room = -(-self.window // self.storage.group) * self.storage.group
            pinned = self.sinks if self.storage.lossless else 0
            sealed = sealed[:pinned] + sealed[pinned:][-room:]
        return list(range(start)), sealed, list(range(end, seen))

    def forms(self, model):
        """Per side, every token as it came and as it is sealed (where its group is full)."""
        whole = (model.seen - self.apart) // self.storage.group * self.storage.group
        end = self.apart + max(whole, 0)
        plain = [model.states(self.index, side) for side in (0, 1)]
        return plain, [
            torch.cat([x[:, :, : self.apart], encoded(x[:, :, self.apart : end], codec), x[:, :, end:]], 2)
            for x, codec in zip(plain, codecs(self.layer), strict=True)
        ]

    def content(self, model):
        sinks, sealed, tail = self.tokens(model.seen)
        plain, coded = self.forms(model)
        return [
            torch.cat([x[:, :, sinks], y[:, :, sealed], x[:, :, tail]], 2) for x, y in zip(plain, coded, strict=True)
        ]

    def counts(self, model):
        sinks, sealed, tail = self.tokens(model.seen)
        return len(sinks) + len(sealed) + len(tail), 0 if self.storage.lossless else len(sealed)

    def output(self, model, query):
        """Attention of the newest tokens of a model."""
        n, new = model.seen, query.shape[2]
        p, t = torch.arange(n - new, n)[:, None], torch.arange(n)
        allowed = t <= p
        if self.window is not None:
            allowed &= (t < self.sinks) | (p - t < self.window)
        ends = torch.tensor([self.sealed_end(i + 1) for i in range(n - new, n)])[:, None]
        plain, coded = self.forms(model)
        return attend(query, *plain, *coded, (t >= self.apart) & (t < ends), allowed)

    def units(self):
        """Per side: first tokens [B, H, u] and states of all that is encoded."""
        layer, sealed = self.layer, self.tokens(self.layer.seen)[1]
        for slab, codec in zip(layer.sealed.slabs, codecs(layer), strict=True):
            if len(slab):
                state = slab.last(len(slab))
                yield torch.tensor(sealed[:: codec.group]).expand(*state[0].shape[:2], -1), state

    def may_crop(self, model, left):
        seen = model.seen
        if left == seen:
            return True
        return self.counts(model)[0] == seen and self.sealed_end(left) in (left, self.sealed_end(seen))


class Chosen:
    """What an ``EvictionLayer`` holds: which tokens, a policy decides; the model checks that it could."""

    def __init__(self, layer, index):
        self.layer, self.index, self.storage, self.retention = layer, index, layer.storage, layer.retention
        self.two = self.storage.has_tail or bool(self.storage.sinks)

    def kept(self, model):
        """[B, H, m], padded with -1."""
        heads = [row[self.index] for row in model.kept]
        most = max(len(head) for row in heads for head in row)
        return torch.tensor([[head + [-1] * (most - len(head)) for head in row] for row in heads])

    def observe(self, model, new):
        """Take over which tokens are held after ``new`` more were fed."""
        positions, retention, seen = self.layer.positions, self.retention, model.seen
        assert positions is not None or not seen
        limit = retention.tokens(self.layer.budget, seen)
        always = {*range(min(retention.sinks, seen)), *range(max(seen - retention.recent, 0), seen)}
        for b, row in enumerate(model.kept):
            heads = []
            for h, before in enumerate(row[self.index]):
                found = [] if positions is None else positions[b, h].tolist()
                held = [t for t in found if t >= 0]
                assert found == held + [-1] * (len(found) - len(held))
                assert held == sorted(set(held)) and set(held) <= {*before, *range(seen - new, seen)}
                assert always <= set(held)
                if retention.name == "knorm" and not retention.adaptive and not self.two:
                    norm = model.rows[b][0][self.index, h].float().norm(dim=-1).tolist()
                    others = sorted(norm[t] for t in {*before, *range(seen - new, seen)} - always)
                    stay = sorted(norm[t] for t in set(held) - always)  # by norm: of equal ones, any may stay
                    assert stay == pytest.approx(others[: limit - len(always)], rel=1e-6)
                heads.append(held)
            self.check_budget(row[self.index], heads, new, limit)
            row[self.index] = heads

    def check_budget(self, before, heads, new, limit):
        if self.retention.adaptive:
            total, most = sum(map(len, heads)), limit * HEADS
            assert total == min(most, sum(map(len, before)) + new * HEADS) or (new == 1 and total <= most)
        elif self.two:
            assert all(len(head) <= limit for head in heads)
            assert all(len(head) > limit - self.storage.group for head in heads)
        else:
            assert all(len(head) == min(limit, len(old) + new) for head, old in zip(heads, before, strict=True))

    def containers(self):
        return [s for s in (self.layer.kept_slots, self.layer.tail_slots) if isinstance(s, Ragged) or s.used]

    def forms(self, model):
        """Per side, every token as it is stored, where it is held."""
        out = [model.states(self.index, side).clone() for side in (0, 1)]
        slots = self.layer.kept_slots
        if self.storage.lossless or not (isinstance(slots, Ragged) or slots.used):
            return out
        members = slots.positions().flatten(2).long()
        for x, codec in zip(out, codecs(self.layer), strict=True):
            where = members.clamp_min(0)[..., None].expand(-1, -1, -1, x.shape[-1])
            if where.shape[2]:
                form = encoded(x.gather(2, where), codec)
                for b, h in ((b, h) for b in range(len(x)) for h in range(HEADS)):
                    real = members[b, h] >= 0
                    x[b, h, members[b, h, real]] = form[b, h, real]
        return out

    def held(self, model):
        """Per side what is held, [B, H, m, D], zeros where a head holds less; and which of it is there."""
        kept = self.kept(model)
        there = kept >= 0
        where = kept.clamp_min(0)[..., None]
        forms = self.forms(model) if kept.shape[2] else [model.states(self.index, side) for side in (0, 1)]
        return [
            x.gather(2, where.expand(-1, -1, -1, x.shape[-1])).masked_fill(~there[..., None], 0.0) for x in forms
        ], there

    def content(self, model):
        assert self.layer.positions is None or torch.equal(self.layer.positions, self.kept(model))
        return self.held(model)[0]

    def counts(self, model):
        kept, slots = self.kept(model).shape[2], self.layer.kept_slots
        if self.storage.lossless:
            return kept, 0
        return kept, slots.tokens if isinstance(slots, Ragged) or slots.used else 0

    def before(self, model):
        """What the next queries find here."""
        return self.held(model) if model.rows else None

    def output(self, model, query, before):
        new = query.shape[2]
        fresh = [model.states(self.index, side)[:, :, model.seen - new :] for side in (0, 1)]
        if not self.two:
            fresh = [encoded(x, codec) for x, codec in zip(fresh, codecs(self.layer), strict=True)]
        allowed = torch.ones(new, new, dtype=torch.bool).tril()[None, None, None]
        if before is not None:
            held, there = before
            fresh = [torch.cat(pair, 2) for pair in zip(held, fresh, strict=True)]
            shape = (*there.shape[:2], 1, new)
            allowed = torch.cat([there[:, :, None, None].expand(*shape, -1), allowed.expand(*shape, -1)], -1)
        return attend(query, *fresh, *fresh, torch.zeros(1, dtype=torch.bool), allowed)

    def units(self):
        slots = self.layer.kept_slots
        if isinstance(slots, Ragged) or slots.used:
            part = slots.part().whole() if isinstance(slots, Ragged) else slots.units()
            for state in (part.keys, part.values):
                yield slots.positions()[..., 0].long(), state

    def may_crop(self, model, left):
        seen, all_there = model.seen, all(len(h) == model.seen for row in model.kept for h in row[self.index])
        if left == seen or not seen:
            return True
        if not left and all_there:
            return True
        sealed = self.two and self.counts(model)[1]
        return all_there and not sealed and self.layer.policy.rolls_back


# -- the machine -------------------------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    spec, attention = "full", "sdpa"

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.config = llama_config(LAYERS)
        self.config._attn_implementation = self.attention
        self.module = torch.nn.Module()
        self.module.num_key_value_groups = GROUPS
        self.module.is_causal = True
        self.cache, self.model = self.new(), Model()
        self.others = []
        self.saves = 0

    def new(self):
        cache = KVCache.from_spec(self.config, self.spec.replace("DIR", self.folder.name).replace("staged", "cpu"))
        if "staged" in self.spec:
            cache.placement.stage = True  # copies, though the tier is the same memory
        return cache

    def teardown(self):
        for pair in [(self.cache, self.model), *self.others]:
            self.cache, self.model = pair
            if sys.exc_info()[0] is None:  # what a step raised says more than what it left
                self.check()
            self.cache.close()
        self.folder.cleanup()

    @initialize(batch=st.integers(1, 3), half=st.sampled_from([False, False, True]))
    def begin(self, batch, half):
        self.batch, self.dtype = batch, torch.bfloat16 if half else torch.float32

    # -- growing

    def feed(self, n, seed, size=1.0, known=False):
        draw = torch.Generator().manual_seed(seed)
        batch, model, cache = len(self.model.rows) or self.batch, self.model, self.cache
        shape = (LAYERS, batch, HEADS, n)
        states = [(torch.randn(*shape, width, generator=draw) * size).to(self.dtype) for width in WIDTHS]
        query = torch.randn(batch, HEADS * GROUPS, n, WIDTHS[0], generator=draw)
        first = model.seen
        positions = torch.arange(first, first + n).expand(batch, -1)
        views = self.views()
        before = [view.before(model) if isinstance(view, Chosen) else None for view in views]
        sealed = [0 if isinstance(v, Chosen) else v.sealed_end(first) - min(v.apart, first) for v in views]
        model.append(states)
        if n:  # scores stay small, so that rounding errors do
            query /= 1 + max(row[0].abs().max().float() for row in model.rows)
        query = query.to(self.dtype)
        for i, view in enumerate(views):
            length, offset = cache.layers[i].get_mask_sizes(n)
            assert offset == max(first + n - length, 0)
            extra = {"kwargs": {"position_ids": positions}} if known else {}
            out = cache.update(states[0][i], states[1][i], i, **extra)
            assert all(t.dtype == self.dtype for t in out)
            assert [tuple(t.shape) for t in out] == [(batch, HEADS, length, width) for width in WIDTHS]
            attended = self.attend(query, *out, first, length, offset)
            if isinstance(view, Chosen):
                view.observe(model, n)
            if n and not view.layer.retention.reposition:
                expected = view.output(model, query, *([before[i]] if isinstance(view, Chosen) else []))
                limit = (3e-2 if self.dtype == torch.bfloat16 else 2e-5) * (1e-9 + states_size(model, i))
                assert (attended.double() - expected).abs().max() <= limit
            if isinstance(view, Plain) and view.layer.home is not None:
                more = view.sealed_end(first + n) - min(view.apart, first + n) - sealed[i]
                model.bytes_out += batch * HEADS * more * bytes_of_token(view.layer, self.dtype)

    def attend(self, query, keys, values, first, length, offset):
        """As a model does: transformers' mask, and the attention function; [B, Hq, n, D]."""
        n, mask = query.shape[2], None
        if not n and not (self.attention == "kvcache" and isinstance(self.cache.layers[0], EvictionLayer)):
            return None
        if first and n > 1:
            mask = (torch.arange(length) + offset <= torch.arange(first, first + n)[:, None])[None, None]
        if self.attention == "kvcache":
            return kvcache_attention(self.module, query, keys, values, None, None)[0].transpose(1, 2)
        return sdpa_attention_forward(self.module, query, keys, values, mask)[0].transpose(1, 2)

    @rule(
        n=st.integers(0, 13), seed=st.integers(0, 99), known=st.booleans(),
        size=st.sampled_from([1.0, 1.0, 1e-3, 200.0, 0.0]),
    )  # fmt: skip
    def update(self, n, seed, size, known):
        self.feed(n, seed, size, known)

    @rule(n=st.integers(1, 7), seed=st.integers(0, 99), known=st.booleans())
    def decode(self, n, seed, known):
        for step in range(n):
            self.feed(1, seed + step, known=known)

    # -- changing

    @rule(tokens=st.integers(0, 12), name=st.sampled_from(["crop", "rollback"]))
    def take_back(self, tokens, name):
        seen, left = self.model.seen, max(self.model.seen - tokens, 0)
        allowed = all(view.may_crop(self.model, left) for view in self.views())
        allowed &= name == "crop" or tokens <= seen
        assert self.cache.can_rollback(tokens) == (allowed and tokens <= seen)
        assert self.cache.can_rollback(self.cache.exact_rollback())
        do = (lambda: self.cache.crop(-tokens)) if name == "crop" else (lambda: self.cache.rollback(tokens))
        if not allowed:
            return refuses(do, "evicted|sealed|scores of policy|has seen")
        do()
        self.model.crop(left)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def reorder(self, data):
        batch = len(self.model.rows)
        rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
        self.cache.reorder_cache(torch.tensor(rows))
        self.model.select(rows)

    @precondition(lambda self: 0 < len(self.model.rows) <= 2)
    @rule(repeats=st.integers(1, 3))
    def repeat(self, repeats):
        self.cache.batch_repeat_interleave(repeats)
        self.model.select([i for i in range(len(self.model.rows)) for _ in range(repeats)])

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), by_mask=st.booleans())
    def select(self, data, by_mask):
        batch = len(self.model.rows)
        rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=batch))
        rows = sorted(set(rows)) if by_mask else rows
        index = torch.tensor([i in rows for i in range(batch)]) if by_mask else torch.tensor(rows)
        self.cache.batch_select_indices(index)
        self.model.select(rows)

    @rule()
    def reset(self):
        self.cache.reset()
        self.model = Model()

    @precondition(lambda self: self.model.rows)
    @rule()
    def refused(self):
        """Wrong calls raise, and the invariants see whether anything changed."""
        layer, batch = self.cache.layers[0], len(self.model.rows)
        good = [torch.ones(batch, HEADS, 2, width, dtype=self.dtype) for width in WIDTHS]
        wrong = [
            ([t.expand(batch, -1, -1, -1).repeat(2, 1, 1, 1) for t in good], "batch"),
            ([t.double() for t in good], "keep one dtype"),
            ([torch.cat([t, t], 1) for t in good], "expected"),
            ([good[0], good[1][..., :-1]], "expected"),
            ([good[0], good[1][:, :, :-1]], "differ"),
        ]
        if not layer.storage.lossless:
            for factors in ((math.nan, 1), (1, math.nan), (math.inf, 1), (1, -math.inf)):
                bad = [t * factor for t, factor in zip(good, factors, strict=True)]
                wrong += [(bad, "finite"), ([t[:, :, :1] for t in bad], "finite")]
        for states, message in wrong:
            refuses(lambda states=states: self.cache.update(*states, 0), message)
        refuses(lambda: self.cache.crop(1), "crop")
        refuses(lambda: self.cache.rollback(-1), "rollback")
        for move in (self.cache.reorder_cache, self.cache.batch_select_indices):
            with pytest.raises((IndexError, RuntimeError)):
                move(torch.tensor([0] * (batch - 1) + [batch]))

    # -- copies

    @rule(pickled=st.booleans())
    def duplicate(self, pickled):
        old = self.cache
        self.cache = pickle.loads(pickle.dumps(old)) if pickled else copy.deepcopy(old)
        old.close()

    @precondition(lambda self: len(self.others) < 3)
    @rule(stay=st.booleans())
    def fork(self, stay):
        fork = self.cache.fork()
        pair = (fork, self.model.copy())
        if not stay:
            pair, self.cache, self.model = (self.cache, self.model), *pair
        self.others.append(pair)

    @precondition(lambda self: self.others)
    @rule()
    def switch(self):
        self.others.append((self.cache, self.model))
        self.cache, self.model = self.others.pop(0)

    @rule()
    def save_and_load(self):
        self.saves += 1
        path = Path(self.folder.name) / f"saved-{self.saves}"
        old = self.cache
        old.save(path)
        if "staged" in self.spec:
            self.cache = self.new()
            snapshot.restore(self.cache, snapshot.read(path))
        else:
            self.cache = KVCache.load(path, self.config, spec=old.spec)
        old.close()
        self.model.bytes_out = 0  # it counts what moves from now on

    # -- what must hold

    def views(self):
        layers = enumerate(self.cache.layers)
        return [(Chosen if isinstance(layer, EvictionLayer) else Plain)(layer, i) for i, layer in layers]

    @invariant()
    def check(self):
        cache, model = self.cache, self.model
        assert cache.get_seq_length() == model.seen == cache.layers[1].get_seq_length()
        if not model.rows:
            assert all(layer.keys is None and layer.values is None for layer in cache.layers)
            assert not any(vars(cache.stats()).values())
        else:
            for view in self.views():
                self.check_layer(view)
            self.check_counters()
        assert cache.nbytes == memory_total(cache) == reachable_bytes(cache)

    def check_layer(self, view):
        layer, model = view.layer, self.model
        for side, expected in enumerate(view.content(model)):
            found = (layer.keys, layer.values)[side]
            if found is None:
                assert not model.seen
                continue
            same = torch.equal(found, expected)
            if found.shape[-1] in getattr(codecs(layer)[side], "rotated", ()):  # sums in another order
                limit = 1e-2 if self.dtype == torch.bfloat16 else 1e-6
                same = torch.allclose(found, expected, rtol=limit, atol=limit * 200)
            assert same, f"side {side} of layer {view.index}"
        if not layer.storage.lossless:
            self.check_codes(view)

    def check_codes(self, view):
        """What was sealed once has the bytes that it was given then."""
        for side, (first, state) in enumerate(view.units()):
            flat = torch.cat([t.contiguous().flatten(3).contiguous().view(torch.uint8) for t in state], -1).numpy()
            for b, codes in enumerate(self.model.codes):
                for h, row in enumerate(first[b].tolist()):
                    for u, t in enumerate(row):
                        if t >= 0:
                            code = flat[b, h, u].tobytes()
                            assert codes.setdefault((view.index, side, h, t), code) == code

    def check_counters(self):
        model, stats, views = self.model, self.cache.stats(), self.views()
        counts = [view.counts(model) for view in views]
        kept, quantized = counts[0][0], max(c[1] for c in counts)
        found = (stats.tokens_seen, stats.tokens_kept, stats.tokens_evicted, stats.tokens_quantized)
        assert found == (model.seen, kept, model.seen - kept, quantized)
        assert self.cache.batch_size == len(model.rows)
        if isinstance(views[0], Plain) and views[0].window is None and "keep_recent" not in self.spec:
            assert stats.bytes_out == model.bytes_out


def states_size(model, layer):
    return float(model.states(layer, 1).abs().max())


def bytes_of_token(layer, dtype):
    """Stored bytes of a token and head."""
    total = 0
    for codec, width in zip(codecs(layer), WIDTHS, strict=True):
        state = codec.encode(torch.zeros(1, 1, layer.storage.group, width, dtype=dtype))
        total += sum(t.nbytes for t in state)
    return total // layer.storage.group


def refuses(do, message):
    with pytest.raises(ValueError, match=message):
        do()


@pytest.mark.parametrize("spec, attention", CASES)
def test_any_sequence_of_operations(spec, attention, monkeypatch):
    monkeypatch.setattr(store, "FEW", 5)  # so that forks of few tokens share them
    monkeypatch.setattr(placement, "BLOCK_TOKENS", 4)  # so that few tokens fill a block
    name = f"Machine of {spec} under {attention}"  # sequences depend on the name
    machine = type(name, (Machine,), {"spec": spec, "attention": attention})
    run_machine(machine, settings=PROFILES[os.environ.get("HYPOTHESIS_PROFILE", "quick")])
