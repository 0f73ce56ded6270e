"""What callers do beside plain forwards: options, states and rows that they give, gradients, copies, resets."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from families import case
from models import build, feed, greedy, llama, llama_config, prompt, states
from test_caches import gemma3_config, gradients, mistral_config, qwen3_next_config
from transformers import AutoConfig, DynamicCache

from hf_kvcache import EvictionCache, KVCache, OffloadedCache, QuantizedCache, compat
from hf_kvcache.layers import KVLayer, WindowLayer
from hf_kvcache.prefix import rewind


def cache_for(model, spec="full"):
    return KVCache.from_spec(model.config, spec)


def same(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=1e-4)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda c: KVCache(c, "int8(skip_layers=0)", skip_layers=[1]), "skip_layers is given twice"),
        (lambda c: KVCache(c, KVCache(c, "int8").storage, skip_layers=[1]), "skip_layers is given twice"),
        (lambda c: QuantizedCache(c, "int4(skip_layers=0)", skip_layers=0), "skip_layers is given twice"),
        (lambda c: KVCache(c, "int8(residual=3,residual=5)"), "'residual' twice"),
        (lambda c: KVCache(c, "int8(residual=3, residual=3)"), "'residual' twice"),
        (lambda c: KVCache.from_spec(c, "knorm(budget=64,budget=65)"), "'budget' twice"),
        (lambda c: KVCache.from_spec(c, "snapkv(budget=64,pyramid,pyramid)"), "'pyramid' twice"),
        (lambda c: KVCache.from_spec(c, "snapkv(budget=64,pyramid,pyramid=off)"), "'pyramid' twice"),
        (lambda c: KVCache.from_spec(c, "sink(4,8,reposition=off,reposition)"), "'reposition' twice"),
        (lambda c: KVCache.from_spec(c, "cpu(keep_recent=1,keep_recent=2)"), "'keep_recent' twice"),
        (lambda c: KVCache.from_spec(c, "disk(/nowhere,keep_recent=1,keep_recent=2)"), "'keep_recent' twice"),
        (lambda c: KVCache(c, "k8v4(key_axis=banana)"), "no option 'key_axis'"),
        (lambda c: KVCache(c, "k8v4(key_axis=token)"), "no option 'key_axis'"),
        (lambda c: KVCache(c, "k4v8(key_axis=banana)"), "key_axis='banana': known are"),
        (lambda c: KVCache(c, "int2(key_axis=banana)"), "key_axis='banana': known are"),
    ],
)
def test_no_option_is_dropped_or_overwritten(make, message):
    with pytest.raises(ValueError, match=message):
        make(llama_config())


def test_refused_options_change_no_default():
    with pytest.raises(ValueError):
        KVCache(llama_config(), "k8v4(key_axis=token)")
    assert KVCache(llama_config(), "int4(key_axis=token)").spec == "int4(key_axis=token)"


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_layers_without_a_cache_are_no_ends_and_cannot_be_named(family):
    config = case(family).model.config
    own = [i for i, layer in enumerate(KVCache(config).layers) if isinstance(layer, (KVLayer, WindowLayer))]
    full = [i for i in own if isinstance(KVCache(config).layers[i], KVLayer)]
    count = len(KVCache(config).layers)
    cache = KVCache(config, "int8", skip_layers="ends")
    for index in full:
        assert cache.layers[index].storage.lossless == (index in (own[0], own[-1]))
    if own[-1] + 1 == count:
        return  # before 5.24 a cache has no layer for those that share one
    for index in (-1, count - 1):
        with pytest.raises(
            ValueError, match=rf"skip_layers={index}: layer {count - 1} of .* reads the keys .* {own[-1]}"
        ):
            KVCache(config, "int8", skip_layers=index)
        with pytest.raises(ValueError, match=f"keep_layers={index}: layer {count - 1}"):
            OffloadedCache(config, keep_layers=index)


def test_ends_and_numbers_on_a_model_with_recurrent_layers():
    config = qwen3_next_config()  # recurrent, full
    assert KVCache(config, "int8", skip_layers="ends").layers[1].storage.lossless
    assert KVCache(config, "int8", skip_layers=-1).layers[1].storage.lossless
    with pytest.raises(ValueError, match="skip_layers=0: layer 0 .* recurrent state"):
        KVCache(config, "int8", skip_layers=0)


@pytest.mark.parametrize("family", ["falcon_h1", "zamba2"])
def test_layers_of_attention_and_recurrent_state_are_refused_as_that(family):
    with pytest.raises(ValueError, match="holds attention and a recurrent state in one .*use the stock DynamicCache"):
        KVCache(AutoConfig.for_model(family), "int8")


# -- rows --------------------------------------------------------------------------------------------------------------

ROWS = [
    ("llama", "full"), ("llama", "int4(group=4,residual=2)"), ("llama", "sink(2,6)"),
    ("llama", "knorm(budget=9,recent=4)"),
    ("mistral", "full"), ("gemma3", "int8"), ("qwen3_next", "int8"),
]  # fmt: skip
CONFIGS = {"llama": llama_config, "mistral": mistral_config, "gemma3": gemma3_config, "qwen3_next": qwen3_next_config}


@pytest.mark.parametrize("kind, spec", ROWS)
@pytest.mark.parametrize("rows", [(0, 2), [2, 0, 2], [True, False, True], torch.tensor([2, 1])])
@pytest.mark.parametrize("fed", [0, 11])
def test_rows_are_selected_by_tensor_list_or_tuple(kind, spec, rows, fed):
    model, ids, new = build(CONFIGS[kind]()), prompt(11, 3), prompt(4, 3, seed=2)
    cache = cache_for(model, spec)
    numbers = [i for i, row in enumerate(rows) if row] if isinstance(rows[0], bool) else [int(i) for i in rows]
    direct = cache_for(model, spec)
    if fed:
        feed(model, ids, cache)
        feed(model, ids[numbers], direct)
    cache.batch_select_indices(rows)
    same(feed(model, new[numbers], cache), feed(model, new[numbers], direct))


@pytest.mark.parametrize("kind, spec", ROWS)
@pytest.mark.parametrize("kind_of", [list, tuple, torch.tensor])
def test_rows_are_reordered_and_repeated(kind, spec, kind_of):
    model, ids, new = build(CONFIGS[kind]()), prompt(11, 3), prompt(4, 6, seed=2)
    cache, direct = cache_for(model, spec), cache_for(model, spec)
    feed(model, ids, cache)
    cache.reorder_cache(kind_of([2, 0, 1]))
    cache.batch_repeat_interleave(2)
    feed(model, ids[[2, 2, 0, 0, 1, 1]], direct)
    same(feed(model, new, cache), feed(model, new, direct))


@pytest.mark.parametrize("kind", ["mistral", "gemma3", "qwen3_next", "llama"])
@pytest.mark.parametrize("seen", [3, 12])
def test_another_batch_is_refused_before_anything_changes(kind, seen):
    model, ids = build(CONFIGS[kind]()), prompt(seen)
    cache, direct = cache_for(model), cache_for(model)
    feed(model, ids, cache)
    feed(model, ids, direct)
    for batch in (2, 3):
        with pytest.raises(ValueError, match=f"holds a batch of 1, got {batch}"):
            feed(model, prompt(2, batch), cache)
    with pytest.raises(ValueError, match="holds a batch of 1"):
        greedy(model, torch.cat([ids, prompt(2)], 1), cache, 2, num_beams=3)
    assert {layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")} == {seen}
    same(feed(model, prompt(2, seed=5), cache), feed(model, prompt(2, seed=5), direct))


# -- copies and resets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["cache first", "model first"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_cache_copied_with_its_model_follows_that_copy(order, how):
    model = build(llama_config(), "sdpa")
    cache, ids = cache_for(model, "int8"), prompt(9)
    feed(model, ids, cache)
    if how is copy.deepcopy:
        pair = how((cache, model) if order == "cache first" else (model, cache))
        mine, twin = pair if order == "cache first" else pair[::-1]
    else:
        mine, twin = how((cache, model))
    twin.set_attn_implementation("eager")
    assert model.config._attn_implementation == "sdpa" and twin.config._attn_implementation == "eager"
    new = prompt(3, seed=2)
    same(feed(twin, new, mine), feed(model, new, cache))
    twin.set_attn_implementation("kvcache")
    assert mine.config is twin.config and mine.layers[0].config is twin.config and cache.config is model.config
    same(feed(twin, new, mine.fork()), feed(model, new, cache.fork()), 2e-4)


@pytest.mark.parametrize("order", [1, -1])
def test_a_cache_copied_with_a_model_of_nested_configs_follows_both(order, tmp_path):
    """The whole model's config says whose weights made the states, the decoder's which attention runs."""
    this = case("gemma3")
    cache = KVCache.from_spec(this.model.config, "int8")
    assert cache.config is not this.model.config
    feed(this.model, prompt(9, 2), cache)
    mine, twin = copy.deepcopy((cache, this.model)[::order])[::order]
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.01)
    new = prompt(3, 2, seed=2)
    feed(twin, new, mine)
    assert mine._source is twin.config and mine.config is twin.config.get_text_config()
    assert cache._source is this.model.config and cache.config is this.model.config.get_text_config()
    mine.save(tmp_path / "file")
    KVCache.load(tmp_path / "file", twin)
    with pytest.raises(ValueError, match="other weights|another model|weights"):
        KVCache.load(tmp_path / "file", this.model)


def test_a_copy_of_a_copy_and_a_lone_copy_follow_the_model():
    model = build(llama_config())
    cache = cache_for(model, "int8")
    feed(model, prompt(5), cache)
    for twin in (
        copy.deepcopy(copy.deepcopy(cache)),
        copy.deepcopy([cache, cache])[1],
        pickle.loads(pickle.dumps(cache)),
    ):
        feed(model, prompt(3, seed=2), twin)
    assert copy.deepcopy(copy.deepcopy(cache)).fork().config is model.config
    one, two = copy.deepcopy([cache, cache])
    assert one is two


def test_reset_makes_recurrent_layers_new():
    model = build(qwen3_next_config())
    cache = cache_for(model, "int8")
    feed(model, prompt(9, 2), cache)
    cache.activate_past_recording()
    cache.reset()
    fresh = cache_for(model, "int8")
    assert cache.nbytes == fresh.nbytes == 0 and vars(cache.layers[0]) == vars(fresh.layers[0])
    ids = prompt(7, 3, seed=6)  # another batch size
    assert torch.equal(feed(model, ids, cache, 4), feed(model, ids, fresh, 4))


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvcache"])
@pytest.mark.parametrize("spec", ["full", "int8", "int4(group=4,residual=2)", "sink(2,6)"])
def test_gradients_into_stored_tokens_are_refused_not_dropped(spec, attention):
    model, ids = build(llama_config(), attention), prompt(9, 2)
    cache = cache_for(model, spec)
    model(ids[:, :4], past_key_values=cache).logits.mean().backward()  # one forward: as ever
    logits = model(ids[:, 4:8], past_key_values=cache).logits
    with pytest.raises(ValueError, match="tokens that came with gradients.*no_grad.*DynamicCache"):
        logits.mean().backward()
    fork = cache.fork()
    feed(model, ids[:, 8:], cache)  # not asked for gradients: goes on
    with pytest.raises(ValueError, match="no_grad"):
        model(ids[:, 8:], past_key_values=fork).logits.mean().backward()
    cache.reset()
    feed(model, ids[:, :4], cache)
    model(ids[:, 4:], past_key_values=cache).logits.mean().backward()


def test_gradients_work_again_once_such_tokens_are_taken_back():
    model, ids = build(llama_config()), prompt(9, 2)
    cache = cache_for(model)
    feed(model, ids[:, :5], cache)
    model(ids[:, 5:7], past_key_values=cache)
    cache.rollback(2)
    model.zero_grad()
    model(ids[:, 5:], past_key_values=cache).logits.pow(2).mean().backward()
    mine = [p.grad.clone() for p in model.parameters()]
    theirs = gradients(model, ids[:, :5], ids[:, 5:], DynamicCache(config=model.config))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
def test_given_states_that_require_gradients_are_not_silently_constant(attention, frozen):
    model = build(llama_config(), attention).requires_grad_(not frozen)
    given = [tuple(t.requires_grad_() for t in states(5, 1)) for _ in range(2)]
    logits = model(prompt(3), past_key_values=KVCache.from_states(model.config, given)).logits
    with pytest.raises(ValueError, match="tokens that came with gradients"):
        logits.mean().backward()
    one = model(prompt(1), past_key_values=KVCache.from_states(model.config, given)).logits
    with pytest.raises(ValueError, match="tokens that came with gradients"):
        one.mean().backward()
    with torch.no_grad():
        cache = KVCache.from_states(model.config, given)
    assert not cache._with_grad


# -- states ------------------------------------------------------------------------------------------------------------


def states_of(model, ids):
    cache = DynamicCache()  # without a config: every layer keeps everything
    feed(model, ids, cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize("spec", ["full", "int8", "int4(group=4,residual=3,sinks=2)", "sink(2,40)", "full+cpu"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvcache"])
def test_states_chosen_elsewhere_go_on_at_their_position(spec, attention, tmp_path):
    """13 of 29 tokens, the same ones in every layer: a mask that hides the others says what is right."""
    model, ids, new = llama(attention), prompt(29, 2), prompt(6, 2, seed=2)
    kept = [0, 1, 2, *range(19, 29)]
    given = [(k[:, :, kept], v[:, :, kept]) for k, v in states_of(llama(), ids)]
    cache = KVCache.from_states(model.config, given, spec, tokens_seen=29)
    assert cache.get_seq_length() == 29 and cache.stats().tokens_kept == 13
    cache.save(tmp_path / "file")
    twins = [cache.fork(), copy.deepcopy(cache), KVCache.load(tmp_path / "file", model.config)]
    out = feed(model, new, cache)
    full = DynamicCache()
    feed(llama(), ids, full)
    mask = torch.ones(1, 1, 6, 35).tril(29).bool()
    mask[..., [i for i in range(29) if i not in kept]] = False
    expected = llama()(new, past_key_values=full, attention_mask=mask.expand(2, -1, -1, -1)).logits
    if "int4" in spec:  # the same states under the same codec, and the position by hand
        mine, position = KVCache.from_states(model.config, given, spec), torch.arange(29, 35)[None].expand(2, -1)
        expected = model(new, past_key_values=mine, position_ids=position).logits
    same(out, expected, 0.6 if spec == "int8" else 2e-4)
    for twin in twins:
        assert twin.get_seq_length() == 29
        same(feed(model, new, twin, 4), out, 2e-2)
    assert cache.get_seq_length() == 35
    cache.rollback(min(3, cache.exact_rollback()))
    with pytest.raises(ValueError, match="began with 13 states of 29 tokens"):
        cache.rollback(cache.get_seq_length() - 28)


def test_a_position_that_cannot_be_is_refused():
    config, given = llama_config(), [states(13) for _ in range(2)]
    for wrong in (12, True, 13.0, -1):
        with pytest.raises(ValueError, match="tokens_seen=.* not an integer >= the 13"):
            KVCache.from_states(config, given, tokens_seen=wrong)
    with pytest.raises(ValueError, match="needs the position of every token"):
        KVCache.from_states(config, given, "knorm(budget=64)", tokens_seen=29)
    assert KVCache.from_states(config, given, "knorm(budget=64)", tokens_seen=13).get_seq_length() == 13
    with pytest.raises(ValueError, match="states of \\[12, 13\\] tokens"):
        KVCache.from_states(config, [states(13), states(12)])
    with pytest.raises(ValueError, match="layer 1 needs keys and values"):
        KVCache.from_states(config, [states(13), (None, None)])
    with pytest.raises(ValueError, match="layer 0 keeps a recurrent state"):
        KVCache.from_states(qwen3_next_config(), given)


@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
@pytest.mark.parametrize("spec", ["knorm(budget=8,sinks=2,recent=4)", "knorm(budget=40)", "random(budget=8,recent=4)"])
def test_given_states_are_evicted_at_once(spec, attention):
    model = llama(attention)
    given = states_of(llama(), prompt(20))
    cache = KVCache.from_states(model.config, given, spec)
    budget = int(spec.split("=")[1].split(",")[0].rstrip(")"))
    assert cache.stats().tokens_kept == min(budget, 20) and cache.get_seq_length() == 20
    assert cache.can_rollback(5) == (budget == 40)
    direct = cache_for(model, spec)
    feed(model, prompt(20), direct)
    assert all(torch.equal(a.positions, b.positions) for a, b in zip(cache.layers, direct.layers, strict=True))
    same(feed(model, prompt(3, seed=2), cache), feed(model, prompt(3, seed=2), direct), 2e-4)


@pytest.mark.parametrize("policy", ["snapkv", "tova", "h2o", "expected"])
def test_policies_that_need_attention_take_no_states(policy):
    with pytest.raises(ValueError, match=f"policy '{policy}.* needs attention .* states do not bring"):
        KVCache.from_states(llama("kvcache").config, [states(20)] * 2, f"{policy}(budget=64)")


@pytest.mark.parametrize("given", [5, 7, 19])
@pytest.mark.parametrize("config", [gemma3_config, mistral_config])
def test_windows_take_what_they_would_hold(config, given):
    """Gemma 3: window layers of 6 get 5 of 19 tokens, which is all they need."""
    model, ids, new = build(config()), prompt(19, 2), prompt(4, 2, seed=2)
    stock = DynamicCache(config=model.config)
    feed(model, ids, stock)
    everything = DynamicCache(config=model.config)
    everything.activate_past_recording()
    feed(model, ids, everything)
    pairs = [
        (layer.keys, layer.values) if layer.keys.shape[2] == 19 and not layer.is_sliding
        else (layer.keys[:, :, -given:], layer.values[:, :, -given:])
        for layer in everything.layers
    ]  # fmt: skip
    cache = KVCache.from_states(model.config, pairs, tokens_seen=19)
    assert [layer.get_seq_length() for layer in cache.layers] == [19] * len(cache) and cache.get_seq_length() == 19
    if config is gemma3_config:
        assert KVCache.from_states(model.config, pairs).get_seq_length() == 19
    same(feed(model, new, cache), feed(model, new, stock), 1e-4)
    with pytest.raises(
        ValueError, match="window of|sliding layer of window 6 needs the last 5 of 19 tokens, got states of 4"
    ):
        short = [(k[:, :, -4:], v[:, :, -4:]) if layer.is_sliding else (k, v)
                 for layer, (k, v) in zip(everything.layers, pairs, strict=True)]  # fmt: skip
        KVCache.from_states(model.config, short, tokens_seen=19)


# -- ways out that are ones --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not compat.ASKS_FOR_STATES, reason="older transformers hand over no positions to count with")
@pytest.mark.parametrize("shorter", [0, 1, 4])
def test_a_prompt_that_is_cached_already_is_told_how_many_to_take_back(shorter):
    model, ids = llama(), prompt(12)
    cache = cache_for(model)
    feed(model, ids, cache)
    asked = ids[:, : 12 - shorter]
    with pytest.raises(ValueError, match=rf"cache.rollback\({shorter + 1}\).*rewind"):
        greedy(model, asked, cache, 4)
    other = cache.fork()
    cache.rollback(shorter + 1)
    expected = greedy(model, asked, cache_for(model), 4)
    assert torch.equal(greedy(model, asked, cache, 4), expected)
    rewind(other, ids, asked)
    assert torch.equal(greedy(model, asked, other, 4), expected)


@pytest.mark.skipif(not compat.ASKS_FOR_STATES, reason="older transformers hand over no positions to count with")
@pytest.mark.parametrize("spec", ["sink(2,6)", "knorm(budget=8,sinks=2,recent=4)"])
def test_a_prompt_that_cannot_be_taken_back_is_told_to_reset(spec):
    model, ids = llama("kvcache"), prompt(12)
    cache = cache_for(model, spec)
    feed(model, ids, cache)
    with pytest.raises(ValueError, match=r"call cache.reset\(\) before"):
        greedy(model, ids, cache, 4)
    cache.reset()
    assert torch.equal(greedy(model, ids, cache, 4), greedy(model, ids, cache_for(model, spec), 4))


@pytest.mark.parametrize("loss", ["shift_labels", "num_items_in_batch", "ignore_index"])
def test_what_a_loss_needs_is_handed_to_attention_too(loss):
    ids = prompt(12)
    more = {"shift_labels": ids.roll(-1, 1), "num_items_in_batch": 7, "ignore_index": int(ids[0, 3])}[loss]
    found = []
    for attention in ("sdpa", "kvcache"):
        model = llama(attention)
        with torch.no_grad():
            found.append(model(ids, past_key_values=cache_for(model), labels=ids, **{loss: more}).loss)
    same(*found)


@pytest.mark.parametrize("spec", ["full", "int8", "int4(residual=4)", "sink(2,6)"])
def test_a_config_that_is_not_the_models_own_is_told(spec):
    """Right, but from decoded tensors: at the stock cache's speed."""
    model, ids, more = llama("kvcache"), prompt(12), prompt(1, seed=2)
    cache, own = KVCache.from_spec(llama_config(), spec), cache_for(model, spec)
    with pytest.warns(UserWarning, match=r"the config that the cache was made from says None.*model\.config"):
        got = feed(model, ids, cache), feed(model, more, cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        same(got[1], (feed(model, ids, own), feed(model, more, own))[1], 1e-4)
        feed(model, ids, DynamicCache(config=model.config))
        feed(llama(), ids, cache_for(llama(), spec))


@pytest.mark.parametrize("spec", ["sink(2,6)", "int8+sink(2,6)", "knorm(budget=8,sinks=2,recent=4)"])
def test_recording_the_past_is_refused_where_tokens_are_gone_or_would_go(spec):
    model, ids = llama(), prompt(20)
    cache = cache_for(model, spec)
    feed(model, ids[:, :5], cache)
    cache.activate_past_recording()
    expected = cache.fork()
    feed(model, ids[:, 5:8], cache)
    with pytest.raises(ValueError, match="as assisted decoding asks, and 4 more tokens would evict"):
        feed(model, ids[:, 8:12], cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [8, 8]
    cache.crop(-3)
    same(feed(model, ids[:, 5:8], cache), feed(model, ids[:, 5:8], expected))
    cache.reset()
    feed(model, ids, cache)
    with pytest.raises(ValueError, match=r"activate_past_recording\(\): layer 0 has evicted tokens"):
        cache.activate_past_recording()


def test_a_window_that_recorded_too_little_cannot_be_cropped_beyond():
    model = build(mistral_config())
    cache = cache_for(model)
    feed(model, prompt(20), cache)
    cache.activate_past_recording()
    feed(model, prompt(3, seed=2), cache)
    with pytest.raises(ValueError, match="has dropped tokens beyond its window"):
        cache.crop(-4)
    cache.crop(-3)
    assert cache.get_seq_length() == 20


def test_a_model_that_decodes_its_keys_is_not_told_to_feed_them_one_by_one():
    model = case("deepseek_v3").model
    cache, ids = KVCache.from_spec(model.config, "int8(residual=3)+sink(2,6)"), prompt(20)
    with pytest.raises(ValueError) as refusal:
        feed(model, ids, cache, 1)
    assert "token by token" not in str(refusal.value) and "use retention 'all'" in str(refusal.value)


def test_eviction_cache_by_name_still_takes_its_options():
    assert EvictionCache(llama_config(), "snapkv", 64, pyramid=True).spec == "snapkv(budget=64,pyramid=on)"
