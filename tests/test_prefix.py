"""A store of prefixes: what it serves is right, its own, and nobody else's."""

from __future__ import annotations

import copy
import errno
import gc
import os
import random
import stat
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
from models import build, feed, greedy, llama, llama_config, prompt
from test_caches import gemma3_config, qwen3_next_config

from hf_kvcache import KVCache, PrefixStore, content_hash, generate_with_prefix, prefix, rewind, snapshot
from hf_kvcache.prefix import shared

SPECS = ["full", "int8", "fp8", "int4(residual=16,group=8)", "sink(2,12)", "int8+sink(2,12)"]
every_spec = pytest.mark.parametrize("spec", SPECS)
PLENTY = 1 << 30


def fed(model, ids, spec="int8", chunk=None):
    cache = KVCache.from_spec(model.config, spec)
    feed(model, ids, cache, chunk)
    return cache


def content(cache):
    return [t.clone() for item in cache for t in item[:2]]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(content(first), content(second), strict=True))


def store_of(model, *prompts, spec="int8", **options):
    store = PrefixStore(PLENTY, **options)
    for ids in prompts:
        assert store.put(ids, fed(model, ids, spec))
    return store


# -- finding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec, attention", [("int8", "sdpa"), *((spec, "kvcache") for spec in SPECS)])
def test_b47_answers_over_a_stored_prefix(spec, attention):
    """Questions over one document: tokens and stored bytes as with a cache that was built for each of them."""
    model, document = llama(attention), prompt(70)
    store = store_of(model, document, spec=spec)
    for seed in (3, 4):
        ids = torch.cat([document, prompt(6, seed=seed)], 1)
        cache, matched = store.match(ids)
        assert matched == 70 and cache.get_seq_length() == 70 and same(cache, fed(model, document, spec))
        answer = greedy(model, ids, cache, 8)
        assert torch.equal(answer, greedy(model, ids, fed(model, document, spec), 8))
    assert store.stats().hits == 2 and store.stats().tokens_reused == 140


@pytest.mark.parametrize("common", [1, 16, 17, 63])
@pytest.mark.parametrize("spec", ["full", "int8"])
def test_the_longest_shared_prefix(spec, common):
    """Of several, to the token; what follows in the stored one is rolled back exactly."""
    model = llama()
    ids = torch.cat([prompt(common, seed=1), (prompt(64 - common, seed=2) + 1) % 97], 1)
    others = [torch.cat([ids[:, :n], (ids[:, n : n + 20] + 50) % 97], 1) for n in {1, common // 2 or 1, common}]
    cache, matched = store_of(model, *others, spec=spec).match(ids)
    assert matched == common == cache.get_seq_length()
    direct = fed(model, next(other for other in others if shared(other[0], ids[0]) == common), spec)
    direct.rollback(direct.get_seq_length() - common)
    rest = ids[:, common:]
    assert same(cache, direct) and torch.equal(feed(model, rest, cache), feed(model, rest, direct))


@every_spec
def test_a_prompt_that_is_stored_whole_leaves_one_token(spec):
    model, ids = llama(), prompt(40)
    store = store_of(model, ids, spec=spec)
    cache, matched = store.match(ids)
    if "sink" in spec:  # a token has left the window: it cannot come back
        assert cache is None and matched == 0
        cache, matched = store.match(ids, leave=0)
        assert matched == cache.get_seq_length() == 40
        return
    assert matched == cache.get_seq_length() == 39
    assert torch.equal(greedy(model, ids, cache, 5), greedy(model, ids, fed(model, ids[:, :39], spec), 5))


def test_low_bits_serve_what_is_still_plain():
    """Lengths from 44 on have the same sealed tokens as 45; below, the plain form of sealed ones would be needed."""
    model, spec = llama(), "int4(residual=16,group=8,sinks=4)"
    ids = prompt(45)
    assert KVCache.from_spec(model.config, spec).layers[0].boundary(45) == 28
    for common in range(38, 46):
        other = torch.cat([ids[:, :common], (ids[:, common:] + 1) % 97, prompt(3, seed=7)], 1)
        cache, matched = store_of(model, ids, spec=spec).match(other)
        assert matched == (common if common >= 44 else 0), common
        if matched:
            direct = fed(model, ids, spec)
            direct.rollback(45 - matched)
            assert same(cache, direct) and direct.layers[0].boundary(matched) == 28


def test_the_longest_exact_entry_wins_over_a_longer_one_that_is_not():
    model, ids = llama(), prompt(80)
    spec = "int8+sink(2,12)"
    store = store_of(model, ids[:, :80], ids[:, :48], ids[:, :20], spec=spec)
    longer = torch.cat([ids[:, :60], prompt(9, seed=3)], 1)
    cache, matched = store.match(longer)
    assert matched == 48 and same(cache, fed(model, ids[:, :48], spec))


def test_nothing_in_common():
    model = llama()
    store = store_of(model, prompt(40))
    for ids in (prompt(1), prompt(40, seed=5) * 0, torch.empty(1, 0, dtype=torch.long)):
        assert store.match(ids) == (None, 0)
    assert PrefixStore(PLENTY).match([1, 2, 3]) == (None, 0)
    assert store.stats().misses == 3 and store.stats().hits == 0


@pytest.mark.parametrize("config", [gemma3_config, qwen3_next_config])
def test_windows_and_recurrent_states_serve_their_full_length(config):
    model, ids = build(config()), prompt(40)
    store = store_of(model, ids)
    assert store.match(ids) == (None, 0)  # 39 tokens would need a rollback
    more = torch.cat([ids, prompt(5, seed=2)], 1)
    cache, matched = store.match(more)
    assert matched == 40
    expected = greedy(model, more, fed(model, ids), 5)
    assert torch.equal(greedy(model, more, cache, 5), expected)
    assert torch.equal(greedy(model, more, store.match(more)[0], 5), expected)


def test_an_empty_store_is_a_store():
    store = PrefixStore(PLENTY)
    assert len(store) == 0 and bool(store)


def test_forms_of_token_ids():
    model, ids = llama(), prompt(20)
    store = PrefixStore(PLENTY)
    for form in (ids, ids[0], ids[0].tolist(), ids.int()):
        store.put(form, fed(model, ids))
        assert store.match(form)[1] == 19
    assert len(store) == 1
    for wrong in (prompt(20, 2), torch.zeros(1, 1, 20, dtype=torch.long)):
        with pytest.raises(ValueError, match="give one row"):
            store.match(wrong)


def test_put_refuses_what_does_not_belong_together():
    model, ids, store = llama(), prompt(20), PrefixStore(PLENTY)
    for wrong, words in (
        (lambda: store.put(ids[:, :19], fed(model, ids)), "19 token ids for a cache that has seen 20"),
        (lambda: store.put(prompt(22), fed(model, ids)), "22 token ids"),
        (lambda: store.put(ids, fed(model, prompt(20, 2))), "batch of|of batch 2"),
        (lambda: store.put([], KVCache(model.config)), "0 token ids"),
        (lambda: store.put(ids, None), "NoneType cannot be reused"),
        (lambda: store.put(ids, fed(model, ids), namespace=3), "namespace=3 is not a string"),
        (lambda: PrefixStore(0), "max_bytes=0"),
        (lambda: PrefixStore(PLENTY, disk_bytes=5), "disk_bytes=5 limits a folder, and there is none: pass directory="),
        *(
            (lambda wrong=wrong: PrefixStore(PLENTY, "unused", disk_bytes=wrong), f"disk_bytes={wrong} is not a number")
            for wrong in (-5, 0, True, 1.5)
        ),
        (lambda: PrefixStore(PLENTY).flush(), "no directory"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()
    out = greedy(model, ids, cache := KVCache(model.config), 4)
    assert store.put(out, cache) and store.match(out)[1] == 23  # the last one was not fed


# -- nobody else's -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize("disk", [False, True])
def test_keys_bind_everything(collide, disk, tmp_path, monkeypatch):
    """Also when every hash is the same: then only comparisons are left."""
    if collide:
        monkeypatch.setattr(prefix, "_digest", lambda before, data: b"same")
    first, other, ids = llama(), build(llama_config(rope_theta=77.0)), prompt(40)
    store = PrefixStore(PLENTY, tmp_path / "store" if disk else None)
    caches = {
        (model.config.rope_parameters["rope_theta"], spec, namespace, extra): (model, fed(model, ids, spec))
        for model in (first, other)
        for spec in ("full", "int8")
        for namespace in ("", "tenant")
        for extra in ("", content_hash(torch.ones(2)))
    }
    for (_, _, namespace, extra), (_, cache) in caches.items():
        store.put(ids, cache, namespace, extra)
    if disk:
        store.flush()
        store = PrefixStore(PLENTY, tmp_path / "store")
    served = 0
    for (_, spec, namespace, extra), (model, cache) in caches.items():
        mine, matched = store.match(ids, model.config, spec=spec, namespace=namespace, extra=extra, leave=0)
        assert matched in (0, 40) and (matched == 0 or same(mine, cache))
        served += matched == 40
    assert served == (1 if collide and disk else 16)  # files of equal names replace each other
    for namespace, extra in (("other", ""), ("", "other"), ("tenant ", ""), ("", "tenant")):
        assert store.match(ids, first.config, spec="int8", namespace=namespace, extra=extra) == (None, 0)
    with pytest.raises(ValueError, match="2 models and of the specs full, int8: pass config= and spec="):
        PrefixStore.match(store_of_two(first, other, ids), ids)


def store_of_two(first, other, ids):
    store = PrefixStore(PLENTY)
    store.put(ids, fed(first, ids, "int8"))
    store.put(ids, fed(other, ids, "full"))
    return store


def test_tokens_are_compared_when_hashes_collide(monkeypatch):
    monkeypatch.setattr(prefix, "_digest", lambda before, data: b"same")
    model = llama()
    prompts = [torch.cat([prompt(32), prompt(8, seed=seed)], 1) for seed in range(2, 8)]
    store = store_of(model, *prompts)
    for ids in prompts:
        cache, matched = store.match(ids, leave=0)
        assert matched == 40 and same(cache, fed(model, ids))
    cache, matched = store.match(torch.cat([prompts[0][:, :20], prompts[1][:, 20:]], 1), leave=0)
    assert matched in (32, 40) and matched >= 32


def test_b42_what_is_served_does_not_reach_the_store():
    model, ids = llama("kvcache"), prompt(300)
    cache = fed(model, ids)
    store = PrefixStore(PLENTY)
    store.put(ids, cache)
    expected = content(cache)
    feed(model, prompt(9, seed=2), cache, 1)
    cache.reorder_cache(torch.tensor([0]))
    for _ in range(3):
        mine, matched = store.match(ids, leave=0)
        assert all(torch.equal(a, b) for a, b in zip(content(mine), expected, strict=True))
        feed(model, prompt(9, seed=3), mine, 1)
        mine.rollback(100)
        mine.batch_repeat_interleave(2)
    cache.reset()
    assert all(torch.equal(a, b) for a, b in zip(content(store.match(ids, leave=0)[0]), expected, strict=True))


def test_a_cache_asks_the_model_that_it_is_served_to():
    first, second, ids = llama("sdpa"), llama("kvcache"), prompt(300)
    store = store_of(first, ids)
    cache, _ = store.match(ids, second.config)
    assert cache.config is second.config and all(layer.config is second.config for layer in cache.layers)
    assert first.config._attn_implementation == "sdpa"


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first():
    model = llama()
    prompts = [prompt(40, seed=seed) for seed in range(4)]
    one = fed(model, prompts[0]).nbytes
    store = PrefixStore(3 * one)
    for ids in prompts[:3]:
        store.put(ids, fed(model, ids))
    assert store.match(prompts[0])[1] == 39
    store.put(prompts[3], fed(model, prompts[3]))
    assert [store.match(ids)[1] for ids in prompts] == [39, 0, 39, 39]
    assert store.nbytes == 3 * one == store.stats().memory_bytes and store.stats().evictions == 1


def test_shared_storages_count_once():
    """Many conversations over one document: the document's bytes are held and counted once."""
    model, document = llama(), prompt(600)
    store = store_of(model, document)
    alone = store.nbytes
    for seed in range(5):
        ids = torch.cat([document, prompt(5, seed=seed)], 1)
        cache, matched = store.match(ids)
        assert matched == 600
        feed(model, ids[:, 600:], cache)
        store.put(ids, cache)
    assert len(store) == 5  # the document is a prefix of each
    assert alone <= store.nbytes <= 1.1 * alone
    found = {pointer: size for entry in store._memory for pointer, size in prefix.storages(entry.cache)}
    assert store.nbytes == sum(found.values())
    store.clear()
    assert store.nbytes == 0 == len(store) and not store._storages and not store._index


def test_too_large_for_the_store():
    model, ids = llama(), prompt(40)
    cache = fed(model, ids)
    store = PrefixStore(cache.nbytes - 1)
    small = prompt(5, seed=9)
    assert store.put(small, fed(model, small)) and not store.put(ids, cache)
    assert store.match(ids) == (None, 0) and store.match(small)[1] == 4  # and nothing else had to go for it


def test_b50_a_store_holds_nothing_that_it_gave_up():
    model, ids = llama(), prompt(40)
    store = store_of(model, ids)
    entry = next(iter(store._memory))
    tensors = [weakref.ref(t) for layer in entry.cache.layers for slab in layer.sealed.slabs for t in slab.views()[0]]
    fork, _ = store.match(ids)
    del entry
    store.clear()
    del fork
    gc.collect()
    assert len(tensors) == 8 and not any(ref() is not None for ref in tensors)


# -- the folder --------------------------------------------------------------------------------------------------------


@every_spec
def test_what_leaves_memory_comes_back_from_the_folder(spec, tmp_path):
    model = llama()
    prompts = [prompt(40, seed=seed) for seed in range(3)]
    store = PrefixStore(fed(model, prompts[0], spec).nbytes, tmp_path / "store")
    for ids in prompts:
        store.put(ids, fed(model, ids, spec))
    stats = store.stats()
    assert (stats.entries, stats.disk_entries, stats.evictions) == (1, 2, 2) and stats.memory_bytes <= store.max_bytes
    for ids in prompts:
        cache, matched = store.match(ids, leave=0)
        assert matched == 40 and same(cache, fed(model, ids, spec))
    assert store.stats().disk_hits >= 2 and store.stats().memory_bytes <= store.max_bytes


def test_a_store_survives_its_process(tmp_path):
    model, ids = llama(), prompt(40)
    store_of(model, ids, directory=tmp_path / "store").flush()
    later = PrefixStore(PLENTY, tmp_path / "store")
    with pytest.raises(ValueError, match="pass config="):
        later.match(ids)
    more = torch.cat([ids[:, :30], prompt(9, seed=2)], 1)
    cache, matched = later.match(more, model.config)
    direct = fed(model, ids)
    direct.rollback(10)
    assert matched == 30 and same(cache, direct)
    assert later.match(ids)[1] == 39  # known from then on
    assert PrefixStore(PLENTY, tmp_path / "store", config=model.config, spec="int8").match(ids)[1] == 39
    assert PrefixStore(PLENTY, tmp_path / "store", config=model.config, spec="full").match(ids) == (None, 0)


def test_the_folder_has_a_limit(tmp_path):
    model = llama()
    prompts = [prompt(40, seed=seed) for seed in range(5)]
    store = PrefixStore(1, tmp_path / "store")
    store.put(prompts[0], fed(model, prompts[0]))
    store = PrefixStore(1, tmp_path / "store", config=model.config, disk_bytes=3 * store.stats().disk_bytes)
    for at, ids in enumerate(prompts):
        store.put(ids, fed(model, ids))
        for item in (tmp_path / "store").iterdir():
            os.utime(item, ns=(at, item.stat().st_mtime_ns if at else 10**9))
        time.sleep(0.01)
    assert store.stats().disk_entries == 3 == len(list((tmp_path / "store").iterdir()))
    assert [store.match(ids)[1] for ids in prompts] == [0, 0, 39, 39, 39]


def test_the_folder_is_private(tmp_path):
    old = os.umask(0)
    try:
        model, ids = llama(), prompt(20)
        store_of(model, ids, directory=tmp_path / "deep" / "store").flush()
    finally:
        os.umask(old)
    assert (tmp_path / "deep" / "store").stat().st_mode & 0o777 == 0o700
    assert all(item.stat().st_mode & 0o777 == 0o600 for item in (tmp_path / "deep" / "store").iterdir())


def test_folders_that_are_not_safe_are_refused(tmp_path, monkeypatch):
    for mode in (0o777, 0o770, 0o702):
        (tmp_path / "open").mkdir(exist_ok=True)
        (tmp_path / "open").chmod(mode)
        with pytest.raises(ValueError, match="can be written to by others"):
            PrefixStore(PLENTY, tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(ValueError, match="is a symbolic link"):
        PrefixStore(PLENTY, tmp_path / "link")
    (tmp_path / "open").chmod(0o700)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="cannot be written to"):
        PrefixStore(PLENTY, tmp_path / "open")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ValueError, match="belongs to another user"):
        PrefixStore(PLENTY, tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file"):
        PrefixStore(PLENTY, tmp_path / "file")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "link", "replaced", "gone", "header"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_damaged_file_is_passed_over_with_a_warning(damage, when, tmp_path):
    """Before the store has seen it, and after: the shorter prompt beside it is served instead."""
    model, ids = llama(), prompt(40)
    first = store_of(model, ids[:, :20], spec="int8+sink(2,12)", directory=tmp_path / "store")
    first.put(ids, fed(model, ids, "int8+sink(2,12)"))
    first.flush()
    store = PrefixStore(PLENTY, tmp_path / "store", config=model.config)
    if when == "after":
        store._scan()
    file = max((tmp_path / "store").iterdir(), key=lambda item: len(snapshot.read(item).token_ids))
    data = bytearray(file.read_bytes())
    data[{"flipped": -1, "header": 100}.get(damage, 0)] ^= 1 if damage in ("flipped", "header") else 0
    file.unlink()
    if damage in ("truncated", "flipped", "header"):
        file.write_bytes(data[: len(data) // 2] if damage == "truncated" else data)
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "replaced":
        KVCache(model.config).save(file)
    more = torch.cat([ids, prompt(4, seed=3)], 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache, matched = store.match(more, leave=0)
        again, _ = store.match(more, leave=0)
    told = [str(item.message) for item in caught if "PrefixStore" in str(item.message)]
    assert matched == 20 and same(cache, fed(model, ids[:, :20], "int8+sink(2,12)")) and again is not None
    quiet = damage == "gone" or (damage == "replaced" and when == "before")
    assert len(told) == (0 if quiet else 1) == store.stats().errors, told


@pytest.mark.parametrize("what", ["tokens", "namespace", "by hand"])
def test_a_file_that_another_process_replaced_is_not_served(what, tmp_path):
    """As when names collide: right model, right spec, sound file, but another's cache."""
    model, ids, other = llama(), prompt(40), prompt(40, seed=5)
    store_of(model, ids, directory=tmp_path / "store").flush()
    store = PrefixStore(PLENTY, tmp_path / "store", config=model.config)
    store._scan()
    (file,) = (tmp_path / "store").iterdir()
    facts = {"namespace": "bob" if what == "namespace" else "", "extra": "", "exact_from": "0"}
    tokens = ids if what == "namespace" else other
    snapshot.save(fed(model, tokens), file, tokens[0], **({} if what == "by hand" else facts))
    with pytest.warns(RuntimeWarning, match="holds another cache than it did"):
        assert store.match(ids) == (None, 0)


def test_a_full_disk_loses_the_entry_and_says_so(tmp_path, monkeypatch):
    model, ids = llama(), prompt(40)
    store = PrefixStore(1, tmp_path / "store")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="was not written to .*No space left"):
        assert not store.put(ids, fed(model, ids))
    assert store.match(ids) == (None, 0) and not list((tmp_path / "store").iterdir())
    assert store.stats().errors == 1 and store.nbytes == 0
    monkeypatch.undo()
    assert store.put(ids, fed(model, ids)) and store.match(ids)[1] == 39


def test_a_folder_that_cannot_be_flushed_costs_nothing(tmp_path, monkeypatch):
    model, ids, flushed = llama(), prompt(40), os.fsync
    store = PrefixStore(1, tmp_path / "store")

    def only_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flushed(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    assert store.put(ids, fed(model, ids)) and store.match(ids)[1] == 39
    assert store.stats().errors == 0


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    (tmp_path / "store").mkdir(mode=0o700)
    old, new = (tmp_path / "store" / f".{name}.safetensors.1.ab.tmp" for name in ("old", "new"))
    for item in (old, new):
        item.write_text("half")
    os.utime(old, (time.time() - 7200,) * 2)
    PrefixStore(PLENTY, tmp_path / "store")
    assert not old.exists() and new.exists()  # whose writer may be at work


WORKER = """
import random, sys, warnings
warnings.simplefilter("ignore", FutureWarning)
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from models import feed, llama, prompt
from hf_kvcache import KVCache, PrefixStore
model, draw = llama(), random.Random(int(sys.argv[1]))
store = PrefixStore(1, {path!r}, config=model.config, disk_bytes=60_000)
for turn in range(30):
    ids, tenant = prompt(40, seed=draw.randrange(4)), str(draw.randrange(2))
    cache, matched = store.match(ids, namespace=tenant, leave=0)
    direct = KVCache.from_spec(model.config, "int8")
    feed(model, ids, direct)
    if cache is not None:
        assert matched == 40
        for a, b in zip(cache, direct):
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    else:
        store.put(ids, direct, namespace=tenant)
print("hits", store.stats().hits, "errors", store.stats().errors)
"""


def test_two_processes_on_one_folder(tmp_path):
    code = WORKER.format(tests=os.path.dirname(__file__), path=str(tmp_path / "store"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([sys.executable, "-c", code, str(i)], env=environment, stdout=-1, stderr=-1, text=True)
        for i in range(2)
    ]
    for worker in workers:
        out, err = worker.communicate(timeout=300)
        assert worker.returncode == 0, err
        assert "errors 0" in out and int(out.split()[1]) > 0, (out, err)
    assert not [item for item in (tmp_path / "store").iterdir() if item.name.endswith(".tmp")]


@pytest.mark.parametrize("disk", [False, True])
def test_eight_threads_on_one_store(disk, tmp_path):
    model = llama()
    prompts = [torch.cat([prompt(30), prompt(20, seed=seed)], 1) for seed in range(10)]
    direct = [fed(model, ids) for ids in prompts]
    expected = [content(cache) for cache in direct]
    store = PrefixStore(4 * direct[0].nbytes, tmp_path / "store" if disk else None, config=model.config)
    wrong, until = [], time.monotonic() + 1.5

    def work(me):
        draw = random.Random(me)
        try:
            while time.monotonic() < until:
                which, tenant = draw.randrange(10), str(draw.randrange(2))
                if draw.random() < 0.3:
                    store.put(prompts[which], direct[which].fork(), tenant)
                cache, matched = store.match(prompts[which], namespace=tenant, leave=draw.randrange(2))
                store.stats()
                if matched:
                    pairs = zip(content(cache), expected[which], strict=True)
                    assert 30 <= matched <= 50 and all(torch.equal(a, b[:, :, :matched]) for a, b in pairs)
                    cache.update(*(torch.randn(1, 2, 3, 8) for _ in range(2)), 0)
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)
            raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and store.stats().hits > 20 and store.nbytes <= store.max_bytes
    found = {pointer: size for entry in store._memory for pointer, size in prefix.storages(entry.cache)}
    assert store.nbytes == sum(found.values())


# -- the helpers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec, attention", [("full", "sdpa"), *((spec, "kvcache") for spec in SPECS[1:])])
def test_generate_with_prefix_equals_generate(spec, attention):
    model, system = llama(attention), prompt(40)
    store = PrefixStore(PLENTY)
    for seed in (2, 3):
        ids = torch.cat([system, prompt(7, seed=seed)], 1)
        # The schedule of the helper, so that low bits round alike: all but the last token first.
        direct = fed(model, ids[:, :-1], spec)
        expected = greedy(model, ids, direct, 6)
        out = generate_with_prefix(model, store, spec=spec, input_ids=ids, do_sample=False, max_new_tokens=6)
        assert torch.equal(out, expected)
        reused = store.stats().tokens_reused
        again = generate_with_prefix(model, store, spec=spec, input_ids=ids, do_sample=False, max_new_tokens=6)
        assert torch.equal(again, expected) and store.stats().tokens_reused - reused == 46
        turn = torch.cat([out, prompt(4, seed=9)], 1)
        reused = store.stats().tokens_reused
        out = generate_with_prefix(model, store, spec=spec, input_ids=turn, do_sample=False, max_new_tokens=3)
        assert store.stats().tokens_reused - reused == 52 and out.shape == (1, 60)


@pytest.mark.parametrize("run", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_generate_with_prefix_and_several_rows(run):
    model, ids, store = llama("kvcache"), prompt(40), PrefixStore(PLENTY, spec="int8")
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        outputs.append(generate_with_prefix(model, store, input_ids=ids, max_new_tokens=5, **run))
    torch.manual_seed(0)
    expected = model.generate(ids, past_key_values=KVCache.from_spec(model.config, "int8"), max_new_tokens=5, **run)
    assert torch.equal(outputs[0], expected) and torch.equal(outputs[1], expected)
    assert store.stats().hits == 1 and store.stats().tokens_reused == 39


def test_generate_with_prefix_refuses_what_it_cannot_tell_apart():
    model, ids, store = llama(), prompt(20), PrefixStore(PLENTY)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    for inputs, words in (
        ({"input_ids": prompt(20, 2)}, "one row"),
        ({}, "one row"),
        ({"input_ids": ids, "attention_mask": mask}, "padding"),
        ({"input_ids": ids, "pixel_values": torch.ones(3)}, "does not take pixel_values.*content_hash"),
        ({"input_ids": ids, "past_key_values": KVCache(model.config)}, "past_key_values"),
    ):
        with pytest.raises(ValueError, match=words):
            generate_with_prefix(model, store, **inputs)
    out = generate_with_prefix(model, store, input_ids=ids[:, :1], max_new_tokens=3)
    assert out.shape == (1, 4)
    out = generate_with_prefix(model, store, input_ids=ids, max_new_tokens=3, return_dict_in_generate=True)
    assert out.sequences.shape == (1, 23) and store.match(out.sequences)[1] == 22


def test_generate_with_prefix_after_the_model_changed_its_dtype():
    model, ids, store = build(llama_config()), prompt(20), PrefixStore(PLENTY)
    generate_with_prefix(model, store, input_ids=ids, max_new_tokens=3)
    model.to(torch.bfloat16)
    out = generate_with_prefix(model, store, input_ids=ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(out, greedy(model, ids, KVCache(model.config), 3))


@every_spec
def test_a_chat_whose_earlier_turns_are_rewritten(spec):
    model = llama()
    old, cache = prompt(50), KVCache.from_spec(llama().config, spec)
    out = greedy(model, old, cache, 4)
    new = torch.cat([out[:, :40], prompt(20, seed=8)], 1)
    exact = cache.can_rollback(cache.get_seq_length() - 40)
    kept = rewind(cache, out, new)
    assert kept == cache.get_seq_length() == (40 if exact else 0)
    assert exact == (spec in ("full", "int8", "fp8"))
    expected = fed(model, new[:, :kept], spec) if kept else KVCache.from_spec(model.config, spec)
    assert torch.equal(greedy(model, new, cache, 6), greedy(model, new, expected, 6))
    assert rewind(cache, new, copy.deepcopy(new)) in (0, 59) if cache.get_seq_length() == 60 else True
    with pytest.raises(ValueError, match="cached ids"):
        rewind(cache, new[:, :3], new)


def test_rewind_to_a_prompt_that_is_all_there():
    model, ids = llama(), prompt(30)
    cache = fed(model, ids)
    assert rewind(cache, ids, ids) == 29
    assert rewind(cache, ids[:, :29], ids[:, :10]) == 9 == cache.get_seq_length()
    assert torch.equal(greedy(model, ids[:, :10], cache, 4), greedy(model, ids[:, :10], fed(model, ids[:, :9]), 4))
