"""Whole caches under whole models: the contract of ``transformers.Cache``, and the invariants of the design.

Names that begin with a number such as b12 are scenarios from public reports.
"""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
from models import (
    EVICTING,
    KEEPING,
    SPECS,
    ReferenceCache,
    build,
    expected_logits,
    feed,
    greedy,
    llama,
    llama_config,
    prompt,
    reorders,
    states,
)
from transformers import (
    BartConfig,
    DynamicCache,
    EncoderDecoderCache,
    Gemma3TextConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    T5Config,
)
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from hf_kvcache import KVCache, QuantizedCache, SinkWindowCache

every_spec = pytest.mark.parametrize("spec", SPECS)
keeping_spec = pytest.mark.parametrize("spec", KEEPING)
evicting_spec = pytest.mark.parametrize("spec", EVICTING)
every_attention = pytest.mark.parametrize("attention", ["sdpa", "eager", "kvcache"])
# Each spec under each attention would take minutes: each kind of storage and retention under each of them.
every_pair = pytest.mark.parametrize(
    "spec, attention",
    [
        ("full", "sdpa"),
        ("full", "kvcache"),
        ("int8", "eager"),
        ("int8", "kvcache"),
        ("fp8", "sdpa"),
        ("fp8_e5m2", "kvcache"),
        ("sink(2,6)", "sdpa"),
        ("sink(2,6)", "eager"),
        ("sink(2,6)", "kvcache"),
        ("int8+sink(2,6)", "sdpa"),
        ("int8+sink(2,6)", "kvcache"),
    ],
)
keeping_pair = pytest.mark.parametrize(
    "spec, attention",
    [("full", "sdpa"), ("full", "kvcache"), ("int8", "eager"), ("int8", "kvcache"), ("fp8", "sdpa")],
)
SMALL = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.4,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


def cache_for(model, spec):
    return KVCache.from_spec(model.config, spec)


def gemma3_config(window=6, layers=3):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"][:layers]
    return Gemma3TextConfig(**SMALL, num_hidden_layers=layers, head_dim=8, sliding_window=window, layer_types=kinds)


def mistral_config(window=6):
    return MistralConfig(**SMALL, num_hidden_layers=2, sliding_window=window)


def qwen2_config():
    return Qwen2Config(**SMALL, num_hidden_layers=2)


def close(a, b, tolerance):
    assert a.shape == b.shape and a.isfinite().all()
    assert (a.float() - b.float()).abs().max() < tolerance


# -- invariants 1 and 2: the same as an uncompressed cache, in any order of calls --------------------------------------


@pytest.mark.parametrize("config", [llama_config, mistral_config, gemma3_config, qwen2_config])
@pytest.mark.parametrize("chunk", [1, 7, None])
@every_attention
def test_full_equals_dynamic_cache(config, chunk, attention):
    model = build(config(), "sdpa" if attention == "kvcache" else attention)
    ids = prompt(40, 2)
    expected = feed(model, ids, DynamicCache(config=model.config), chunk)
    model.set_attn_implementation(attention)
    close(feed(model, ids, cache_for(model, "full"), chunk), expected, 2e-4 if attention == "kvcache" else 1e-5)


@every_spec
@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_schedule_equals_one_masked_forward(spec, chunk, attention):
    """In float64, where no rounding decision of a codec hangs on the schedule."""
    ids = prompt(40, 2)
    expected = expected_logits(llama(dtype=torch.float64), ids, spec)
    model = llama(attention, dtype=torch.float64)
    close(feed(model, ids, cache_for(model, spec), chunk), expected, 1e-4)


@every_spec
@pytest.mark.parametrize("chunk", [1, 7, None])
def test_every_schedule_equals_one_masked_forward_with_our_attention(spec, chunk):
    """In float32 a value on the edge between two codes may fall either way: one step of one value of one key."""
    ids = prompt(40, 2)
    model = llama("kvcache")
    out = feed(model, ids, cache_for(model, spec), chunk)
    close(out, expected_logits(llama(), ids, spec), 2e-4 if spec in ("full", "sink(2,6)") else 5e-2)


@every_attention
@pytest.mark.parametrize("sinks, window", [(0, 6), (2, 1), (4, 16), (3, 37), (0, 1)])
@pytest.mark.parametrize("chunk", [1, 7, None])
def test_sink_window_is_exact(attention, sinks, window, chunk):
    ids, model = prompt(40), llama(attention)
    cache = SinkWindowCache(model.config, sinks=sinks, window=window)
    close(feed(model, ids, cache, chunk), expected_logits(llama(), ids, cache.spec), 2e-4)
    assert cache.stats().tokens_seen == 40 and cache.stats().tokens_kept == sinks + window
    assert cache.stats().tokens_evicted == 40 - sinks - window


@evicting_spec
@every_attention
def test_b26_first_forward_attends_before_anything_leaves(spec, attention):
    """What fits is exact; a prompt longer than the window means the window, at each of its queries."""
    model = llama(attention)
    ids = prompt(8)
    out = feed(model, ids, cache_for(model, spec))
    close(out, feed(llama(), ids, cache_for(llama(), spec.replace("sink(2,6)", "sink(2,99)"))), 2e-4)
    ids = prompt(40)
    close(feed(model, ids, cache_for(model, spec)), expected_logits(llama(), ids, spec), 5e-3)


@every_pair
def test_generate_equals_the_reference(spec, attention):
    model, ids = llama(attention), prompt(8, 2)
    expected = greedy(llama(), ids, ReferenceCache(llama().config, spec), 16)
    assert torch.equal(greedy(model, ids, cache_for(model, spec), 16), expected)


@every_spec
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_b02_both_names_of_the_argument(spec, name):
    model, ids = llama(), prompt(6)
    if name == "cache" and not hasattr(model(ids), "cache"):
        pytest.skip("this transformers knows past_key_values only")
    expected = greedy(model, ids, ReferenceCache(model.config, spec), 6)
    cache = cache_for(model, spec)
    out = model.generate(ids, do_sample=False, max_new_tokens=6, return_dict_in_generate=True, **{name: cache})
    assert torch.equal(out.sequences, expected)
    assert out.past_key_values is cache


# -- a fresh cache -----------------------------------------------------------------------------------------------------


@every_spec
def test_b06_a_fresh_cache_answers_everything(spec):
    cache = KVCache.from_spec(llama_config(3), spec)
    assert cache.get_seq_length() == 0 and cache.get_seq_length(2) == 0
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert cache.get_max_length() == -1 and cache.get_max_length(1) == -1
    assert cache.get_query_offset() == 0
    cache.reset()
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.crop(-1)
    cache.crop(0)
    cache.rollback(0)
    cache.activate_past_recording()
    with pytest.raises(ValueError):
        cache.rollback(1)
    assert cache.batch_size == -1 and not cache.is_initialized and not cache.is_compileable
    assert cache.is_sliding == [False] * 3 and cache.is_linear == [False] * 3
    assert cache.is_croppable == (spec in KEEPING)
    assert len(cache) == 3 and [item[:2] for item in cache] == [(None, None)] * 3
    assert cache.spec in repr(cache) and "3 layers" in repr(cache)
    assert cache.nbytes == 0 and memory_total(cache) == 0
    stats = cache.stats()
    assert (stats.tokens_seen, stats.tokens_kept, stats.tokens_evicted, stats.tokens_quantized) == (
        0,
        0,
        0,
        0,
    )
    twin = pickle.loads(pickle.dumps(cache.fork()))
    assert twin.spec == cache.spec and twin.get_seq_length() == 0


@every_spec
def test_b04_layers_are_made_once(spec):
    model = llama(layers=4)
    cache = cache_for(model, spec)
    feed(model, prompt(5), cache)
    assert len(cache) == 4
    pairs = [states(12) for _ in range(4)]
    cache = KVCache.from_states(model.config, pairs, spec)
    assert len(cache) == 4 and cache.get_seq_length() == 12 and cache.spec == KVCache.from_spec(model.config, spec).spec
    with pytest.raises(ValueError, match="3 pairs"):
        KVCache.from_states(model.config, pairs[:3], spec)
    with pytest.raises(ValueError, match="layer 4"):
        cache.update(*states(1), 4)


@every_spec
def test_b01_tensors_out_and_in(spec):
    """State is read through ``layers[i].keys`` and iteration, and a cache is made from tensors."""
    model = llama()
    cache = cache_for(model, spec)
    feed(model, prompt(20), cache, 7)
    for layer, item in zip(cache.layers, cache, strict=True):
        assert torch.equal(layer.keys, item[0]) and torch.equal(layer.values, item[1]) and item[2] is None
    if spec == "full":
        again = KVCache.from_states(model.config, [item[:2] for item in cache], spec)
        new = prompt(3, seed=2)
        assert torch.equal(feed(model, new, again), feed(model, new, cache))
    for name in ("key_cache", "value_cache", "to_legacy_cache", "from_legacy_cache"):
        assert not hasattr(cache, name)


@every_spec
def test_early_initialization(spec):
    model, ids = llama(), prompt(12, 2)
    cache = cache_for(model, spec)
    cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    assert cache.is_initialized and cache.get_seq_length() == 0 and cache.batch_size == 2
    assert cache.get_mask_sizes(5, 0) == (5, 0) and cache.nbytes == 0
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert repr(cache) and list(cache)
    assert torch.equal(feed(model, ids, cache, 5), feed(model, ids, cache_for(model, spec), 5))


# -- the batch axis ----------------------------------------------------------------------------------------------------


@every_pair
def test_b12_three_beams_equal_permuted_decoded_rows(spec, attention):
    model, ids = llama(attention), prompt(8, 2)
    settings = dict(num_beams=3, length_penalty=0.0)
    expected = greedy(llama(), ids, ReferenceCache(llama().config, spec), 12, **settings)
    assert torch.equal(greedy(model, ids, cache_for(model, spec), 12, **settings), expected)


@every_spec
def test_b15_every_step_of_beam_search_reorders_every_layer(spec):
    calls = reorders(llama(), cache_for(llama(), spec))
    assert calls.count(0) == calls.count(1) >= 6


@every_pair
def test_b21_rows_split_and_joined_by_hand(spec, attention):
    """Select rows, go on with each alone: as if they had always been alone; repeat and go on: equal rows."""
    model, ids, more = llama(attention), prompt(9, 3), prompt(5, 3, seed=3)
    together = cache_for(model, spec)
    feed(model, ids, together)
    for row in range(3):
        part = together.fork()
        part.batch_select_indices(torch.tensor([row]))
        alone = cache_for(model, spec)
        feed(model, ids[row : row + 1], alone)
        new = more[row : row + 1]
        close(feed(model, new, part, 1), feed(model, new, alone, 1), 2e-2 if "8" in spec else 2e-4)
    together.batch_repeat_interleave(2)
    assert together.batch_size == 6
    out = feed(model, more.repeat_interleave(2, 0), together, 1)
    close(out[0::2], out[1::2], 1e-4)


@every_spec
def test_b41_a_row_does_not_depend_on_its_mates(spec):
    model = llama()
    ids = prompt(8, 4)
    together = greedy(model, ids, cache_for(model, spec), 10)
    for row in range(4):
        assert torch.equal(greedy(model, ids[row : row + 1], cache_for(model, spec), 10)[0], together[row])


def padded(lengths, seed=1, side="left"):
    rows = [prompt(n, seed=seed + i)[0] for i, n in enumerate(lengths)]
    most = max(lengths)
    ids, mask = torch.zeros(len(rows), most, dtype=torch.long), torch.zeros(len(rows), most, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(most - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, where], mask[i, where] = row, 1
    return rows, ids, mask


@keeping_pair
def test_b36_padded_rows_equal_the_rows_alone(spec, attention):
    model = llama(attention)
    rows, ids, mask = padded((9, 20))
    together = greedy(model, ids, cache_for(model, spec), 8, attention_mask=mask)
    for i, row in enumerate(rows):
        alone = greedy(model, row[None], cache_for(model, spec), 8)
        assert torch.equal(together[i, 20:], alone[0, len(row) :])


@keeping_pair
@pytest.mark.parametrize("chunk", [1, 3, 4, None])
def test_b36_padding_beyond_the_longest_row(spec, attention, chunk):
    """Rows padded to a multiple of something, fed in chunks: the first chunks are pads alone."""
    model = llama(attention, dtype=torch.float64 if attention == "sdpa" else torch.float32)
    rows, ids, mask = padded((5, 7))
    ids = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(2, 5, dtype=torch.long), mask], 1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache, out, start = cache_for(model, spec), [], 0
    for piece in ids.split(chunk or 12, 1):
        stop = start + piece.shape[1]
        with torch.no_grad():
            logits = model(
                piece,
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
            ).logits
        out.append(logits)
        start = stop
    out = torch.cat(out, 1)
    for i, row in enumerate(rows):
        alone = feed(model, row[None], cache_for(model, spec))
        close(out[i : i + 1, -len(row) :], alone, 1e-4 if spec == "full" or attention == "sdpa" else 5e-2)


@evicting_spec
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_b37_padding_under_eviction_is_refused_by_stock_attention(spec, chunk):
    """Ours counts every row's own tokens: tests/test_padded.py."""
    model = llama("sdpa")
    _, ids, mask = padded((20, 9))
    cache = cache_for(model, spec)
    if chunk is None:
        with pytest.raises(ValueError, match="padding"):
            greedy(model, ids, cache, 8, attention_mask=mask)
        return
    with pytest.raises(ValueError, match="padding"), torch.no_grad():
        for start in range(0, 20, chunk):
            model(ids[:, start : start + chunk], attention_mask=mask[:, : start + chunk], past_key_values=cache)


@evicting_spec
@every_attention
@pytest.mark.parametrize("chunk", [1, 3])
def test_pads_that_come_later_under_eviction_are_refused(spec, attention, chunk):
    """A second turn that is padded, behind a first one that was not."""
    model = llama(attention)
    ids, mask = prompt(14, 2), torch.ones(2, 14, dtype=torch.long)
    cache = cache_for(model, spec)
    feed(model, ids[:, :8], cache, attention_mask=mask[:, :8])
    mask[1, 8:10] = 0
    by_row = attention == "kvcache" and chunk > 1  # rows are told apart from then on: tests/test_masks.py
    with nullcontext() if by_row else pytest.raises(ValueError, match="padding"), torch.no_grad():
        for start in range(8, 14, chunk):
            stop = min(start + chunk, 14)
            model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)


@evicting_spec
@every_attention
def test_an_all_ones_mask_is_no_padding(spec, attention):
    model, ids = llama(attention), prompt(20, 2)
    expected = feed(model, ids, cache_for(model, spec), 7)
    cache, out = cache_for(model, spec), []
    for start in range(0, 20, 7):
        mask = torch.ones(2, min(start + 7, 20), dtype=torch.long)
        out.append(feed(model, ids[:, start : start + 7], cache, attention_mask=mask))
    close(torch.cat(out, 1), expected, 1e-4)


# -- rollback and reset ------------------------------------------------------------------------------------------------


@keeping_pair
def test_b17_rollback_is_exact(spec, attention):
    model, ids = llama(attention), prompt(12, 2)
    cache, direct = cache_for(model, spec), cache_for(model, spec)
    feed(model, ids, cache)
    feed(model, prompt(6, 2, seed=9), cache, 3)
    cache.rollback(4)
    cache.crop(-2)
    assert cache.get_seq_length() == 12
    feed(model, ids, direct)
    new = prompt(4, 2, seed=5)
    assert torch.equal(feed(model, new, cache, 2), feed(model, new, direct, 2))
    for amount in (-1, 17):
        with pytest.raises(ValueError, match=f"rollback.{amount}"):
            cache.rollback(amount)
    with pytest.raises(ValueError, match=r"crop\(2\)"):
        cache.crop(2)
    assert cache.get_seq_length() == 16


@evicting_spec
def test_rollback_past_an_eviction_is_refused(spec):
    model = llama()
    cache = cache_for(model, spec)
    feed(model, prompt(8), cache)
    cache.rollback(3)
    feed(model, prompt(9), cache)
    before = cache.layers[1].keys
    with pytest.raises(ValueError, match="evicted"):
        cache.rollback(1)
    assert cache.get_seq_length() == 14 and torch.equal(cache.layers[1].keys, before)


@pytest.mark.parametrize("config", [mistral_config, gemma3_config])
@pytest.mark.parametrize("amount", [-2, 2])
def test_rollback_beyond_a_native_window_changes_all_layers_or_none(config, amount):
    model = build(config())
    cache, twin = cache_for(model, "int8"), cache_for(model, "int8")
    for each in (cache, twin):
        feed(model, prompt(20), each)
    with pytest.raises(ValueError):
        cache.crop(amount)
    assert [layer.get_seq_length() for layer in cache.layers] == [20] * len(cache)
    new = prompt(3, seed=4)
    assert torch.equal(feed(model, new, cache), feed(model, new, twin))


@pytest.mark.parametrize("config", [mistral_config, gemma3_config])
@pytest.mark.parametrize("remove", [1, 3])
def test_rollback_with_past_recording_is_exact(config, remove):
    model = build(config())
    cache, direct = cache_for(model, "int8"), cache_for(model, "int8")
    ids = prompt(20)
    feed(model, ids, cache)
    cache.activate_past_recording()
    feed(model, prompt(3, seed=8), cache)
    cache.crop(-remove)
    feed(model, ids, direct)
    direct.activate_past_recording()
    if remove < 3:
        feed(model, prompt(3, seed=8)[:, : 3 - remove], direct)
        direct.crop(0)
    new = prompt(3, seed=4)  # in one piece: before 5.24 a recording window wants a crop after every forward
    close(feed(model, new, cache), feed(model, new, direct), 1e-4)


@every_pair
def test_b20_reset_equals_a_new_cache(spec, attention):
    model = llama(attention)
    cache = cache_for(model, spec)
    feed(model, prompt(20, 2), cache, 7)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0 and memory_total(cache) == 0
    assert cache.batch_size == -1 and not cache.is_initialized
    assert cache.stats() == cache_for(model, spec).stats()
    ids = prompt(15, 3, seed=6)  # another batch size
    assert torch.equal(feed(model, ids, cache, 4), feed(model, ids, cache_for(model, spec), 4))


@pytest.mark.parametrize("config", [mistral_config, gemma3_config])
def test_b20_reset_reaches_native_windows(config):
    model = build(config())
    cache = cache_for(model, "int8")
    feed(model, prompt(20, 2), cache)
    cache.activate_past_recording()
    cache.reset()
    assert [layer.get_seq_length() for layer in cache.layers] == [0] * len(cache)
    fresh = cache_for(model, "int8")
    assert cache.nbytes == fresh.nbytes
    ids = prompt(15, 3, seed=6)
    assert torch.equal(feed(model, ids, cache, 4), feed(model, ids, fresh, 4))
    assert cache.nbytes == fresh.nbytes


@every_pair
@pytest.mark.parametrize("assistant", ["model", "lookup"])
def test_b19_speculative_decoding_is_equal_or_refused(spec, attention, assistant):
    model, ids = llama(attention), prompt(6).repeat(1, 2)
    expected = greedy(model, ids, cache_for(model, spec), 12)
    helper = dict(assistant_model=llama(seed=5)) if assistant == "model" else dict(prompt_lookup_num_tokens=3)
    cache = cache_for(model, spec)
    if spec in KEEPING:
        assert torch.equal(greedy(model, ids, cache, 12, **helper), expected)
    else:
        with pytest.raises(ValueError):
            greedy(model, ids, cache, 12, **helper)


@pytest.mark.parametrize("config", [mistral_config, gemma3_config])
def test_b19_speculative_decoding_with_native_windows(config):
    model, ids = build(config()), prompt(6).repeat(1, 2)
    expected = greedy(model, ids, cache_for(model, "full"), 12)
    assert torch.equal(greedy(model, ids, cache_for(model, "full"), 12, prompt_lookup_num_tokens=3), expected)


# -- length, position and mask -----------------------------------------------------------------------------------------


@evicting_spec
def test_b24_seen_is_not_held(spec):
    model, ids = llama(), prompt(20)
    cache = cache_for(model, spec)
    out = greedy(model, ids, cache, 4)
    assert cache.get_seq_length() == 23 and cache.layers[0].kept == 8
    again = cache_for(model, spec)
    greedy(model, ids, again, 4)
    second = torch.cat([out, prompt(3, seed=7)], 1)  # the second turn feeds only what is new
    fed = []
    hook = model.model.embed_tokens.register_forward_hook(lambda m, args, _: fed.append(args[0].shape[1]))
    greedy(model, second, cache, 1)
    hook.remove()
    assert fed[0] == 4
    with torch.no_grad():
        manual = model(second[:, 23:], position_ids=torch.arange(23, 27)[None], past_key_values=again).logits
        automatic = model(second[:, 23:], past_key_values=rebuilt(model, spec, second[:, :23])).logits
    close(manual, automatic, 2e-2 if "8" in spec else 1e-4)


def rebuilt(model, spec, ids):
    cache = cache_for(model, spec)
    feed(model, ids, cache)
    return cache


@evicting_spec
def test_b23_kept_keys_keep_their_rotation(spec):
    """A key in the cache is the key that one forward over the whole text rotates for its own position."""
    model, ids = llama(layers=1, dtype=torch.float64), prompt(20)
    cache, everything = cache_for(model, spec), ReferenceCache(model.config, spec)
    for t in range(20):
        feed(model, ids[:, t : t + 1], cache)
        feed(model, ids[:, t : t + 1], everything)
        kept = [p for p in range(t + 1) if p < 2 or t - p < 6]
        torch.testing.assert_close(cache.layers[0].keys, everything.layers[0].keys[:, :, kept])


@every_pair
def test_b29_one_token_prompt(spec, attention):
    model, ids = llama(attention), prompt(1)
    expected = greedy(llama(), ids, ReferenceCache(llama().config, spec), 12)
    assert torch.equal(greedy(model, ids, cache_for(model, spec), 12), expected)


FAMILIES = {"llama": llama_config, "mistral": mistral_config, "gemma3": gemma3_config, "qwen2": qwen2_config}


@every_pair
@pytest.mark.parametrize("fed", [12, 8, "chunks"])
def test_b31_a_prompt_that_is_fully_cached(spec, attention, fed):
    fully_cached(llama(attention), spec, fed)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "qwen2"])
@pytest.mark.parametrize("window", [6, 64])
@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
@pytest.mark.parametrize("fed", [12, 8])
def test_b31_a_prompt_that_is_fully_cached_by_other_families(family, window, attention, fed):
    config = FAMILIES[family]() if family == "qwen2" else FAMILIES[family](window)
    fully_cached(build(config, attention), "int8", fed)


def fully_cached(model, spec, fed):
    """Twelve tokens are cached and the prompt brings nothing new: the tokens of a fresh cache, or ``ValueError``."""
    ids = prompt(12)
    cache = cache_for(model, spec)
    feed(model, ids, cache)
    again = ids[:, :8] if fed == 8 else ids
    options = dict(prefill_chunk_size=4) if fed == "chunks" else {}
    expected = greedy(model, again, cache_for(model, spec), 8)
    try:
        out = greedy(model, again, cache, 8, **options)
    except ValueError as error:
        assert "rollback" in str(error) or "cached" in str(error)
        return
    except RuntimeError:  # transformers itself, before it reaches the cache
        assert fed == "chunks" and cache.get_seq_length() == 12
        return
    assert torch.equal(out, expected) and cache.get_seq_length() == again.shape[1] + 7


@keeping_pair
def test_b31_rolling_back_one_token_is_the_way_out(spec, attention):
    model, ids = llama(attention), prompt(12)
    expected = greedy(model, ids, cache_for(model, spec), 8)
    cache = cache_for(model, spec)
    feed(model, ids, cache)
    cache.rollback(1)
    assert torch.equal(greedy(model, ids, cache, 8), expected)
    assert cache.get_seq_length() == 19


@every_pair
@pytest.mark.parametrize("cached", [1, 5, 11])
def test_a_prompt_that_is_partly_cached(spec, attention, cached):
    """The usual second turn must not be taken for a prompt that is fed twice."""
    model, ids = llama(attention), prompt(12)
    expected = greedy(model, ids, cache_for(model, spec), 8)
    cache = cache_for(model, spec)
    feed(model, ids[:, :cached], cache)
    out = greedy(model, ids, cache, 8)
    assert torch.equal(out, expected)


# -- copies ------------------------------------------------------------------------------------------------------------


def by_pickle(x):
    return pickle.loads(pickle.dumps(x))


def itself(x):
    return x


@every_spec
@pytest.mark.parametrize("copy_of", [copy.deepcopy, by_pickle, KVCache.fork])
@pytest.mark.parametrize("n", [1, 12])
def test_b46_copies_continue_alike(spec, copy_of, n):
    model, ids = llama(), prompt(n, 2)
    cache = cache_for(model, spec)
    feed(model, ids, cache)
    twin, new = copy_of(cache), prompt(9, 2, seed=2)
    assert type(twin) is type(cache) and twin.spec == cache.spec and twin.nbytes == cache.nbytes
    expected = feed(model, new, cache, 2)
    assert torch.equal(feed(model, new, twin, 2), expected)


@every_pair
def test_b42_forks_are_independent(spec, attention):
    model, ids = llama(attention), prompt(10)
    prefix = cache_for(model, spec)
    feed(model, ids, prefix)
    before = [tuple(t.clone() for t in item[:2]) for item in prefix]
    full = torch.cat([ids, prompt(3, seed=4)], 1)
    answers = [greedy(model, full, prefix.fork(), 6) for _ in range(3)]
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert prefix.get_seq_length() == 10
    for item, old in zip(prefix, before, strict=True):
        assert torch.equal(item[0], old[0]) and torch.equal(item[1], old[1])
    assert torch.equal(greedy(model, full, prefix, 6), answers[0])


@pytest.mark.parametrize("how", [copy.deepcopy, KVCache.fork])
def test_a_copy_follows_the_model(how):
    """A copy asks the same model which attention runs."""
    model = build(llama_config())
    ids, new = prompt(10), prompt(3, seed=2)
    cache = cache_for(model, "int8")
    feed(model, ids, cache)
    twin = how(cache)
    assert twin.config is cache.config
    expected = feed(model, new, cache)
    model.set_attn_implementation("kvcache")
    close(feed(model, new, twin), expected, 2e-4)


@pytest.mark.parametrize("first, second", [("sdpa", "kvcache"), ("kvcache", "sdpa"), ("kvcache", "eager")])
@pytest.mark.parametrize("spec", ["int8", "sink(2,6)"])
def test_a_loaded_cache_serves_another_attention(first, second, spec):
    """A pickled cache brings its own copy of the config, which says what was in force then."""
    ids, new = prompt(10), prompt(3, seed=2)
    cache = cache_for(llama(first), spec)
    feed(llama(first), ids, cache)
    twin = by_pickle(cache)
    close(feed(llama(second), new, twin), feed(llama(first), new, cache), 2e-4)


@every_pair
def test_b50_nothing_holds_the_cache_after_generate(spec, attention):
    model = llama(attention)
    cache = cache_for(model, spec)
    out = model.generate(prompt(6), past_key_values=cache, max_new_tokens=6, return_dict_in_generate=True)
    slabs = [s for layer in cache.layers for run in (layer.sinks, layer.sealed) for s in run.slabs]
    refs = [weakref.ref(t) for slab in slabs for t in slab.state or ()] + [weakref.ref(cache)]
    assert len(refs) > 4
    del out, cache, slabs
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


@every_pair
@pytest.mark.parametrize("copy_of", [itself, KVCache.fork])
def test_prefill_under_inference_mode_then_decode_under_no_grad(spec, copy_of, attention):
    model, ids, new = llama(attention), prompt(7), prompt(30, seed=2)
    cache, direct = cache_for(model, spec), cache_for(model, spec)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        cache = copy_of(cache)
    feed(model, ids, direct)
    assert torch.equal(feed(model, new, cache, 1), feed(model, new, direct, 1))


# -- dtypes, gradients, compilation ------------------------------------------------------------------------------------


@every_pair
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_b60_every_dtype_of_a_model(spec, attention, dtype):
    model, ids = llama(attention, dtype=dtype), prompt(20)
    out = feed(model, ids, cache_for(model, spec), 4)
    assert out.dtype == dtype
    # Against a reference in the same dtype: both round activations, at different places.
    expected = expected_logits(llama(dtype=dtype), ids, spec)
    scale = expected.float().abs().mean()
    error = (out.float() - expected.float()).abs().mean() / scale
    assert error < {torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]


@every_pair
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_b60_autocast(spec, attention, dtype):
    model, ids = llama(attention), prompt(20)
    with torch.autocast("cpu", dtype):
        out = feed(model, ids, cache_for(model, spec), 4)
        expected = expected_logits(llama(), ids, spec)
    error = (out.float() - expected.float()).abs().mean() / expected.float().abs().mean()
    assert out.isfinite().all() and error < {torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]


@every_pair
def test_forward_without_no_grad(spec, attention):
    model, ids = llama(attention), prompt(14)
    expected = feed(model, ids, cache_for(model, spec), 3)
    cache = cache_for(model, spec)
    out = torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(3, 1)], 1)
    assert out.requires_grad
    close(out, expected, 2e-2 if "8" in spec else 2e-4)


def gradients(model, prefix, suffix, cache):
    model.zero_grad()
    feed(model, prefix, cache)
    model(suffix, past_key_values=cache).logits.pow(2).mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@every_attention
@pytest.mark.parametrize("suffix", [1, 6])
def test_gradients_through_a_suffix_equal_those_of_dynamic_cache(attention, suffix):
    model = build(llama_config(), attention)
    ids, new = prompt(9, 2), prompt(suffix, 2, seed=3)
    mine = gradients(model, ids, new, cache_for(model, "full"))
    model.set_attn_implementation("sdpa")
    theirs = gradients(model, ids, new, DynamicCache(config=model.config))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    assert max(g.abs().max() for g in mine) > 0


@pytest.mark.parametrize("spec", ["sink(2,6)"])
@every_attention
@pytest.mark.parametrize("prefix", [0, 9])
def test_gradients_under_a_window_equal_those_of_a_masked_forward(spec, attention, prefix):
    model, ids = build(llama_config(), attention), prompt(prefix + 12, 2)
    cache = cache_for(model, spec)
    if prefix:
        feed(model, ids[:, :prefix], cache)
    model(ids[:, prefix:], past_key_values=cache).logits.pow(2).mean().backward()
    mine = model.lm_head.weight.grad.clone()
    mine_first = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    model.set_attn_implementation("sdpa")
    mask = (torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])[None]) < 6
    mask[:, :2] = True
    mask = mask.tril()[None, None].expand(2, -1, -1, -1)
    model(ids, attention_mask=mask, use_cache=False).logits[:, prefix:].pow(2).mean().backward()
    torch.testing.assert_close(mine, model.lm_head.weight.grad, atol=1e-4, rtol=1e-3)
    if not prefix:
        torch.testing.assert_close(mine_first, model.model.layers[0].self_attn.q_proj.weight.grad, atol=1e-4, rtol=1e-3)


@every_spec
@pytest.mark.parametrize("reentrant", [True, False])
def test_b93_gradient_checkpointing_stores_nothing_twice(spec, reentrant):
    model = build(llama_config())
    ids = prompt(8, 2)
    model.train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    cache = cache_for(model, spec)
    try:
        model(ids, labels=ids, past_key_values=cache).loss.backward()
    except ValueError:
        return
    assert cache.get_seq_length() in (0, 8)
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert p.grad.isfinite().all()
        if spec in ("full", "sink(2,6)"):
            torch.testing.assert_close(p.grad, grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("spec, attention", [("full", "sdpa"), ("int8", "kvcache"), ("sink(2,6)", "kvcache")])
def test_b99_a_compiled_forward_keeps_no_cache(spec, attention):
    torch._dynamo.reset()
    model = build(llama_config(1), attention)
    compiled = torch.compile(model, backend="eager")
    for seed in (1, 2):
        ids = prompt(12, seed=seed)
        chunk = 6 if spec == "int8" else 12  # every further shape is compiled again, which takes seconds
        expected = feed(model, ids, cache_for(model, spec), chunk)
        close(feed(compiled, ids, cache_for(model, spec), chunk), expected, 2e-2 if "8" in spec else 1e-4)


# -- invariant 3 of accounting: every byte counts ----------------------------------------------------------------------


def memory_total(cache):
    return sum(size for parts in cache.memory().values() for size in parts.values())


def reachable_bytes(cache):
    """Storages of the tensors that the garbage collector reaches from the cache, not through the model's config."""
    seen, storages, queue = set(), {}, [cache]
    while queue:
        item = queue.pop()
        code = callable(item) and not isinstance(item, torch.nn.Module)
        if id(item) in seen or isinstance(item, (PreTrainedConfig, type)) or code:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif not isinstance(item, type(sys)):
            queue.extend(gc.get_referents(item))
    return sum(storages.values())


@every_spec
@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
@pytest.mark.parametrize("config, chunk", [(llama_config, 1), (llama_config, None), (gemma3_config, 7)])
def test_nbytes_is_every_reachable_byte(spec, attention, config, chunk):
    model = build(config(), attention)
    cache = cache_for(model, spec)
    feed(model, prompt(40, 2), cache, chunk)
    assert cache.nbytes == memory_total(cache) == reachable_bytes(cache) > 0
    assert set(cache.memory()) == {"device"}
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.nbytes == memory_total(cache) == reachable_bytes(cache)


@pytest.mark.parametrize("spec, least", [("int8", 12), ("fp8", 12), ("fp8_e5m2", 12), ("full", 16)])
def test_memory_by_part(spec, least):
    cache = KVCache.from_spec(llama_config(), spec)
    for layer in range(2):
        cache.update(*states(100, dtype=torch.bfloat16), layer)
    parts = cache.memory()["device"]
    rows = 2 * 2 * 2 * 2 * 100  # layers, sides, batch, heads, tokens
    assert parts["payload"] + parts["scales"] == cache.nbytes == rows * least
    assert parts["scales"] == (0 if spec == "full" else rows * 4)
    assert parts["residual"] == parts["window"] == parts["spare"] == parts["indices"] == parts["scores"] == 0


@pytest.mark.parametrize("head, most", [(64, 0.532), (128, 0.516)])
@pytest.mark.parametrize("spec", ["int8", "fp8", "fp8_e5m2"])
def test_bytes_per_token_of_eight_bits(head, most, spec):
    cache = KVCache.from_spec(llama_config(1), spec)
    cache.update(*states(2000, 1, 3, head, torch.bfloat16), 0)
    for _ in range(40):
        cache.update(*states(1, 1, 3, head, torch.bfloat16), 0)
    assert cache.nbytes - cache.memory()["device"]["spare"] <= most * 2040 * 3 * head * 2 * 2
    assert cache.memory()["device"]["spare"] <= 0.02 * cache.nbytes


def test_residual_counts_the_plain_sinks():
    cache = KVCache.from_spec(llama_config(1), "int8+sink(4,32)")
    cache.update(*states(100), 0)
    parts = cache.memory()["device"]
    assert parts["residual"] == 4 * 2 * 2 * 2 * 8 * 4
    assert parts["payload"] == 32 * 2 * 2 * 2 * 8 and parts["scales"] == 32 * 2 * 2 * 2 * 4
    assert cache.stats().tokens_quantized == 32


@keeping_pair
def test_b58_stored_bytes_of_a_token_never_change(spec, attention):
    model = llama(attention)
    cache, at = cache_for(model, spec), {}
    ids = prompt(200)
    feed(model, ids[:, :19], cache)
    for step in range(20, 201):
        feed(model, ids[:, step - 1 : step], cache)
        if step in (20, 200):
            at[step] = [t[:, :, 0].clone() for layer in cache.layers for slab in layer.sealed.slabs for t in slab.state]
    for early, late in zip(at[20], at[200], strict=True):
        assert torch.equal(early.view(torch.uint8), late.view(torch.uint8))


def test_b63_from_a_spec_to_stored_bits():
    model = llama(dtype=torch.bfloat16)
    sizes = {}
    for spec in ("full", "int8", "fp8"):
        cache = cache_for(model, spec)
        feed(model, prompt(64), cache)
        sizes[spec] = cache.nbytes
    assert sizes["int8"] == sizes["fp8"] == sizes["full"] * 12 / 16
    cache = QuantizedCache(model.config)
    feed(model, prompt(64), cache)
    assert cache.nbytes == sizes["int8"] and cache.stats().tokens_quantized == 64


@evicting_spec
@every_attention
def test_b74_what_is_evicted_is_gone(spec, attention):
    model = llama(attention)
    cache = cache_for(model, spec)
    feed(model, prompt(500), cache)
    assert all(layer.keys.shape[2] == 8 for layer in cache.layers)
    assert cache.nbytes <= 2 * 2 * (8 + 16) * 2 * 8 * 4
    lengths = []
    original = cache.layers[0].update
    cache.layers[0].update = lambda *a, **k: (out := original(*a, **k), lengths.append(out[0].shape[2]))[0]
    feed(model, prompt(1), cache)
    assert lengths == [8]


# -- native windows and other layers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [mistral_config, gemma3_config])
@pytest.mark.parametrize("spec", ["full", "int8"])
@every_attention
@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.filterwarnings("ignore:.*changes nothing")
def test_b83_native_windows_are_kept(config, spec, attention, chunk):
    model, ids = build(config()), prompt(24)
    expected = feed(model, ids, DynamicCache(config=model.config), chunk)
    model.set_attn_implementation(attention)
    cache = cache_for(model, spec)
    out = feed(model, ids, cache, chunk)
    if spec == "full" or config is mistral_config:
        close(out, expected, 2e-4)
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            assert layer.keys.shape[2] <= 6


@pytest.mark.parametrize("config", [mistral_config, gemma3_config])
@pytest.mark.filterwarnings("ignore:.*changes nothing")
def test_b83_a_native_window_frees_what_left_it(config):
    """Also right after a long prompt: a view of the window keeps the whole prompt alive."""
    model = build(config())
    cache = cache_for(model, "int8")
    feed(model, prompt(500), cache)
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            assert layer.keys.untyped_storage().nbytes() <= 6 * 2 * 8 * 4


@every_attention
def test_b84_full_layers_packed_beside_native_windows(attention):
    model = build(gemma3_config(), attention)
    cache = QuantizedCache(model.config, "int8")
    feed(model, prompt(14), cache, 5)
    kinds = [isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers]
    assert kinds == cache.is_sliding == [True, False, True]
    assert cache.layers[1].sealed.keys.state.codes.dtype == torch.int8
    assert cache.layers[0].keys.dtype == torch.float32
    assert cache.memory()["device"]["window"] > 0
    expected = greedy(build(gemma3_config()), prompt(14), DynamicCache(config=model.config), 10)
    assert torch.equal(greedy(model, prompt(14), cache_for(model, "full"), 10), expected)


@every_attention
@pytest.mark.parametrize("chunk", [1, 7, None])
def test_a_sink_window_beside_native_windows(attention, chunk):
    model, ids = build(gemma3_config()), prompt(30)
    total = torch.arange(30)
    causal = total[None] <= total[:, None]
    near = total[:, None] - total[None] < 6
    masks = {
        "full_attention": (causal & (near | (total < 2)))[None, None],
        "sliding_attention": (causal & near)[None, None],
    }
    with torch.no_grad():
        expected = model(ids, attention_mask=masks, use_cache=False).logits
    model.set_attn_implementation(attention)
    close(feed(model, ids, cache_for(model, "sink(2,6)"), chunk), expected, 2e-4)


def test_a_spec_that_changes_nothing_warns():
    with pytest.warns(UserWarning, match="changes nothing"):
        KVCache(mistral_config(), "int8")


def qwen3_next_config():
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **SMALL,
        num_hidden_layers=2,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )


@every_attention
def test_b86_linear_attention_layers_keep_their_class(attention):
    model = build(qwen3_next_config())
    ids = prompt(12, 2)
    expected = greedy(model, ids, DynamicCache(config=model.config), 8)
    model.set_attn_implementation(attention)
    cache = cache_for(model, "full")
    assert [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers] == [True, False]
    assert torch.equal(greedy(model, ids, cache, 8), expected)
    quantized = cache_for(model, "int8")
    greedy(model, ids, quantized, 8)
    assert quantized.layers[1].sealed.keys.state.codes.dtype == torch.int8
    assert quantized.nbytes == memory_total(quantized) == reachable_bytes(quantized)
    assert quantized.get_seq_length() == 19 and repr(quantized) and len(list(quantized)) == 2
    quantized.reset()
    assert torch.equal(greedy(model, ids, quantized, 8), greedy(model, ids, cache_for(model, "int8"), 8))


def test_b86_a_model_without_attention_is_refused():
    from transformers import MambaConfig

    config = MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises(ValueError, match="Mamba"):
        KVCache(config, "int8")


@pytest.mark.parametrize("kind", ["made_up_attention", "compressed_sparse_attention"])
def test_b92_an_unknown_layer_type_is_refused_by_name(kind):
    config = llama_config()
    config.__dict__["layer_types"] = ["full_attention", kind]
    with pytest.raises(ValueError, match=kind):
        KVCache(config, "int8")


def test_b92_indexed_attention_is_refused_by_name():
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicIndexedLayer

    names = [name for name, cls in DYNAMIC_LAYER_TYPE_MAPPING.items() if cls is DynamicIndexedLayer]
    assert names
    for name in names:
        config = llama_config()
        config.__dict__["layer_types"] = ["full_attention", name]
        with pytest.raises(ValueError, match=name):
            KVCache(config, "int8")


def t5(layers=2):
    from transformers import T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_heads=4, decoder_start_token_id=1
    )
    config.eos_token_id, config.pad_token_id = None, 0
    return T5ForConditionalGeneration(config).eval()


def bart(layers=2):
    from transformers import BartForConditionalGeneration

    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=97,
        d_model=32,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        init_std=0.4,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return BartForConditionalGeneration(config).eval()


def encode_decode(model, cache, new=8):
    model.generation_config.eos_token_id = None
    return model.generate(prompt(9, 2), past_key_values=cache, do_sample=False, max_new_tokens=new, min_new_tokens=new)


@pytest.mark.parametrize("make", [t5, bart])
@pytest.mark.parametrize("layers", [1, 2])
def test_b89_a_bare_cache_for_an_encoder_decoder_is_refused(make, layers):
    model = make(layers)
    expected = encode_decode(model, None)
    try:
        out = encode_decode(model, KVCache(model.config))
    except ValueError as error:
        assert "EncoderDecoderCache" in str(error)
    else:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("make", [t5, bart])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both", [False, True])
def test_b89_wrapped_caches_equal_stock(make, layers, both):
    model = make(layers)
    expected = encode_decode(model, None, 12)
    cross = KVCache(model.config) if both else DynamicCache()
    cache = EncoderDecoderCache(KVCache(model.config), cross)
    assert torch.equal(encode_decode(model, cache, 12), expected)
    eight = EncoderDecoderCache(KVCache(model.config, "int8"), DynamicCache())
    encode_decode(model, eight, 12)
    assert eight.self_attention_cache.layers[0].sealed.keys.state.codes.dtype == torch.int8


@pytest.mark.parametrize("make", [t5, bart])
def test_b89_wrapped_caches_with_our_attention(make):
    model = make()
    expected = encode_decode(model, None, 12)
    try:
        model.set_attn_implementation("kvcache")
    except ValueError:
        return  # this model takes no attention function
    cache = EncoderDecoderCache(KVCache(model.config), DynamicCache())
    assert torch.equal(encode_decode(model, cache, 12), expected)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, canonical",
    [
        ("full", "full"),
        ("all", "full"),
        ("device", "full"),
        ("int8", "int8"),
        ("fp8", "fp8_e4m3"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("sink", "sink(4,1020)"),
        ("sink(2)", "sink(2,1020)"),
        ("sink(window=8)", "sink(4,8)"),
        ("sink(2, 6)", "sink(2,6)"),
        ("sink(2,window=6) + int8", "int8+sink(2,6)"),
        ("int8+sink(2,6)+device", "int8+sink(2,6)"),
        (" fp8 + sink( 0 , 6 ) ", "fp8_e4m3+sink(0,6)"),
        ("int8(skip_layers=0|-1)", "int8(skip_layers=0|-1)"),
    ],
)
def test_spec_round_trip(text, canonical):
    cache = KVCache.from_spec(llama_config(), text)
    parts, expected = cache.spec.split("+"), canonical.split("+")
    assert [p for p in parts if p != "full"] == [p for p in expected if p != "full"]
    again = KVCache.from_spec(llama_config(), cache.spec)
    assert again.spec == cache.spec
    for a, b in zip(cache.layers, again.layers, strict=True):
        assert a.sealed.key_codec.name == b.sealed.key_codec.name and a.sealed.limit == b.sealed.limit


@pytest.mark.parametrize(
    "text, words",
    [
        ("int9", ["int9", "int8", "fp8", "sink", "device"]),
        ("int8+what", ["what", "int8", "sink", "device"]),
        ("int8(bits=4)", ["bits", "skip_layers"]),
        ("full(3)", ["3", "skip_layers"]),
        ("sink(2,6,7)", ["sinks", "window"]),
        ("sink(size=3)", ["size", "sinks", "window"]),
        ("sink(2,sinks=3)", ["sinks", "window"]),
        ("all(3)", ["all", "none"]),
        ("device(3)", ["device"]),
        ("int8+fp8", ["int8", "fp8", "two"]),
        ("sink(2,6)+sink(2,6)", ["two"]),
        ("sink(-1,6)", ["sinks", "-1"]),
        ("sink(2,0)", ["window", "0"]),
        ("sink(2,6.5)", ["window", "6.5"]),
        ("sink(a,b)", ["sinks", "a"]),
        ("int8(skip_layers=7)", ["7", "2 layers"]),
        ("int8(skip_layers=-3)", ["-3", "2 layers"]),
        ("int8(skip_layers=x)", ["x", "layer number"]),
        ("int8(skip_layers=1.5)", ["1.5"]),
        ("sink(2,6", ["sink(2,6"]),
        ("", ["empty"]),
        ("+", ["int8"]),
        ("int8+", ["int8"]),
        (None, ["None"]),
        (8, ["8"]),
    ],
)
def test_a_wrong_spec_is_named_with_what_is_known(text, words):
    with pytest.raises(ValueError) as caught:
        KVCache.from_spec(llama_config(), text)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda c: KVCache(c, "int9"), ["int9", "int8", "fp8"]),
        (lambda c: KVCache(c, 8), ["8"]),
        (lambda c: KVCache(c, None), ["None"]),
        (lambda c: KVCache(c, retention="h3o"), ["h3o", "sink"]),
        (lambda c: KVCache(c, retention=None), ["None", "sink"]),
        (lambda c: KVCache(c, retention=5), ["5", "sink"]),
        (lambda c: KVCache(c, placement="moon"), ["moon", "device"]),
        (lambda c: KVCache(c, placement=None), ["None"]),
        (lambda c: KVCache(c, "int8", skip_layers=[9]), ["9", "2 layers"]),
        (lambda c: KVCache(c, "int8", skip_layers=[True]), ["True"]),
        (lambda c: KVCache(c, "int8", skip_layers=1.5), ["1.5"]),
        (lambda c: KVCache(c, "int8", skip_layers=None), ["skip_layers"]),
        (lambda c: KVCache(None), ["model.config", "NoneType"]),
        (lambda c: KVCache(llama()), ["model.config"]),
        (lambda c: QuantizedCache(c, "full"), ["full", "KVCache"]),
        (lambda c: QuantizedCache(c, window=3), ["window", "retention", "placement", "skip_layers"]),
        (lambda c: SinkWindowCache(c, budget=3), ["budget", "storage", "placement", "skip_layers"]),
        (lambda c: SinkWindowCache(c, sinks=-1), ["sinks", "-1"]),
        (lambda c: SinkWindowCache(c, window=True), ["window", "True"]),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_known(make, words):
    with pytest.raises(ValueError) as caught:
        make(llama_config())
    for word in words:
        assert word in str(caught.value)


def test_classes_are_shorthands():
    config = llama_config()
    assert KVCache(config).spec == KVCache.from_spec(config, "full").spec
    assert QuantizedCache(config).spec == "int8"
    assert QuantizedCache(config, "fp8", retention="sink(2,6)").spec == "fp8_e4m3+sink(2,6)"
    assert SinkWindowCache(config, sinks=4, window=508, storage="int8").spec == "int8+sink(4,508)"
    assert KVCache(config, "int8", "sink(2,6)", "device").spec == "int8+sink(2,6)"


@pytest.mark.parametrize("skip, plain", [((0,), {0}), ((-1,), {3}), ([0, -1], {0, 3}), (2, {2}), ("0|1", {0, 1})])
def test_skip_layers_stay_in_full_precision(skip, plain):
    model = llama(layers=4)
    cache = KVCache(model.config, "int8", skip_layers=skip)
    feed(model, prompt(9), cache)
    for index, layer in enumerate(cache.layers):
        assert hasattr(layer.sealed.keys.state, "codes") == (index not in plain)
    assert KVCache.from_spec(model.config, cache.spec).spec == cache.spec
    assert cache.stats().tokens_quantized == 9


def test_skip_layers_come_nearer_to_full_precision():
    model, ids = llama(layers=4), prompt(40)
    full = feed(model, ids, cache_for(model, "full"), 8)
    error = [
        (feed(model, ids, KVCache(model.config, "fp8_e5m2", skip_layers=skip), 8) - full).abs().mean()
        for skip in ((), (0, 1), (0, 1, 2, 3))
    ]
    assert error[0] > error[1] > error[2] < 1e-5


def test_b09_the_config_is_not_changed():
    first, second = llama_config(2), llama_config(3)
    before = first.to_dict(), second.to_dict()
    assert (len(KVCache(first, "int8")), len(KVCache(second, "int8")), len(KVCache(first))) == (2, 3, 2)
    assert (first.to_dict(), second.to_dict()) == before


def test_importing_patches_nothing():
    """In a fresh interpreter: nothing of transformers is touched until ``register()``, and that is idempotent."""
    code = """
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
before = set(AttentionInterface().valid_keys()), set(AttentionMaskInterface().valid_keys())
members = {n: v for m in (transformers.cache_utils, transformers.masking_utils) for n, v in vars(m).items()}
import hf_kvcache
assert members == {n: v for m in (transformers.cache_utils, transformers.masking_utils) for n, v in vars(m).items()}
assert (set(AttentionInterface().valid_keys()), set(AttentionMaskInterface().valid_keys())) == before
assert "kvcache" not in before[0]
for _ in range(2):
    hf_kvcache.register()
    after = set(AttentionInterface().valid_keys()), set(AttentionMaskInterface().valid_keys())
    assert (after[0] - before[0], after[1] - before[1]) == ({"kvcache"}, {"kvcache"})
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_b103_a_cache_that_lies_is_noticed():
    """The tests above read what was stored: a cache of zeros changes the logits by far more than they allow."""
    model, ids = llama(), prompt(20)
    cache = cache_for(model, "full")
    feed(model, ids[:, :15], cache)
    for layer in cache.layers:
        for slab in layer.sealed.slabs:
            slab.state.values.zero_()
    wrecked = feed(model, ids[:, 15:], cache)
    assert (wrecked - expected_logits(model, ids, "full")[:, 15:]).abs().max() > 0.5


@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
def test_a_refused_call_leaves_the_cache_as_it_was(attention):
    """A batch of another size, longer than what is held; then the turn that was meant."""
    model, ids = llama(attention), prompt(30)
    cache, expected = cache_for(model, "int8"), cache_for(model, "int8")
    for each in (cache, expected):
        greedy(model, ids[:, :12], each, 4)
    with pytest.raises(ValueError, match="batch of 1, got 2"):
        greedy(model, prompt(40, 2), cache, 4)
    assert torch.equal(greedy(model, ids, cache, 4), greedy(model, ids, expected, 4))
