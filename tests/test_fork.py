"""Forks share what never changes, and know nothing of each other."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build, feed, greedy, llama, llama_config, prompt, states

from hf_kvcache import KVCache, store
from hf_kvcache.part import Part, map_state
from hf_kvcache.reference import attend_reference, attend_torch
from hf_kvcache.spec import storage
from hf_kvcache.store import Slab

STORAGES = ("full", "int8", "fp8", "int4(residual=8,group=8)", "int2(residual=8,group=8)", "k4v2(residual=0,group=8)")
SPECS = [*STORAGES, *(f"{name}+sink(2,12)" for name in STORAGES)]
every_spec = pytest.mark.parametrize("spec", SPECS)
shared_spec = pytest.mark.parametrize("spec", STORAGES)


@pytest.fixture(autouse=True)
def share_everything(monkeypatch):
    """Few tokens are copied rather than shared; tests are about few tokens."""
    monkeypatch.setattr(store, "FEW", 0)


def filled(spec, n=40, batch=2, layers=1, width=8):
    cache = KVCache.from_spec(llama_config(layers), spec)
    for layer in range(layers):
        cache.update(*states(n, batch, width=width), layer)
    return cache


def content(cache):
    """All that a cache holds, decoded, and its counters."""
    pairs = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    return pairs, cache.stats(), cache.get_mask_sizes(3)


def same(first, second):
    (pairs, *counters), (others, *more) = first, second
    return counters == more and all(
        torch.equal(x, y) for mine, theirs in zip(pairs, others, strict=True) for x, y in zip(mine, theirs, strict=True)
    )


def storages(*caches):
    found = {}
    for cache in caches:
        for layer in cache.layers:
            for slab in (slab for run in layer.runs for slab in run.slabs if slab.state is not None):
                for t in (t for piece in (*slab.frozen, slab.state) for t in piece):
                    found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return found


def append(cache, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for index, layer in enumerate(cache.layers):
        shape = (layer.batch_size, 2, tokens, 8)
        cache.update(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), index)


# -- independent, and the same as a copy -------------------------------------------------------------------------------

OPERATIONS = {
    "one": lambda cache, seed: append(cache, 1, seed),
    "some": lambda cache, seed: append(cache, 3, seed),
    "many": lambda cache, seed: append(cache, 21, seed),
    "rollback": lambda cache, seed: cache.rollback(min(2, cache.get_seq_length())),
    "reorder": lambda cache, seed: cache.reorder_cache(torch.tensor([*range(1, cache.batch_size), 0])),
    "first": lambda cache, seed: cache.reorder_cache(torch.zeros(cache.batch_size, dtype=torch.long)),
    "repeat": lambda cache, seed: cache.batch_repeat_interleave(2 if cache.batch_size < 8 else 1),
    "select": lambda cache, seed: cache.batch_select_indices(torch.tensor([cache.batch_size - 1, 0])),
    "halve": lambda cache, seed: cache.batch_select_indices(torch.arange(cache.batch_size) % 2 == 0),
    "reset": lambda cache, seed: (cache.reset(), cache.update(*states(2), 0)),
    "fork": lambda cache, seed: cache.fork(),
}


def try_on(cache, name, seed):
    try:
        OPERATIONS[name](cache, seed)
    except ValueError as error:
        return str(error)[:20]


@given(
    st.sampled_from(SPECS),
    st.integers(1, 45),
    st.integers(1, 2),
    st.lists(st.tuples(st.booleans(), st.sampled_from(sorted(OPERATIONS))), min_size=1, max_size=8),
)
@settings(max_examples=40, deadline=None)
def test_a_fork_and_its_original_go_on_as_copies_do(spec, n, batch, operations):
    cache = filled(spec, n, batch)
    caches = [cache, cache.fork()]
    copies = [copy.deepcopy(cache), copy.deepcopy(cache)]
    for seed, (which, name) in enumerate(operations):
        torch.manual_seed(seed)
        mine = try_on(caches[which], name, seed)
        torch.manual_seed(seed)
        assert try_on(copies[which], name, seed) == mine
        for ours, theirs in zip(caches, copies, strict=True):
            assert same(content(ours), content(theirs))


@every_spec
def test_forks_of_forks(spec):
    """Each one continues from where it was forked, whatever its relatives do."""
    cache, families = filled(spec, 40), []
    direct = copy.deepcopy(cache)
    for turn in range(6):
        families.append((cache.fork(), copy.deepcopy(direct)))
        append(cache, 5, turn)
        append(direct, 5, turn)
    for turn, (fork, twin) in enumerate(families):
        append(fork, 4, 50 + turn)
        append(twin, 4, 50 + turn)
        assert same(content(fork), content(twin))
    assert same(content(cache), content(direct))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_pieces_stay_few(runs):
    """Their lengths fall by a factor of four, however often a cache is forked while it grows."""
    slab = Slab()
    one = storage("full").key_codec.encode(torch.zeros(1, 1, 1, 1))
    for count in runs:
        slab.append(map_state(one, lambda t, n=count: t.expand(1, 1, n, 1)))
        slab.fork()
    lengths = [piece[0].shape[2] for piece in slab.frozen]
    assert sum(lengths) == sum(runs) == len(slab)
    assert all(a >= 4 * b for a, b in zip(lengths, lengths[1:], strict=False))


def test_few_tokens_are_copied(monkeypatch):
    """So that a fork of a short cache is one piece again, and gives the very bits that the original gives."""
    monkeypatch.setattr(store, "FEW", 256)
    model, ids = llama("kvcache"), prompt(40)
    cache = KVCache(model.config, "int8")
    feed(model, ids, cache)
    fork = cache.fork()
    expected = feed(model, prompt(9, seed=2), copy.deepcopy(cache), 1)
    assert torch.equal(feed(model, prompt(9, seed=2), fork, 1), expected)
    assert not fork.layers[0].sealed.keys.frozen


# -- bytes -------------------------------------------------------------------------------------------------------------


def union(*caches):
    return sum(storages(*caches).values())


@pytest.mark.parametrize("spec", ["full", "int8", "fp8"])
def test_b44_forks_of_a_long_prefix_add_little(spec):
    cache = filled(spec, 4000, 1, layers=2)
    alone = union(cache)
    forks = [cache.fork() for _ in range(8)]
    assert union(cache, *forks) <= 1.02 * alone and all(fork.nbytes == alone for fork in forks)
    for seed, fork in enumerate([cache, *forks]):
        append(fork, 1, seed)
    assert union(cache, *forks) <= 1.05 * alone
    for _ in range(20):
        append(forks[0], 1)
    assert union(cache, *forks) <= 1.06 * alone
    shared = [set(storages(fork)) & set(storages(cache)) for fork in forks]
    assert all(shared)


@pytest.mark.parametrize("spec, most", [("int8", 0.57), ("int4", 0.40), ("int2", 0.29)])
def test_b44_packed_bytes_only(spec, most):
    """The codes are shared as they are; nothing is decoded to make a fork."""
    cache = KVCache.from_spec(llama_config(1, head_dim=64), spec)
    cache.update(*states(2000, 1, width=64, dtype=torch.bfloat16), 0)
    forks = [cache.fork() for _ in range(8)]
    assert union(cache, *forks) == union(cache) <= most * 2 * 2 * 2000 * 64 * 2


@every_spec
def test_nbytes_of_a_fork_is_every_byte_it_reaches(spec):
    cache = filled(spec, 60)
    fork = cache.fork()
    append(fork, 3)
    fork.batch_repeat_interleave(2)
    append(fork, 1)
    for one in (cache, fork):
        assert one.nbytes == sum(storages(one).values()) == sum(one.memory()["device"].values())


@pytest.mark.parametrize("spec", ["int8", "int4(residual=8,group=8)", "full+sink(2,12)"])
def test_b50_forks_hold_nothing_beyond_their_own_life(spec):
    cache = filled(spec, 300)
    fork = cache.fork()
    tensors = [weakref.ref(t) for layer in cache.layers for slab in layer.sealed.slabs for t in slab.views()[0]]
    append(fork, 30)
    del fork, cache
    gc.collect()
    assert len(tensors) >= 2 and not any(ref() is not None for ref in tensors)


def test_a_ring_is_copied_once():
    cache = filled("int8+sink(2,12)", 40)
    fork, pointers = cache.fork(), set(storages(cache))
    assert set(storages(fork)) == pointers
    append(fork, 1)
    after = set(storages(fork))
    assert not any(t.data_ptr() in pointers for slab in fork.layers[0].sealed.slabs for t in slab.state)
    append(fork, 1)
    assert set(storages(fork)) == after


# -- batches -----------------------------------------------------------------------------------------------------------


@shared_spec
def test_repeating_a_batch_shares_what_is_sealed(spec):
    cache = filled(spec, 400, 1)
    before = sum(t.nbytes for slab in cache.layers[0].sealed.slabs for t in slab.view())
    cache.batch_repeat_interleave(8)
    cache.reorder_cache(torch.tensor([7, 7, 0, 1, 2, 2, 2, 5]))
    append(cache, 1)
    sealed = {ptr: size for ptr, size in storages(cache).items()}
    frozen = [t for slab in cache.layers[0].sealed.slabs for piece in slab.frozen for t in piece]
    assert all(t.shape[0] == 1 for t in frozen) and sum(t.nbytes for t in frozen) == before
    assert cache.layers[0].keys.shape[0] == 8 and len(sealed) >= len(frozen)


@pytest.mark.parametrize("rows", [[1, 0], [0, 0, 1, 1], [1, 1, 1], [0, 1, 0, 1], [0], [1, 1, 0, 0, 1, 1]])
def test_rows_of_a_shared_batch(rows):
    """Rows that stay next to their likes stay shared; any other choice is right as well."""
    cache = filled("int8", 30, 2)
    direct = copy.deepcopy(cache)
    cache.batch_repeat_interleave(3)
    direct.layers[0]._map_rows(lambda t: t.repeat_interleave(3, 0))
    pick = torch.tensor(rows) * 3 + torch.arange(len(rows)) % 3
    for one in (cache, direct):
        one.batch_select_indices(pick)
        append(one, 2)
    assert all(torch.equal(a, b) for a, b in zip(content(cache)[0][0], content(direct)[0][0], strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
@pytest.mark.parametrize("batch", [1, 2])
@shared_spec
def test_b12_beams_over_a_shared_prefix(spec, attention, batch):
    model, ids = llama(attention), prompt(33, batch)
    cache, direct = KVCache.from_spec(model.config, spec), KVCache.from_spec(model.config, spec)
    feed(model, ids[:, :30], cache)
    cache.batch_repeat_interleave(3)
    feed(model, ids[:, :30].repeat_interleave(3, 0), direct)
    run = dict(num_beams=3, num_return_sequences=3)
    assert torch.equal(greedy(model, ids, cache, 8, **run), greedy(model, ids, direct, 8, **run))


@pytest.mark.parametrize("held", [1, 2, 6])
@pytest.mark.parametrize("name", ["full", "int8", "fp8", "int4(group=8)", "k2v4(group=8,key_axis=token)"])
def test_attention_over_rows_that_stand_for_several(name, held):
    codecs = storage(name)
    shared, own = states(24, held), states(8, 6)
    parts = [Part(codecs.key_codec, codecs.key_codec.encode(k), codecs.value_codec, codecs.value_codec.encode(v))
             for k, v in (shared, own)]  # fmt: skip
    whole = tuple(torch.cat([x.repeat_interleave(6 // held, 0), y], 2) for x, y in zip(shared, own, strict=True))
    plain = Part(codecs.key_codec, codecs.key_codec.encode(whole[0]), codecs.value_codec,
                 codecs.value_codec.encode(whole[1]))  # fmt: skip
    query = torch.randn(6, 4, 3, 8)
    mask = torch.rand(6, 1, 3, 32) > 0.3
    expected = attend_reference(query, [plain], 0.3, mask)
    for attend in (attend_reference, attend_torch):
        assert (attend(query, parts, 0.3, mask) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("held, taken", [(1, True), (2, False)])
def test_triton_takes_a_view_of_one_row_for_all(held, taken):
    triton_decode = pytest.importorskip("hf_kvcache.triton_decode")
    codecs = storage("int8")
    parts = [Part(codecs.key_codec, codecs.key_codec.encode(k), codecs.value_codec, codecs.value_codec.encode(v))
             for k, v in (states(40, held), states(5, 6))]  # fmt: skip
    query = torch.randn(6, 4, 1, 8)
    whole = [part.expand(6) for part in parts]
    assert triton_decode.supports(query, whole) == taken
    if taken:
        expected = attend_reference(query, parts, 0.3)
        assert (triton_decode.attend_triton(query, whole, 0.3) - expected).abs().max() < 1e-4


# -- with a model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
@every_spec
def test_b42_a_prefix_serves_many_and_stays_what_it_is(spec, attention):
    model, ids = llama(attention), prompt(60)
    prefix = KVCache.from_spec(model.config, spec)
    feed(model, ids, prefix)
    before, full = content(prefix), torch.cat([ids, prompt(3, seed=4)], 1)
    expected = greedy(model, full, copy.deepcopy(prefix), 6)
    for _ in range(3):
        assert torch.equal(greedy(model, full, prefix.fork(), 6), expected)
    assert prefix.get_seq_length() == 60 and same(content(prefix), before)
    assert torch.equal(greedy(model, full, prefix, 6), expected)


@pytest.mark.parametrize("spec", ["full", "int8"])
def test_forks_of_windows_and_recurrent_states(spec):
    from test_caches import gemma3_config, qwen3_next_config

    for config in (gemma3_config(), qwen3_next_config()):
        model, ids = build(config), prompt(20)
        cache = KVCache.from_spec(model.config, spec)
        feed(model, ids, cache)
        twin, fork, new = copy.deepcopy(cache), cache.fork(), prompt(5, seed=2)
        feed(model, prompt(7, seed=3), cache.fork(), 1)  # reaches neither the original nor the other fork
        expected = feed(model, new, twin, 1)
        assert torch.equal(feed(model, new, cache, 1), expected)
        assert torch.equal(feed(model, new, fork, 1), expected)


@pytest.mark.parametrize("spec", ["full", "int8", "int4(residual=8,group=8)"])
def test_inference_mode_and_grad_mode(spec):
    model, ids, new = llama("kvcache"), prompt(40), prompt(20, seed=2)
    cache = KVCache.from_spec(model.config, spec)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        fork = cache.fork()
        model(new[:, :3], past_key_values=fork)
        again = fork.fork()
    twin = copy.deepcopy(fork)
    expected = feed(model, new[:, 3:], twin, 1)
    for one in (fork, again):
        assert torch.equal(feed(model, new[:, 3:], one, 1), expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@shared_spec
def test_stock_attention_sees_the_very_bits_of_a_cache_that_was_never_forked(spec, attention):
    """Our own attention adds up shared and own tokens apart: the same up to float rounding."""
    model, ids, new = llama(attention), prompt(60), prompt(9, seed=2)
    cache, ours = KVCache.from_spec(model.config, spec), llama("kvcache")
    feed(model, ids, cache)
    direct, fork = copy.deepcopy(cache), cache.fork()
    mine = cache.fork()
    expected = feed(model, new, direct, 2)
    assert torch.equal(feed(model, new, fork, 2), expected)
    mine.config = ours.config
    for layer in mine.layers:
        layer.config = ours.config
    assert (feed(ours, new, mine, 2) - expected).abs().max() < (2e-4 if spec == "full" else 2e-2)
