"""Offloaded caches: the same bits as resident ones, each byte out once, and nothing left behind.

The movement is tried on a CPU with ``_stage=True``, which copies even where the tier and the device are one memory.
"""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import random
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from models import build, feed, greedy, llama, llama_config, prompt, states
from test_caches import memory_total, padded, qwen3_next_config, reachable_bytes
from transformers import DynamicCache

from hf_kvcache import KVCache, OffloadedCache, disk, placement, transfer
from hf_kvcache.part import repeat_rows
from hf_kvcache.placement import FarSlab
from hf_kvcache.tiers import HostRows, Layout
from hf_kvcache.view import Stored

LOW = "(group=4,residual=8,sinks=2)"
STORAGES = ["full", "int8", "fp8", f"int4{LOW}", f"int2{LOW}", f"k4v2{LOW}", f"k8v4{LOW}"]
RETENTIONS = ["all", "sink(2,12)"]
PLACES = ["cpu", "staged", "staged,recent", "disk", "disk,recent"]
every_storage = pytest.mark.parametrize("storage", STORAGES)
every_retention = pytest.mark.parametrize("retention", RETENTIONS)
every_place = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(placement, "BLOCK_TOKENS", 8)


def options_of(place, tmp_path):
    kind, *recent = place.split(",")
    kinds = {"cpu": {}, "staged": {"_stage": True}, "disk": {"directory": tmp_path / "far"}}
    return {**kinds[kind], **({"keep_recent": 5} if recent else {})}


def config_of(layers=3, attention="kvcache"):
    config = llama_config(layers)
    config._attn_implementation = attention
    return config


class Twins:
    """A resident and an offloaded cache that are treated alike, and compared."""

    def __init__(self, layers=3, storage="full", retention="all", **options):
        config = config_of(layers)
        self.resident = KVCache(config, storage, retention)
        self.far = OffloadedCache(config, storage=storage, retention=retention, **options)
        self.batch = 2

    def both(self, call):
        return call(self.resident), call(self.far)

    def feed(self, tokens):
        for index in range(len(self.resident)):
            pair = states(tokens, self.batch)
            expected, got = self.both(lambda c, i=index, p=pair: c.update(*p, i))
            same_parts(expected[0], got[0])

    def check(self):
        for expected, got in zip(self.resident.layers, self.far.layers, strict=True):
            assert (expected.seen, expected.kept) == (got.seen, got.kept)
            for one, other in ((expected.keys, got.keys), (expected.values, got.values)):
                assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
        assert self.far.nbytes == memory_total(self.far)


def same_parts(expected: Stored, got: Stored) -> None:
    """The same bits, in the same places; a resident cache may hold them in more pieces, shared with a fork."""
    one, other = ([join_rows(part, s.history.batch) for part in s.history.parts] for s in (expected, got))
    if len(one) == len(other):
        for mine, theirs in zip(one, other, strict=True):
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(mine, theirs, strict=True))
    assert torch.equal(expected.plain(), got.plain())


def join_rows(part, batch: int | None) -> list[torch.Tensor]:
    return [repeat_rows(t, batch or t.shape[0]).contiguous() for t in (*part.keys, *part.values)]


# -- invariant 3: the same bits ----------------------------------------------------------------------------------------


# Token by token takes longest; what the places have in common is tried once.
SCHEDULES = [
    *((chunk, place) for chunk in (7, 27) for place in PLACES),
    (1, "cpu"),
    (1, "staged,recent"),
    (1, "disk,recent"),
]


@pytest.mark.parametrize("chunk, place", SCHEDULES)
@every_storage
@every_retention
def test_attention_sees_the_same_bits(place, storage, retention, chunk, tmp_path):
    twins = Twins(2, storage, retention, **options_of(place, tmp_path))
    for start in range(0, 27, chunk):
        twins.feed(min(chunk, 27 - start))
    twins.feed(1)
    twins.check()


@every_place
@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
@pytest.mark.parametrize("spec", ["full", "int8+sink(2,12)", f"int4{LOW}"])
def test_a_model_gives_the_same_logits(place, attention, spec, tmp_path):
    model, ids = llama(attention, 3), prompt(24, 2)
    resident = KVCache.from_spec(model.config, spec)
    options = {"storage": resident.storage, "retention": resident.retention}
    far = OffloadedCache(model.config, **options, **options_of(place, tmp_path))
    for piece in (ids[:, :20], ids[:, 20:21], ids[:, 21:22], ids[:, 22:]):
        assert torch.equal(feed(model, piece, resident), feed(model, piece, far))


# -- importance eviction: one unit goes out per step, to another slot in each head -------------------------------------

EVICTIONS = ["knorm(budget=12,sinks=2,recent=4)", "keydiff(budget=0.5,sinks=2,recent=4)", "random(budget=64)"]
every_eviction = pytest.mark.parametrize("retention", EVICTIONS)
every_near_place = pytest.mark.parametrize("place", ["cpu", "staged", "disk"])


@every_near_place
@every_storage
@every_eviction
@pytest.mark.parametrize("chunk", [1, 7, 27])
def test_evicting_layers_see_the_same_bits(place, storage, retention, chunk, tmp_path):
    twins = Twins(3, storage, retention, **options_of(place, tmp_path))
    for start in range(0, 27, chunk):
        twins.feed(min(chunk, 27 - start))
    for _ in range(5):
        twins.feed(1)
    twins.check()
    twins.far.save(tmp_path / "cache")
    again = Twins(3, storage, retention)
    again.resident, again.far = twins.resident.fork(), KVCache.load(tmp_path / "cache", twins.far.config)
    copied = Twins(3, storage, retention)
    copied.resident, copied.far = twins.resident.fork(), twins.far.fork()
    for pair in (again, copied, twins):
        pair.check()
        pair.both(lambda c: c.reorder_cache(torch.tensor([1, 1])))
        for tokens in (1, 1, 6, 1):
            pair.feed(tokens)
        pair.check()
    twins.both(lambda c: c.batch_select_indices(torch.tensor([0])))
    twins.batch = 1
    twins.feed(1)
    twins.both(lambda c: c.reset())
    twins.batch = 2
    twins.feed(9)
    twins.check()


@every_near_place
@pytest.mark.parametrize("spec", ["snapkv(16,2,4)", "int8+h2o(16,2,4)", f"int4{LOW}+tova(24,2,4)", "expected(0.5,2,4)"])
def test_an_evicting_model_gives_the_same_logits(place, spec, tmp_path):
    model, ids = llama("kvcache", 3), prompt(40, 2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    resident = KVCache.from_spec(model.config, spec)
    axes = {"storage": resident.storage, "retention": resident.retention}
    far = OffloadedCache(model.config, **axes, **options_of(place, tmp_path))
    for stop, start in ((30, 0), (31, 30), (32, 31), (40, 32)):
        out = [feed(model, ids[:, start:stop], c, attention_mask=mask[:, :stop]) for c in (resident, far)]
        assert torch.equal(*out)


@every_near_place
@pytest.mark.parametrize("storage", ["full", "int8"])
def test_a_step_of_eviction_moves_one_unit_out_and_what_is_stored_in(place, storage, tmp_path):
    twins = Twins(2, storage, EVICTIONS[0], **options_of(place, tmp_path))
    for tokens in (20, 1):
        twins.feed(tokens)
    before = twins.far.stats()
    twins.feed(1)
    after = twins.far.stats()
    unit = sum(layer.kept_slots.row_bytes for layer in twins.far.layers)
    stored = sum(layer.kept_slots.used * layer.kept_slots.row_bytes for layer in twins.far.layers)
    # A layer that nothing attends to places its token when the next one comes: the step before's.
    assert after.bytes_out - before.bytes_out == unit and after.bytes_in - before.bytes_in == stored
    on_device = twins.far.memory()["device"]
    assert on_device["payload"] == on_device["scales"] == 0


def test_evicting_layers_lie_on_disk_in_files_without_a_name(tmp_path):
    twins = Twins(2, "int8", EVICTIONS[0], **options_of("disk", tmp_path))
    for tokens in (20, 1, 1):
        twins.feed(tokens)
    memory = twins.far.memory()
    stored = sum(layer.kept_slots.used * layer.kept_slots.row_bytes for layer in twins.far.layers)
    assert memory["disk"]["payload"] + memory["disk"]["scales"] == stored
    assert memory["cpu"]["payload"] == memory["cpu"]["scales"] == 0
    (folder,) = [entry for entry in tmp_path.rglob("hf_kvcache-*") if entry.is_dir()]
    assert [entry.name for entry in folder.iterdir()] == ["owner"]


@pytest.mark.parametrize("promises", [True, False])  # whether the file system can reserve room
def test_kept_tokens_stay_in_memory_where_the_disk_is_full(promises, tmp_path, monkeypatch):
    twins = Twins(2, "int8", "knorm(budget=0.5,sinks=2,recent=4)", **options_of("disk", tmp_path))
    twins.feed(12)
    full = FullDisk(monkeypatch, 0)
    if not promises:
        monkeypatch.delattr(disk.os, "posix_fallocate")
    with pytest.warns(UserWarning, match="no room in .*stay in host memory"):
        twins.feed(9)
    assert twins.far.memory()["cpu"]["payload"] and not twins.far.memory()["disk"]["payload"]
    twins.check()
    full.room = 1 << 30
    for tokens in (1, 9, 1):
        twins.feed(tokens)
    twins.check()
    assert twins.far.memory()["disk"]["payload"] and not twins.far.memory()["cpu"]["payload"]


@pytest.mark.parametrize(
    "spec, word",
    [
        ("snapkv(adaptive=on)+disk({})", "adaptive"),
        ("snapkv(adaptive=on)+cpu", "adaptive"),
        ("snapkv+cpu(keep_recent=4)", "keep_recent"),
    ],
)
def test_evictions_that_cannot_follow_are_refused(spec, word, tmp_path):
    with pytest.raises(ValueError, match=word):
        KVCache.from_spec(llama_config(), spec.format(tmp_path))


@every_place
@every_storage
@every_retention
def test_a_saved_cache_goes_on_in_any_place(place, storage, retention, tmp_path, monkeypatch):
    """Offloaded, saved, loaded as what it was and as a resident one."""
    if place.startswith("staged"):  # no spec says so
        monkeypatch.setattr(placement.Offload, "in_place", lambda self, device: False)
    twins = Twins(3, storage, retention, **options_of(place, tmp_path))
    for tokens in (27, 1, 4):
        twins.feed(tokens)
    twins.far.save(tmp_path / "cache")
    config, spec = twins.far.config, twins.resident.spec
    for loaded in (KVCache.load(tmp_path / "cache", config), KVCache.load(tmp_path / "cache", config, spec=spec)):
        forked = Twins(3, storage, retention)
        forked.resident, forked.far = twins.resident.fork(), loaded
        forked.check()
        for tokens in (1, 1, 9):
            forked.feed(tokens)
        forked.check()
    twins.feed(3)  # the saved one goes on, too
    twins.check()


@every_place
@pytest.mark.parametrize("storage", ["full", "int8", f"int4{LOW}"])
@every_retention
def test_every_operation(place, storage, retention, tmp_path):
    """Random orders of all that a cache can be asked for."""
    chance, twins = (
        random.Random(place + storage + retention),
        Twins(3, storage, retention, **options_of(place, tmp_path)),
    )

    def rows(change, batch):
        twins.both(change)
        twins.batch = batch

    def select():
        picked = torch.tensor([chance.randrange(twins.batch) for _ in range(chance.choice([1, 2]))])
        rows(lambda c: c.batch_select_indices(picked), len(picked))

    def reorder():
        picked = torch.tensor([chance.randrange(twins.batch) for _ in range(twins.batch)])
        rows(lambda c: c.reorder_cache(picked), twins.batch)

    def crop():
        amount, outcomes = -chance.randrange(12), []
        for cache in (twins.resident, twins.far):
            try:
                outcomes.append(cache.crop(amount))
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]

    def fork():
        """The original goes on a bit, and the copy must not notice."""
        kept, twins.far = twins.far, twins.far.fork()
        for index in range(3):
            kept.update(*states(9, twins.batch), index)
        kept.reset()

    def reset():
        rows(lambda c: c.reset(), 2)

    def by_pickle():
        twins.far = pickle.loads(pickle.dumps(twins.far))
        twins.far.config = twins.resident.config

    actions = [select, reorder, crop, fork, by_pickle, reset, twins.check]
    actions += [lambda: rows(lambda c: c.batch_repeat_interleave(2), 2 * twins.batch)]
    twins.feed(20)
    for _ in range(25):
        if chance.random() < 0.5 or twins.batch > 6:
            twins.feed(chance.choice([1, 1, 1, 2, 9]))
        if twins.batch > 6 or not twins.resident.get_seq_length():
            select() if twins.resident.get_seq_length() else twins.feed(3)
        chance.choice(actions)()
    twins.feed(1)
    twins.check()


@every_place
def test_a_padded_batch(place, tmp_path):
    model, (_, ids, mask) = llama("kvcache"), padded((9, 5))
    for storage in ("int8", "full"):
        expected = greedy(model, ids, KVCache(model.config, storage), 8, attention_mask=mask)
        far = OffloadedCache(model.config, storage=storage, **options_of(place, tmp_path))
        assert torch.equal(greedy(model, ids, far, 8, attention_mask=mask), expected)


@every_place
@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
def test_beams(place, attention, tmp_path):
    model = llama(attention, 3)
    expected = greedy(model, prompt(9, 2), KVCache(model.config, "int8"), 12, num_beams=3)
    far = OffloadedCache(model.config, storage="int8", **options_of(place, tmp_path))
    assert torch.equal(greedy(model, prompt(9, 2), far, 12, num_beams=3), expected)


@pytest.mark.parametrize("place", ["staged", "disk"])
def test_speculative_decoding(place, tmp_path):
    model = llama("kvcache", 3)
    expected = greedy(model, prompt(9), KVCache(model.config), 12, prompt_lookup_num_tokens=3)
    far = OffloadedCache(model.config, **options_of(place, tmp_path))
    assert torch.equal(greedy(model, prompt(9), far, 12, prompt_lookup_num_tokens=3), expected)


@pytest.mark.parametrize("place", ["staged", "staged,recent", "disk"])
def test_what_update_returned_stays_as_it_was(place, tmp_path):
    """Layers that share keys and values hold on to it while others are fetched."""
    twins = Twins(storage="full", **options_of(place, tmp_path))
    twins.feed(20)
    for _ in range(3):
        held = []
        for index in range(3):
            pair = states(1)
            expected, got = twins.both(lambda c, i=index, p=pair: c.update(*p, i))
            held.append((expected[0], got[0]))
        for expected, got in held:
            same_parts(expected, got)


@pytest.mark.parametrize("place", ["staged", "disk"])
def test_layers_out_of_order(place, tmp_path):
    """A wrong guess of the next layer costs a fetch, not the right answer."""
    twins = Twins(layers=4, storage="int8", **options_of(place, tmp_path))
    twins.feed(10)
    for index in (0, 2, 3, 1, 0, 3, 1, 2, 0, 3, 3, 1, 2, 1):  # a forward begins at 0, and where all are even
        pair = states(2)
        expected, got = twins.both(lambda c, i=index, p=pair: c.update(*p, i))
        same_parts(expected[0], got[0])
    twins.check()


# -- what moves --------------------------------------------------------------------------------------------------------


def moved(cache, call):
    """(bytes out, bytes in) of a call."""
    before = cache.stats()
    call()
    after = cache.stats()
    return after.bytes_out - before.bytes_out, after.bytes_in - before.bytes_in


TOKEN = {"full": 2 * 2 * 2 * 8 * 4, "int8": 2 * 2 * 2 * (8 + 4)}  # bytes: sides, batch, heads, row


@every_place
@pytest.mark.parametrize("storage", ["full", "int8"])
@pytest.mark.parametrize("keep", [(), (1,), (0, -1)])
def test_a_decode_step_moves_one_token_out_and_the_offloaded_part_in(place, storage, keep, tmp_path):
    options = options_of(place, tmp_path)
    cache = OffloadedCache(config_of(4), storage=storage, keep_layers=keep, **options)
    layers, hot, token = 4 - len(keep), options.get("keep_recent", 0), TOKEN[storage]

    def step(tokens):
        for index in range(4):
            cache.update(*states(tokens), index)

    assert moved(cache, lambda: step(20)) == (layers * (20 - hot) * token, 0)
    for seen in range(20, 40):
        assert moved(cache, lambda: step(1)) == (layers * token, layers * (seen - hot) * token)
    assert moved(cache, lambda: step(9)) == (layers * 9 * token, layers * (40 - hot) * token)


@every_place
def test_a_window_moves_no_more_than_it_holds(place, tmp_path):
    options = options_of(place, tmp_path)
    cache, hot, token = (
        OffloadedCache(config_of(3), retention="sink(2,12)", **options),
        options.get("keep_recent", 0),
        256,
    )

    def step(tokens):
        for index in range(3):
            cache.update(*states(tokens), index)

    assert moved(cache, lambda: step(30)) == (3 * (14 - hot) * token, 0)  # what the prompt itself evicts never leaves
    for _ in range(20):
        assert moved(cache, lambda: step(1)) == (3 * token, 3 * (14 - hot) * token)


@every_place
@every_storage
def test_each_byte_goes_out_once(place, storage, tmp_path):
    twins = Twins(storage=storage, **options_of(place, tmp_path))
    for tokens in (30, *[1] * 12, 7, *[1] * 5):
        twins.feed(tokens)
    recent = 5 if "recent" in place else 0
    stored = 0
    for layer in twins.resident.layers:
        hot = max(recent - layer.storage.residual, 0)
        for slab in layer.sealed.slabs:
            rows = len(slab) - -(-hot // slab.group)
            stored += sum(t[:, :, :rows].nbytes for t in slab.view())
    assert twins.far.stats().bytes_out == stored
    twins.both(lambda c: c.reorder_cache(torch.tensor([1, 0])))
    twins.check()
    assert twins.far.stats().bytes_out == stored


def test_what_is_attended_in_place_is_never_copied():
    cache = OffloadedCache(config_of(2), storage="full")
    for index in range(2):
        cache.update(*states(20), index)
    for _ in range(5):
        stays = [layer.sealed.keys.capacity > len(layer.sealed) for layer in cache.layers]
        before = [layer.sealed.keys.state[0].data_ptr() for layer in cache.layers]
        for index in range(2):
            handle, _ = cache.update(*states(1), index)
            state = cache.layers[index].sealed.keys.state[0]
            assert handle.plain().untyped_storage().data_ptr() == state.untyped_storage().data_ptr()
            assert not stays[index] or state.data_ptr() == before[index]
    assert cache.stats().waits == 0 and cache.memory()["cpu"]["staging"] == 0


@pytest.mark.parametrize("place", ["staged", "disk"])
def test_two_staged_copies_at_most(place, tmp_path):
    cache = OffloadedCache(config_of(6), storage="full", **options_of(place, tmp_path))
    for tokens in (40, 1, 1, 1):
        for index in range(6):
            cache.update(*states(tokens), index)
            assert sum(layer.home.staged or layer.home.ticket is not None for layer in cache.layers) <= 2
    layer = 2 * 2 * 2 * 64 * 8 * 4  # sides, batch, heads, tokens and what is spare, head size, float32
    assert 0 < cache.memory()["device"]["staging"] <= 2 * layer
    assert cache.memory()["device"]["payload"] == 0


def test_the_next_layer_is_on_its_way_before_it_is_asked_for():
    cache = OffloadedCache(config_of(5), storage="int8", _stage=True)
    for tokens in (20, 1, 1, 1, 1):
        for index in range(5):
            cache.update(*states(tokens), index)
    assert cache.stats().waits == 0
    cache.reorder_cache(torch.tensor([1, 0]))  # what was fetched ahead is of no use any more
    for index in range(5):
        cache.update(*states(1), index)
    assert cache.stats().waits == 1


# -- b77: the order of copies ------------------------------------------------------------------------------------------


class LateLane(transfer.Lane):
    """A device that copies as late as it may: when somebody waits for it."""

    def __init__(self):
        self.jobs, self.done = [], 0

    def run(self, start, job):
        self.jobs.append(job)
        return len(self.jobs)

    def wait(self, ticket):
        late, self.done = self.done < ticket, max(self.done, ticket)
        for number, job in enumerate(self.jobs[:ticket]):
            if job is not None:
                self.jobs[number] = None
                job()
        return late

    def drain(self):
        self.wait(len(self.jobs))

    def send(self, target, rows):
        rows = rows.movedim(2, 0).clone()
        self.issue(lambda: target.copy_(rows))


@pytest.mark.parametrize("place", ["staged", "staged,recent", "disk", "disk,recent"])
@pytest.mark.parametrize("spec", [("full", "all"), ("int8", "sink(2,12)"), (f"int4{LOW}", "all")])
def test_b77_copies_that_end_as_late_as_they_may(place, spec, monkeypatch, tmp_path):
    monkeypatch.setattr(placement, "Lane", LateLane)
    monkeypatch.setattr(placement, "ReadAhead", lambda lane: lane)
    twins = Twins(4, *spec, **options_of(place, tmp_path))
    for turn, tokens in enumerate((20, 1, 1, 7, *[1] * 12)):
        twins.feed(tokens)
        if turn % 4 == 3:
            twins.both(lambda c: c.reorder_cache(torch.tensor([1, 0])))
            twins.far = copy.deepcopy(twins.far)
    twins.check()


class FakeCuda:
    """Notes what is asked of streams and events."""

    def __init__(self):
        self.log = log = []

        class Event:
            def record(self, stream):
                log.append(("record", self, stream))

            def query(self):
                return False

        class Stream:
            def __init__(self, device=None):
                pass

            def wait_event(self, event):
                log.append(("wait", self, event))

            def synchronize(self):
                log.append(("synchronize", self))

        class Within:
            def __init__(self, stream):
                self.stream = stream

            def __enter__(self):
                log.append(("enter", self.stream))

            def __exit__(self, *error):
                log.append(("exit", self.stream))

        self.Event, self.Stream, self.stream = Event, Stream, Within
        self.current = Stream()

    def current_stream(self, device):
        return self.current


def test_b77_events_go_both_ways_and_the_stream_is_the_current_one(monkeypatch):
    fake = FakeCuda()
    for name in ("Event", "Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    lane = transfer.CudaLane(torch.device("cuda", 0), transfer.HostMemory(None))
    other = fake.current = fake.Stream()  # not the one from before
    ticket = transfer.Ticket(lane, lambda: fake.log.append(("job",)), 1)
    start = fake.log[0][1]
    assert fake.log[:4] == [("record", start, other), ("wait", lane.side, start), ("enter", lane.side), ("job",)]
    done = fake.log[4][1]
    assert fake.log[4:] == [("record", done, lane.side), ("exit", lane.side)]
    assert ticket.wait() and fake.log[6:] == [("wait", other, done)]
    assert not ticket.wait() and len(fake.log) == 7  # once
    forgotten = transfer.Ticket(lane, lambda: None, 1)
    del forgotten  # its targets may be freed now: the stream waits all the same
    assert fake.log[-1][:2] == ("wait", other)


# -- b78: pinned memory ------------------------------------------------------------------------------------------------


def fake_pins(monkeypatch, fails=False):
    """Allocations that ask for pinned memory, which this machine may not have."""
    real, asked = torch.empty, []

    def empty(*args, pin_memory=False, **kwargs):
        if pin_memory:
            asked.append(args[0])
            if fails:
                raise RuntimeError("cudaHostAlloc: out of memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    return asked


def test_b78_pinned_memory_grows_geometrically_and_never_moves(monkeypatch):
    asked = fake_pins(monkeypatch)
    state = KVCache(llama_config(1), "int8").storage.key_codec.encode(states(1)[0])
    rows = HostRows(Layout(state), transfer.HostMemory(None), pin=True)
    lane, first = transfer.Lane(), None
    for slot in range(3000):
        rows.write(slot, state, lane)
        first = first if first is not None else rows.chunks[0][2].data_ptr()
    assert len(asked) == len(rows.chunks) <= 24 and rows.chunks[0][2].data_ptr() == first
    assert 3000 <= rows.room <= 2 * 3000
    assert all(size <= 1 << (size - 1).bit_length() < 1.1 * size for size in asked if size > 4096)  # all that is taken


def test_b78_one_warning_when_pinning_fails(monkeypatch):
    asked = fake_pins(monkeypatch, fails=True)
    host = transfer.HostMemory(None)
    with pytest.warns(UserWarning, match="not pinned, more slowly: cudaHostAlloc: out of memory") as caught:
        assert [len(host.take(100, True)) for _ in range(5)] == [100] * 5
    assert len(caught) == 1 and len(asked) == 1 and host.pinned == 0


def test_b78_a_limit(monkeypatch):
    fake_pins(monkeypatch)
    host = transfer.HostMemory(250)
    kept = [host.take(100, True), host.take(100, True)]
    with pytest.warns(UserWarning, match="max_pinned=250") as caught:
        assert len(host.take(100, True)) == len(host.take(100, True)) == 100
    assert len(caught) == 1 and host.pinned == 200
    kept.clear()
    assert host.pinned == 0


def test_b78_a_whole_cache_within_a_limit(monkeypatch):
    monkeypatch.setattr(transfer.Lane, "pins", True)
    fake_pins(monkeypatch)
    twins = Twins(3, "int8", _stage=True, max_pinned=4096)
    with pytest.warns(UserWarning, match="max_pinned=4096") as caught:
        for tokens in (10, *[1] * 30):
            twins.feed(tokens)
    assert len(caught) == 1 and 0 < twins.far._offloader.host.pinned <= 4096
    twins.far = copy.deepcopy(twins.far)
    twins.feed(1)
    twins.check()


# -- b76, b79 to b81: hybrid models, several devices, wrappers ---------------------------------------------------------


@every_place
@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
def test_b76_hybrid_models(place, attention, tmp_path):
    config = qwen3_next_config()
    config.num_hidden_layers = 4
    config.layer_types = ["linear_attention", "full_attention"] * 2
    model, ids = build(config, attention), prompt(22, 2)
    resident, far = KVCache(model.config), OffloadedCache(model.config, **options_of(place, tmp_path))
    assert [hasattr(layer, "home") for layer in far.layers] == [False, True, False, True]
    for piece in (ids[:, :12], *ids[:, 12:].split(1, 1)):
        assert torch.equal(feed(model, piece, resident), feed(model, piece, far))
    assert far.nbytes == memory_total(far) and far.memory()["device"]["window"] > 0


def test_b76_offloading_works_without_an_accelerator():
    model = llama()
    expected = greedy(model, prompt(9), DynamicCache(config=model.config), 10)
    assert torch.equal(greedy(model, prompt(9), OffloadedCache(model.config), 10), expected)


def test_b79_each_layer_has_its_own_device():
    cache = OffloadedCache(config_of(3), _stage=True)
    for tokens in (6, 1, 1):
        for index, device in enumerate(("cpu", "meta", "cpu")):
            keys, values = (x.to(device) for x in states(tokens))
            handle, _ = cache.update(keys, values, index)
            assert handle.device.type == device and handle.shape[2] == cache.get_seq_length()
    assert [layer.home.device.type for layer in cache.layers] == ["cpu", "meta", "cpu"]
    assert {device.type for device in cache._offloader.lanes} == {"cpu"}
    assert cache.layers[0].keys.shape[2] == cache.layers[2].keys.shape[2] == 8


@pytest.mark.parametrize("place", ["staged", "disk"])
def test_b80_weights_that_come_and_go(place, tmp_path):
    """Hybrid, with hooks of accelerate that move weights and arguments around every layer."""
    from accelerate import cpu_offload

    config, ids = qwen3_next_config(), prompt(16, 2)
    expected = feed(build(config), ids, KVCache(config), 5)
    model = cpu_offload(build(config), execution_device=torch.device("cpu"))
    far = OffloadedCache(model.config, **options_of(place, tmp_path))
    assert torch.equal(feed(model, ids, far, 5), expected)


def test_b81_wrappers_neither_copy_nor_move_the_cache():
    from accelerate.utils import send_to_device

    cache = OffloadedCache(config_of(2), _stage=True)
    for index in range(2):
        cache.update(*states(5), index)
    before = [layer.keys.clone() for layer in cache.layers]
    assert send_to_device({"past_key_values": cache}, "meta")["past_key_values"] is cache
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


# -- accounting --------------------------------------------------------------------------------------------------------


@every_place
@pytest.mark.parametrize("storage", ["full", "int8", f"k8v4{LOW}"])
@every_retention
def test_nbytes_is_every_reachable_byte_on_every_tier(place, storage, retention, tmp_path):
    cache = OffloadedCache(config_of(), storage=storage, retention=retention, **options_of(place, tmp_path))
    for tokens in (50, 1, 1):
        for index in range(3):
            cache.update(*states(tokens), index)
        assert cache.nbytes == memory_total(cache) == reachable_bytes(cache) > 0
    tiers = {tier: sum(parts.values()) for tier, parts in cache.memory().items()}
    assert list(tiers) == (["device", "cpu", "disk"] if "disk" in place else ["device", "cpu"])
    assert all(size > 0 for tier, size in tiers.items() if tier != "device" or "staged" in place)
    if "disk" in place:
        files = [path for path in (tmp_path / "far").rglob("layer*")]
        assert sum(path.stat().st_size for path in files) >= tiers["disk"] > 0
    cache.reset()
    assert cache.nbytes == memory_total(cache) == 0 and cache.stats() == KVCache(config_of()).stats()


def test_the_device_holds_two_layers_of_a_long_history():
    cache = OffloadedCache(config_of(8), storage="int8", keep_recent=16, _stage=True)
    for tokens in (500, 1):
        for index in range(8):
            cache.update(*states(tokens, 1, 2, 64), index)
    parts = cache.memory()
    resident = KVCache(config_of(8), "int8")
    for index in range(8):
        resident.update(*states(501, 1, 2, 64), index)
    assert sum(parts["device"].values()) <= 0.3 * resident.nbytes
    assert resident.nbytes * 0.95 <= parts["cpu"]["payload"] + parts["cpu"]["scales"] <= resident.nbytes


# -- names and refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, canonical",
    [
        ("cpu", "cpu"),
        ("cpu()", "cpu"),
        ("cpu+int8", "int8+cpu"),
        ("sink(4,508) + cpu(keep_recent=64) + int8", "int8+sink(4,508)+cpu(keep_recent=64)"),
        ("cpu(keep_layers=0|-1, keep_recent=8)", "cpu(keep_layers=0|-1,keep_recent=8)"),
        ("cpu(keep_layers=ends,max_pinned=0)", "cpu(keep_layers=ends,max_pinned=0)"),
        ("cpu(keep_layers=1)", "cpu(keep_layers=1)"),
    ],
)
def test_spec_round_trip(text, canonical):
    cache = KVCache.from_spec(llama_config(3), text)
    assert cache.spec == canonical and KVCache.from_spec(llama_config(3), cache.spec).spec == canonical
    far = [isinstance(layer.sealed.keys, FarSlab) for layer in cache.layers]
    kept = {"0|-1": [False, True, False], "ends": [False, True, False], "=1": [True, False, True]}
    assert far == next((flags for name, flags in kept.items() if name in text), [True] * 3)


def test_an_option_that_leaves_nothing_to_offload_warns():
    with pytest.warns(UserWarning, match="offloads nothing"):
        OffloadedCache(llama_config(2), keep_layers="ends")


@pytest.mark.parametrize("name", ["far", "a,b", "with space", "7", "plus+sign", "x=1"])
def test_spec_of_a_directory(name, tmp_path):
    cache = KVCache.from_spec(llama_config(), f"int4+disk({tmp_path}/{name},keep_recent=3)")
    assert (tmp_path / name).is_dir() and cache.spec == f"int4+disk({tmp_path}/{name},keep_recent=3)"
    assert OffloadedCache(llama_config(), directory=tmp_path / name).spec == f"disk({tmp_path}/{name})"


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda c: KVCache.from_spec(c, "cpu(4)"), ["'cpu'", "'4'", "keep_layers", "keep_recent", "max_pinned"]),
        (lambda c: KVCache.from_spec(c, "cpu(depth=4)"), ["'cpu'", "'depth'", "keep_recent"]),
        (lambda c: KVCache.from_spec(c, "device(keep_recent=4)"), ["'device'", "keep_recent", "none"]),
        (lambda c: KVCache.from_spec(c, "disk"), ["'disk'", "disk(/path)"]),
        (lambda c: KVCache.from_spec(c, "cpu+disk(/x)"), ["two placements"]),
        (lambda c: KVCache.from_spec(c, "cpu(keep_recent=-1)"), ["keep_recent=-1"]),
        (lambda c: KVCache.from_spec(c, "cpu(keep_layers=9)"), ["keep_layers=[9]", "2 layers"]),
        (lambda c: KVCache.from_spec(c, "cpu(keep_layers=a)"), ["keep_layers", "'a'"]),
        (lambda c: OffloadedCache(c, keep_recent=1.5), ["keep_recent=1.5"]),
        (lambda c: OffloadedCache(c, keep_recent=True), ["keep_recent=True"]),
        (lambda c: OffloadedCache(c, max_pinned="1GB"), ["max_pinned='1GB'"]),
        (lambda c: OffloadedCache(c, device="cuda:1"), ["cuda:1", "'cpu'", "directory="]),
        (lambda c: OffloadedCache(c, depth=3), ["depth", "storage", "retention", "skip_layers"]),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_known(make, words):
    with pytest.raises(ValueError) as caught:
        make(llama_config())
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


# -- files -------------------------------------------------------------------------------------------------------------


def on_disk(tmp_path, storage="int8", layers=3):
    return Twins(layers, storage, directory=tmp_path)


def test_one_private_file_per_layer(tmp_path):
    twins = on_disk(tmp_path)
    twins.feed(40)
    (folder,) = tmp_path.iterdir()
    names = sorted(path.name.split("-")[0] for path in folder.iterdir())
    assert names == ["layer0", "layer1", "layer2", "owner"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert (folder / "owner").read_text().split()[0] == str(os.getpid())


def test_a_directory_that_does_not_exist_is_made_private(tmp_path):
    cache = OffloadedCache(llama_config(), directory=tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700 and cache.get_seq_length() == 0


def test_files_are_removed_on_close_and_a_closed_cache_begins_anew(tmp_path):
    twins = on_disk(tmp_path)
    twins.feed(40)
    twins.far.close()
    assert not list(tmp_path.iterdir()) and twins.far.nbytes == 0 and twins.far.stats().bytes_out == 0
    twins.resident.reset()
    twins.feed(30)
    twins.check()
    assert len(list(tmp_path.rglob("layer*"))) == 3


def test_files_are_removed_with_the_cache(tmp_path):
    cache = OffloadedCache(config_of(), directory=tmp_path)
    for index in range(3):
        cache.update(*states(40), index)
    fork = cache.fork()
    assert len(list(tmp_path.rglob("layer*"))) == 6
    del cache
    gc.collect()
    assert len(list(tmp_path.rglob("layer*"))) == 3 and fork.layers[2].keys.shape[2] == 40
    del fork
    gc.collect()
    assert not list(tmp_path.iterdir())


SCRIPT = """
    import os, sys, time, torch
    from transformers import LlamaConfig
    from hf_kvcache import OffloadedCache
    config = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    cache = OffloadedCache(config, directory=sys.argv[1])
    for index in range(2):
        cache.update(torch.randn(2, 2, 200, 8), torch.randn(2, 2, 200, 8), index)
"""


def script(tmp_path, more):
    """A process of its own that fills a cache on disk, and then does more."""
    text = textwrap.dedent(SCRIPT) + textwrap.dedent(more)
    path = str(Path(placement.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", text, str(tmp_path)], env=environment, stdout=subprocess.PIPE)


def test_files_are_removed_at_exit_and_a_forked_child_leaves_them(tmp_path):
    more = """
        if os.fork() == 0:
            sys.exit()
        os.wait()
        print(len(os.listdir(os.path.join(sys.argv[1], os.listdir(sys.argv[1])[0]))), flush=True)
    """
    process = script(tmp_path, more)
    assert process.communicate(timeout=120)[0].split() == [b"3"] and process.returncode == 0
    assert not list(tmp_path.iterdir())


def test_leftovers_of_a_killed_process_are_found_and_those_of_a_living_one_are_left(tmp_path):
    wait = "\nprint('ready', flush=True)\ntime.sleep(600)\n"
    process = script(tmp_path, wait)
    try:
        assert process.stdout.readline() == b"ready\n"
        twins = on_disk(tmp_path)  # two processes on one directory
        twins.feed(30)
        (theirs,) = (path for path in tmp_path.iterdir() if f"-{process.pid}-" in path.name)
        assert len(list(theirs.rglob("layer*"))) == 2
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert theirs.exists()
    other = OffloadedCache(llama_config(), directory=tmp_path)
    assert not theirs.exists() and len(list(tmp_path.iterdir())) == 2 and other.get_seq_length() == 0
    twins.feed(1)
    twins.check()


def test_a_folder_that_goes_while_another_process_looks(tmp_path, monkeypatch):
    gone, scan = tmp_path / "hf_kvcache-1-a", os.scandir
    gone.mkdir()

    def late(path):
        entries = list(scan(path))
        gone.rmdir()
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", late)
        assert disk.remove_leftovers(tmp_path) == []


def test_only_our_own_leftovers_are_removed(tmp_path):
    (tmp_path / "hf_kvcache-1-dead").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "hf_kvcache-file").write_text("mine")
    (tmp_path / "hf_kvcache-2-link").symlink_to(tmp_path / "other")
    cache = OffloadedCache(llama_config(), directory=tmp_path)
    names = {path.name for path in tmp_path.iterdir()} - {cache._offloader.folder.path.name}
    assert names == {"other", "hf_kvcache-file", "hf_kvcache-2-link"}


def test_directories_that_are_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, word in (("link", "symlink"), ("dangling", "symlink"), ("file", "no directory"), ("open", "everyone")):
        with pytest.raises(ValueError, match=word) as caught:
            OffloadedCache(llama_config(), directory=tmp_path / name)
        assert name in str(caught.value)
    with pytest.raises(OSError):
        OffloadedCache(llama_config(), directory=tmp_path / "file" / "below")
    assert not list((tmp_path / "real").iterdir()) and not list((tmp_path / "open").iterdir())
    assert not (tmp_path / "nowhere").exists()


class FullDisk:
    """The disk takes so many more bytes."""

    def __init__(self, monkeypatch, room):
        self.room, self.pwrite = room, os.pwrite
        monkeypatch.setattr(disk.os, "pwrite", self.write)
        monkeypatch.setattr(disk.os, "posix_fallocate", self.allocate, raising=False)

    def write(self, fd, data, offset):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.pwrite(fd, data[: self.room], offset)
        self.room -= written
        return written

    def allocate(self, fd, offset, size):
        if size - os.fstat(fd).st_size > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("room", [0, 1000, 4000])
def test_a_disk_that_is_full_in_the_first_forward(room, monkeypatch, tmp_path):
    twins, full = on_disk(tmp_path), FullDisk(monkeypatch, room)
    with pytest.raises(OSError, match="No space left.*reset") as caught:
        for index in range(3):
            twins.far.update(*states(40), index)
    assert caught.value.errno == errno.ENOSPC and str(tmp_path) in str(caught.value)
    assert twins.far.get_seq_length() == 0 and twins.far.nbytes == 0 and not list(tmp_path.rglob("layer*"))
    full.room = 1 << 30
    twins.feed(40)
    twins.check()


def test_a_disk_that_gets_full_later_is_noticed_before_anything_changes(monkeypatch, tmp_path):
    twins = on_disk(tmp_path)
    twins.feed(40)
    full = FullDisk(monkeypatch, 100)
    for _ in range(2):
        with pytest.raises(OSError, match="no room for 30 more tokens.*nothing has changed"):
            twins.far.update(*states(30), 0)
        twins.check()
    full.room = 1 << 30
    twins.feed(30)
    twins.check()


@pytest.mark.parametrize("room", [0, 700])
def test_a_write_that_fails_in_the_middle_loses_nothing(room, monkeypatch, tmp_path):
    """Where the disk had promised room, or cannot promise any."""
    twins = on_disk(tmp_path)
    twins.feed(40)
    full = FullDisk(monkeypatch, room)
    monkeypatch.delattr(disk.os, "posix_fallocate")
    twins.feed(30)  # the same bits, from memory
    twins.check()
    fork = twins.far.fork
    with pytest.raises(OSError, match="No space left.*cache holds what it held"):
        twins.far.update(*states(1), 0)
    twins.check()
    full.room = 1 << 30
    assert fork().layers[1].keys.shape[2] == 70
    twins.feed(1)
    twins.check()
    assert all(len(layer.sealed.keys.rows.open) == 1 for layer in twins.far.layers)


def test_rows_are_rearranged_on_a_full_disk(monkeypatch, tmp_path):
    twins = on_disk(tmp_path)
    twins.feed(40)
    full = FullDisk(monkeypatch, 300)
    twins.both(lambda c: c.batch_repeat_interleave(2))
    twins.batch = 4
    twins.check()
    full.room = 1 << 30
    twins.feed(1)
    twins.check()


def test_a_file_that_was_cut_is_an_error_and_not_a_crash(tmp_path):
    twins = on_disk(tmp_path)
    twins.feed(40)
    for path in tmp_path.rglob("layer1-*"):
        os.truncate(path, 10)
    with pytest.raises(OSError, match="layer1-.*cut from outside to 10 of"):
        twins.feed(1)


def test_a_ring_overwrites_its_blocks_in_place(tmp_path):
    twins = Twins(storage="int8", retention="sink(2,19)", directory=tmp_path)
    twins.feed(50)
    sizes = {path: path.stat().st_size for path in tmp_path.rglob("layer*")}
    for _ in range(60):
        twins.feed(1)
    assert {path: path.stat().st_size for path in tmp_path.rglob("layer*")} == sizes and len(sizes) == 3
    twins.check()
