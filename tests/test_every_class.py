"""Scenarios of public reports for the caches that test_caches.py leaves out: low bits, importance eviction, offloading.

Names that begin with a number such as b12 are scenarios from public reports.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from families import DECODERS, case
from models import build, feed, greedy, llama, llama_config, prompt, reorders
from test_caches import fully_cached, gemma3_config, memory_total, padded, reachable_bytes
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_kvcache import KVCache
from hf_kvcache.caches import tensors_of

LOW, MIXED = "int4(group=8,residual=8)", "k8v2(group=8,residual=4,sinks=2)"
FAR = ["cpu", "int8+cpu", f"{LOW}+cpu", "int8+sink(2,6)+cpu"]
BITS = [LOW, MIXED, f"{LOW}+sink(2,16)"]
MOVED = "int8+sink(2,6,reposition=on)"
KNORM, RANDOM = "knorm(budget=14,sinks=2,recent=4)", "random(budget=14,sinks=2,recent=4)"
H2O, TOVA = "h2o(budget=14,sinks=2,recent=4)", "tova(budget=14,sinks=2,recent=4)"
SNAPKV = "snapkv(budget=14,sinks=2,recent=4,window=4,kernel=3)"
EXPECTED = "expected(budget=14,sinks=2,recent=4,future=16)"
BY_KEYS = [KNORM, f"int8+{RANDOM}", f"{LOW}+{KNORM}"]  # under any attention
BY_MASS = [SNAPKV, TOVA, f"int8+{H2O}", f"{LOW}+{SNAPKV}", f"int8+{H2O[:-1]},adaptive)", EXPECTED]  # under ours only
EVICTING = [(spec, name) for spec in BY_KEYS for name in ("sdpa", "kvcache")] + [(spec, "kvcache") for spec in BY_MASS]
KEEPING = [(spec, name) for spec in BITS + FAR for name in ("sdpa", "kvcache")] + [(MOVED, "kvcache")]
WINDOWS = {"sliding_window", "attention_chunk_size"}
every_pair = pytest.mark.parametrize("spec, attention", KEEPING + EVICTING)
evicting_pair = pytest.mark.parametrize("spec, attention", EVICTING)
keeping_pair = pytest.mark.parametrize("spec, attention", KEEPING)
every_spec = pytest.mark.parametrize("spec", [*BITS, *FAR, MOVED, *BY_KEYS, *BY_MASS])


def cache_for(model, spec):
    return KVCache.from_spec(model.config, spec)


def attention_of(spec):
    return "kvcache" if spec in (MOVED, *BY_MASS) else "sdpa"


def same(first, second):
    """Equal bit for bit, whatever a row without a token is filled with."""
    for mine, theirs in zip(first.layers, second.layers, strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


# -- a fresh cache, and what is counted --------------------------------------------------------------------------------


@every_spec
def test_b06_a_fresh_cache_answers_everything(spec):
    cache = KVCache.from_spec(llama_config(3), spec)
    assert cache.get_seq_length() == cache.get_seq_length(2) == cache.nbytes == memory_total(cache) == 0
    assert cache.get_mask_sizes(5, 0) == (5, 0) and cache.get_max_length() == -1
    cache.reset()
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.crop(-1)
    cache.rollback(0)
    with pytest.raises(ValueError):
        cache.rollback(1)
    assert cache.batch_size == -1 and not cache.is_initialized and not cache.is_compileable
    assert len(cache) == 3 and [item[:2] for item in cache] == [(None, None)] * 3
    assert cache.spec in repr(cache) and cache.fork().spec == pickle.loads(pickle.dumps(cache)).spec == cache.spec
    assert (cache.stats().tokens_seen, cache.stats().tokens_kept, cache.stats().tokens_quantized) == (0, 0, 0)
    model, ids = llama(attention_of(spec), 3), prompt(12, 2)
    cache = cache_for(model, spec)
    cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    assert cache.is_initialized and cache.get_seq_length() == cache.nbytes == 0 and cache.batch_size == 2
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert repr(cache) and list(cache)
    assert torch.equal(feed(model, ids, cache, 5), feed(model, ids, cache_for(model, spec), 5))


@every_pair
def test_nbytes_is_every_reachable_byte(spec, attention):
    model = llama(attention)
    cache = cache_for(model, spec)
    for n in (1, 30, 1, 1):
        feed(model, prompt(n, 2), cache)
        assert cache.nbytes == memory_total(cache) == reachable_bytes(cache) > 0
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.nbytes == memory_total(cache) == reachable_bytes(cache)


# -- the batch axis ----------------------------------------------------------------------------------------------------


class Replayed(Cache):
    """Moves rows by feeding all that was ever fed once more, in the new order, to a fresh cache."""

    def __init__(self, model, spec):
        self.make, self.calls = lambda: cache_for(model, spec), []
        super().__init__(layers=self.make().layers)

    def update(self, keys, values, layer_idx, *args, **kwargs):
        self.calls.append((keys, values, layer_idx))
        return super().update(keys, values, layer_idx)

    def reorder_cache(self, beams):
        calls, self.calls, self.layers = self.calls, [], self.make().layers
        for keys, values, layer in calls:
            self.update(keys[beams], values[beams], layer)


@every_pair
def test_b12_moved_rows_equal_rows_built_in_that_order(spec, attention):
    model, ids, order = llama(attention), prompt(20, 4), torch.tensor([3, 3, 0, 1])
    moved, built = cache_for(model, spec), cache_for(model, spec)
    for cache, rows in ((moved, ids), (built, ids[order])):
        feed(model, rows[:, :17], cache)
        feed(model, rows[:, 17:], cache, 1)
    moved.reorder_cache(order)
    same(moved, built)
    new = prompt(9, 4, seed=4)
    assert torch.equal(feed(model, new, moved, 3), feed(model, new, built, 3))


@pytest.mark.parametrize("spec, attention", [*KEEPING, *((spec, "sdpa") for spec in BY_KEYS)])
def test_b12_three_beams_equal_replayed_beams(spec, attention):
    model, ids = llama(attention), prompt(20, 2)
    expected = greedy(model, ids, Replayed(model, spec), 8, num_beams=3, length_penalty=0.0)
    assert torch.equal(greedy(model, ids, cache_for(model, spec), 8, num_beams=3, length_penalty=0.0), expected)


@every_spec
def test_b15_every_step_of_beam_search_reorders_every_layer(spec):
    model = llama(attention_of(spec))
    calls = reorders(model, cache_for(model, spec))
    assert calls.count(0) == calls.count(1) >= 6


@every_pair
def test_b41_a_row_does_not_depend_on_its_mates(spec, attention):
    model, ids = llama(attention), prompt(20, 4)
    together = greedy(model, ids, cache_for(model, spec), 8)
    for row in (0, 3):
        assert torch.equal(greedy(model, ids[row : row + 1], cache_for(model, spec), 8)[0], together[row])


@keeping_pair
def test_b36_padding_changes_no_row(spec, attention):
    """Stock attention counts groups from a row's first slot: pads shift them, unless they fill whole ones."""
    if "sink(" in spec:
        pytest.skip("a window under padding has tests of its own")
    model, far = llama(attention), "cpu" in spec
    if attention != "kvcache" or far:
        spec = spec.replace("sinks=2", "sinks=0").replace("residual=8", "residual=8,sinks=0")
    rows, ids, mask = padded((24, 16) if attention != "kvcache" or far else (24, 13))
    together = cache_for(model, spec)
    out = greedy(model, ids, together, 6, attention_mask=mask)
    for i, row in enumerate(rows):
        alone = cache_for(model, spec)
        assert torch.equal(out[i, 24:], greedy(model, row[None], alone, 6)[0, len(row) :])
        for mine, other in zip(together.layers, alone.layers, strict=True):
            first = 0 if hasattr(mine, "own") else 24 - len(row)
            keys = mine.keys[i : i + 1, :, first : first + other.seen]
            torch.testing.assert_close(keys, other.keys, atol=1e-4, rtol=1e-4)


# -- rollback and reset ------------------------------------------------------------------------------------------------


@every_pair
@pytest.mark.parametrize("assistant", ["model", "lookup"])
def test_b19_speculative_decoding_is_equal_or_refused(spec, attention, assistant):
    """Refused by transformers, which believes ``is_croppable``, before the first draft; older ones find out by crop."""
    model, ids = llama(attention), prompt(6).repeat(1, 2)
    cache, fed = cache_for(model, spec), []
    helper = dict(assistant_model=llama(seed=5)) if assistant == "model" else dict(prompt_lookup_num_tokens=3)
    expected = greedy(model, ids, cache_for(model, spec), 10)
    hook = model.model.embed_tokens.register_forward_hook(lambda *_: fed.append(1))
    try:
        out = greedy(model, ids, cache, 10, **helper)
    except ValueError as error:
        assert "crop(" in str(error) or ("cropped" in str(error) and len(fed) <= 1)
    else:
        assert torch.equal(out, expected)
    finally:
        hook.remove()
    everything = 0 < cache.get_seq_length() == cache.exact_rollback()  # nothing was evicted or sealed
    assert cache.is_croppable == (spec in ("cpu", "int8+cpu") or everything)


@every_pair
def test_b20_reset_equals_a_new_cache(spec, attention):
    model = llama(attention)
    cache = cache_for(model, spec)
    feed(model, prompt(20, 2), cache, 7)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0 and memory_total(cache) == 0
    assert cache.batch_size == -1 and not cache.is_initialized
    fresh = cache_for(model, spec)
    assert cache.stats() == fresh.stats()
    ids = prompt(25, 3, seed=6)  # another batch size
    assert torch.equal(feed(model, ids, cache, 4), feed(model, ids, fresh, 4))
    same(cache, fresh)


# -- length, position and mask -----------------------------------------------------------------------------------------


@evicting_pair
def test_b24_seen_is_not_held(spec, attention):
    model, ids, fed, at = llama(attention), prompt(20), [], []
    cache = cache_for(model, spec)
    out = greedy(model, ids, cache, 4)
    assert cache.get_seq_length() == 23 and cache.layers[0].kept <= 14 < cache.layers[0].positions.max()
    hooks = [
        model.model.embed_tokens.register_forward_hook(lambda m, args, _: fed.append(args[0].shape[1])),
        model.model.rotary_emb.register_forward_hook(lambda m, args, kwargs, _: at.append(kwargs), with_kwargs=True),
    ]
    twin, second = cache.fork(), torch.cat([out, prompt(3, seed=7)], 1)  # the second turn feeds only what is new
    greedy(model, second, cache, 2)
    for hook in hooks:
        hook.remove()
    assert fed == [4, 1] and [k["position_ids"].tolist() for k in at] == [[[23, 24, 25, 26]], [[27]]]
    with torch.no_grad():
        by_hand = model(second[:, 23:], position_ids=torch.arange(23, 27)[None], past_key_values=twin.fork()).logits
        assert torch.equal(by_hand, model(second[:, 23:], past_key_values=twin).logits)


@every_pair
def test_b25_mask_sizes_are_what_update_returns(spec, attention):
    model, lengths, cache = llama(attention), [], cache_for(llama(attention), spec)
    for n in range(1, 18):  # windows and budgets are full at 8, 14 and 16
        feed(model, prompt(1, seed=n), cache)
        for q in (1, 3, 15) if n % 8 in (0, 1, 5, 6, 7) else ():
            fork = cache.fork()
            told, update = [fork.get_mask_sizes(q, i) for i in range(2)], fork.update
            lengths.clear()
            fork.update = lambda *a, f=update, **k: (out := f(*a, **k), lengths.append(out[0].shape[2]))[0]
            feed(model, prompt(q), fork)
            assert [length for length, _ in told] == lengths
            assert all(length + offset in (n + q, length) for length, offset in told)


@every_pair
def test_b29_one_token_prompt(spec, attention):
    """The same as feeding it by hand; a policy runs once in each layer for each forward, the first included."""
    model, ids, runs = llama(attention), prompt(1), []
    cache, by_hand = cache_for(model, spec), cache_for(model, spec)
    for layer in cache.layers:
        if hasattr(layer, "settle"):
            layer.settle = lambda *a, f=layer.settle, n=layer.index: (runs.append(n), f(*a))
    out = greedy(model, ids, cache, 18)
    if "budget" in spec:
        assert max(layer.kept for layer in cache.layers) <= 14
        assert runs.count(0) == runs.count(1) == 18
    for _ in range(18):
        ids = torch.cat([ids, feed(model, ids[:, -1:], by_hand).argmax(-1)], 1)
    assert torch.equal(out, ids)


@every_pair
@pytest.mark.parametrize("fed", [12, 8])
def test_b31_a_prompt_that_is_fully_cached(spec, attention, fed):
    fully_cached(llama(attention), spec, fed)


@every_pair
def test_b31_the_way_out_is_exact_or_refused(spec, attention):
    model, ids = llama(attention), prompt(20)
    cache, short = cache_for(model, spec), cache_for(model, spec)
    feed(model, ids, cache)
    if not cache.can_rollback(1):
        with pytest.raises(ValueError, match=r"fork\(\)"):
            cache.rollback(1)
        return
    cache.rollback(1)
    feed(model, ids[:, :19], short)
    assert torch.equal(greedy(model, ids, cache, 8), greedy(model, ids, short, 8)) and cache.get_seq_length() == 27


# -- copies ------------------------------------------------------------------------------------------------------------


@every_pair
def test_b42_forks_are_independent(spec, attention):
    model, ids = llama(attention), prompt(20)
    prefix = cache_for(model, spec)
    feed(model, ids, prefix)
    before = copy.deepcopy(prefix)
    full = torch.cat([ids, prompt(3, seed=4)], 1)
    answers = [greedy(model, full, prefix.fork(), 6) for _ in range(3)]
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert prefix.get_seq_length() == 20
    same(prefix, before)
    assert torch.equal(greedy(model, full, prefix, 6), answers[0])


@every_spec
@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("n", [3, 30])
def test_b46_copies_continue_alike(spec, copy_of, n):
    """Before anything is sealed or evicted, and after."""
    model, new = llama(attention_of(spec)), prompt(9, 2, seed=2)
    cache = cache_for(model, spec)
    feed(model, prompt(n, 2), cache)
    twin = copy_of(cache)
    assert type(twin) is type(cache) and twin.spec == cache.spec
    held = [{k: v for k, v in c.memory()["device"].items() if k != "indices"} for c in (twin, cache)]
    assert held[0] == held[1]
    assert torch.equal(feed(model, new, twin, 2), feed(model, new, cache, 2))


@every_spec
def test_b50_nothing_holds_the_cache_after_generate(spec):
    model = llama(attention_of(spec))
    gc.freeze()  # what was there before need not be searched
    cache = cache_for(model, spec)
    out = model.generate(prompt(16), past_key_values=cache, max_new_tokens=6, return_dict_in_generate=True)
    refs = [weakref.ref(x) for x in (*tensors_of(cache.layers), cache, *cache.layers)]
    del cache, out
    gc.collect()
    gc.unfreeze()
    assert len(refs) > 6 and [ref() for ref in refs] == [None] * len(refs)


# -- numerics ----------------------------------------------------------------------------------------------------------


@every_spec
@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
def test_b58_every_token_is_encoded_once(spec, attention):
    """Then no byte can change, and the cost of sealing does not grow with the length."""
    if attention_of(spec) != "sdpa" == attention:
        pytest.skip("needs our attention")
    model, cache, encoded = llama(attention), cache_for(llama(attention), spec), []
    run = cache.layers[0].sealed
    run.encode = lambda keys, values, f=run.encode: (encoded.append(keys.shape[2]), f(keys, values))[1]
    once = []
    for t in range(28):
        feed(model, prompt(1, seed=t), cache)
        once.append(sum(encoded))
    assert once[-1] <= 28 and max(b - a for a, b in zip(once, once[1:], strict=False)) <= 8


@every_pair
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_b60_every_dtype_of_a_model(spec, attention, dtype):
    """What update returns has the dtype of what it was given, at every step; autocast included."""
    ids, dtypes = prompt(24), set()
    for model, context in ((llama(attention, dtype=dtype), False), (llama(attention), True)):
        cache, whole = cache_for(model, spec), cache_for(model, spec)
        update = cache.update
        cache.update = lambda k, v, *a, f=update, **o: (
            out := f(k, v, *a, **o),
            dtypes.update([(k.dtype, out[0].dtype), (v.dtype, out[1].dtype)]),
        )[0]
        with torch.autocast("cpu", dtype, enabled=context):
            out = feed(model, ids[:, :20], cache, 10), feed(model, ids[:, 20:], cache, 1)
            expected = feed(llama(attention), ids, whole, 10) if context else feed(model, ids, whole, 10)
        assert {cache.layers[0].keys.dtype, cache.layers[0].values.dtype} <= {asked for asked, _ in dtypes}
        assert torch.cat(out, 1).dtype == dtype and torch.cat(out, 1).isfinite().all()
        # Before anything is evicted; a value on the edge between two codes may fall either way.
        error = (out[0] - expected[:, :20]).float()[:, :14].abs().mean() / expected.float().abs().mean()
        assert error < 0.15
    assert dtypes and all(got == asked for asked, got in dtypes)


# -- what is stored ----------------------------------------------------------------------------------------------------


@evicting_pair
def test_b74_what_is_evicted_is_gone(spec, attention):
    model, lengths = llama(attention), []
    cache, whole, shorter = cache_for(model, spec), cache_for(model, "full"), cache_for(model, spec)
    for each, tokens in ((cache, 500), (whole, 500), (shorter, 300)):
        feed(model, prompt(tokens), each)
    assert all(layer.keys.shape[2] <= (28 if "adaptive" in spec else 14) for layer in cache.layers)
    parts = cache.memory()["device"]  # beside tokens and their numbers: scores, statistics, tables, which do not grow
    tokens = parts["payload"] + parts["scales"] + parts["residual"]
    policy = getattr(cache.layers[0], "policy", None)
    remembered = policy.memory_bytes(2, 4, 8, 500) * len(cache.layers) if policy else 0
    assert tokens <= whole.nbytes * 14 / 500 and cache.nbytes - tokens - remembered <= 4000
    assert cache.nbytes == shorter.nbytes
    update = cache.layers[0].update
    cache.layers[0].update = lambda *a, **k: (out := update(*a, **k), lengths.append(out[0].shape[2]))[0]
    kept = cache.layers[0].kept
    feed(model, prompt(1), cache)
    assert lengths == [kept + 1]


@every_spec
def test_b81_wrappers_neither_copy_nor_move_the_cache(spec):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model, ids, seen = build(llama_config(), attention_of(spec)), prompt(16), []
    expected = feed(llama(attention_of(spec)), ids, cache_for(model, spec), 5)
    for layer in model.model.layers:
        add_hook_to_module(layer, AlignDevicesHook("cpu", io_same_device=True))
        layer.self_attn.register_forward_pre_hook(
            lambda m, args, kwargs: seen.append(kwargs.get("cache", kwargs.get("past_key_values"))), with_kwargs=True
        )
    cache = cache_for(model, spec)
    assert torch.equal(feed(model, ids, cache, 5), expected)
    assert len(seen) == 8 and all(one is cache for one in seen)


# -- native windows ----------------------------------------------------------------------------------------------------


@every_pair
def test_b83_native_windows_beside_every_class(spec, attention):
    """Chunks longer than the window, too; where nothing is lost, the logits of a stock cache."""
    model, ids = build(gemma3_config(), attention), prompt(24)
    expected = feed(build(gemma3_config()), ids, DynamicCache(config=model.config))
    out = []
    for chunk in (7, None):
        cache = cache_for(model, spec)
        out.append(feed(model, ids, cache, chunk))
        kinds = [isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers]
        assert kinds == cache.is_sliding == [True, False, True]
        assert all(layer.keys.shape[2] <= 6 for layer in cache.layers[::2])
        assert out[-1].isfinite().all()
        lossless = spec == "cpu" or (chunk is None and spec.split("(")[0] in ("knorm", "snapkv", "tova", "expected"))
        if lossless:
            torch.testing.assert_close(out[-1], expected, atol=2e-4, rtol=1e-4)
    if "budget" not in spec:  # eviction depends on the chunks
        # As in test_lowbit: a code on the edge between two may fall either way.
        assert all((one - out[0]).abs().median() < 1e-3 for one in out)


@pytest.mark.parametrize("family", [name for name, options in DECODERS.items() if WINDOWS & set(options)])
@pytest.mark.filterwarnings("ignore:.*changes nothing")
@pytest.mark.parametrize("spec", ["full", "int8", LOW, "cpu"])
def test_b83_every_family_with_native_windows(family, spec):
    """Window 6 (chunks of 8), prompt 14, 10 new tokens: sliding layers hold at most their window."""
    this = case(family)
    model = this.model
    for name in ("stock", "kvcache"):
        cache, stock = KVCache.from_spec(model.config, spec), DynamicCache(config=model.config)
        with this.attention(name):
            out = greedy(model, prompt(14), cache, 10)
        sliding = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
        assert sliding and all(layer.keys.shape[2] <= (8 if family == "llama4_text" else 6) for layer in sliding)
        if spec in ("full", "cpu"):
            assert torch.equal(out, greedy(model, prompt(14), stock, 10))
