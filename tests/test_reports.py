"""Scenarios of public reports that no other module has, and where each of them is tested, or why it is not."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from families import DECODERS, case
from models import ReferenceCache, build, feed, greedy, llama, llama_config, prompt, states
from test_caches import padded
from test_every_class import BY_KEYS, BY_MASS, FAR, KNORM, LOW, MIXED, MOVED, attention_of, cache_for
from transformers import Cache, DynamicCache, GPT2Config

import hf_kvcache
from eval import contenders, models, proofs, quality, scoring, speed
from hf_kvcache import EvictionCache, KVCache, PrefixStore, SinkWindowCache, cpu_decode, generate_with_prefix
from hf_kvcache.likelihood import Request, score
from hf_kvcache.prefix import content_hash

POLICIES = ["random", "knorm", "keydiff", "tova", "h2o", "snapkv", "expected"]
every_policy = pytest.mark.parametrize("policy", POLICIES)
every_spec = pytest.mark.parametrize("spec", ["full", "int8", "sink(2,6)", LOW, MIXED, *FAR, MOVED, *BY_KEYS, *BY_MASS])

stored_spec = pytest.mark.parametrize(
    "spec", ["full", "int8", "fp8", "sink(2,6)", LOW, MIXED, MOVED, "int8+cpu", *BY_KEYS, *BY_MASS]
)

# -- the list ----------------------------------------------------------------------------------------------------------

SCENARIOS = """
B01 B02 B03 B04 B06 B07 B09 B11 B12 B14 B15 B17 B19 B20 B21 B23 B24 B25 B26 B27 B29 B31 B34 B36 B37 B41 B42 B44 B46 B47
B49 B50 B51 B53 B55 B56 B58 B60 B62 B63 B65 B66 B67 B69 B71 B72 B74 B75 B76 B77 B78 B79 B80 B81 B83 B84 B85 B86 B89 B90
B92 B93 B96 B97 B99 B100 B101 B103 B104 B106 B108 B110 B111 B112 B113 B114
""".split()
NOT_APPLICABLE: dict[str, str] = {}  # id -> why, in one line


def test_every_scenario_is_tested_or_says_why_not():
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    names = re.findall(r"^def test_((?:b\d+_)+)", text, re.MULTILINE)
    tested = {number.upper() for name in names for number in name.rstrip("_").split("_")}
    assert sorted(set(SCENARIOS) - tested - set(NOT_APPLICABLE)) == []
    assert sorted((tested | set(NOT_APPLICABLE)) - set(SCENARIOS)) == []  # a name that stands for nothing
    assert not tested & set(NOT_APPLICABLE) and len(SCENARIOS) == len(set(SCENARIOS)) == 76


# -- without a cache ---------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """Names of the caches that were made."""
    names, init = [], Cache.__init__

    def noted(self, *args, **kwargs):
        names.append(type(self).__name__)
        init(self, *args, **kwargs)

    monkeypatch.setattr(Cache, "__init__", noted)
    return names


def test_b07_b97_the_uncached_side_of_the_proof_makes_no_cache(made, monkeypatch):
    """And the cached side differs from it by less than 1e-3, or nothing is compared at all."""
    model, ids, at = build(llama_config()), prompt(41), []
    forward = model.forward
    model.forward = lambda *a, **k: (at.append((k.get("use_cache"), len(made))), forward(*a, **k))[1]
    assert proofs.cached_equals_uncached(model, ids, step=8, attn="kvcache") < 1e-3
    assert at[0] == (False, 0) and made.count("KVCache") == 1 and all(use is not False for use, _ in at[1:])
    monkeypatch.setattr(contenders, "make_cache", lambda spec, config: contenders.zeroed(DynamicCache(config=config)))
    with pytest.raises(ValueError, match="proof failed: cached and uncached logits"):
        proofs.cached_equals_uncached(model, ids, step=8)


@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
@pytest.mark.parametrize("training", [False, True])
def test_b96_a_forward_without_a_cache_fills_none(made, attention, training):
    model, ids = build(llama_config(), attention).train(training), prompt(20, 2)
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    assert made == [] and getattr(out, "cache", out.past_key_values) is None
    model.set_attn_implementation("eager")
    torch.testing.assert_close(out.loss, model(ids, labels=ids, use_cache=False).loss, atol=1e-5, rtol=1e-5)


@every_spec
def test_b07_a_cache_that_is_not_to_be_used_is_refused(spec):
    """``use_cache=False`` feeds the whole text at every step: into a cache it would go again and again."""
    model = llama(attention_of(spec))
    # Older transformers hand over no positions: there, only the mask shows it, which hides what comes last.
    with pytest.raises(ValueError, match="use_cache=False pass no cache|the mask hides some"):
        greedy(model, prompt(9), cache_for(model, spec), 4, use_cache=False)


# -- devices -----------------------------------------------------------------------------------------------------------


class Index(torch.Tensor):
    """Knows where it was moved: on the meta device an index from elsewhere would do."""

    def to(self, device):
        self.asked.add(torch.device(device).type)
        return super().to(device).as_subclass(torch.Tensor)


@every_spec
def test_b14_an_index_goes_to_each_tensor(spec):
    """Keys on one device, values on another."""
    model = llama(attention_of(spec))
    cache, index = cache_for(model, spec), torch.tensor([1, 0, 1]).as_subclass(Index)
    feed(model, prompt(30, 2), cache)
    away = lambda state: state and type(state)(*(t.to("meta") for t in state))  # noqa: E731
    for layer in cache.layers:
        for slab in [run.values for run in layer.runs]:
            slab.state = away(slab.state)
        for slots in getattr(layer, "_containers", list)():
            slots.values = away(slots.values)
    before = [layer.keys for layer in cache.layers]
    for move in (cache.reorder_cache, cache.batch_select_indices):
        index.asked = set()
        move(index)
        assert index.asked == {"cpu", "meta"} or "adaptive" in spec  # flat tensors are cut by an index of their own
    cache.batch_repeat_interleave(2)
    index = index.as_subclass(torch.Tensor)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys[index][index].repeat_interleave(2, 0))


@pytest.mark.parametrize("spec", ["full", "int8", LOW, KNORM, "int8+cpu"])
def test_b14_layers_on_two_devices(spec):
    cache, index = KVCache.from_spec(llama_config(2), spec), torch.tensor([1, 0, 1])
    for layer, device in enumerate(("cpu", "meta")):
        cache.update(*(x.to(device) for x in states(20)), layer)
    before = cache.layers[0].keys
    cache.batch_select_indices(index)
    cache.reorder_cache(index)
    assert torch.equal(cache.layers[0].keys, before[index][index])
    assert cache.layers[1].keys.device.type == "meta" and cache.layers[1].keys.shape[0] == 3


# -- layers and heads of unequal length --------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", ["pyramid", "adaptive", "pyramid,adaptive", ""])
@pytest.mark.parametrize("policy", ["knorm", "snapkv", "h2o"])
@torch.no_grad()
def test_b27_unequal_layers_equal_a_mask_for_each(policy, extra):
    """A stock cache with one mask per layer and head, which shows what each of ours holds."""
    model, stock = llama("kvcache", 4), build(llama_config(4), "eager")
    cache, whole = KVCache.from_spec(model.config, f"{policy}(budget=14,sinks=2,recent=4,{extra})"), DynamicCache()
    hidden = []

    def look(index):
        def hook(module, args, kwargs):
            return args, {**kwargs, "attention_mask": hidden[index] if hidden else kwargs["attention_mask"]}

        return hook

    for index, layer in enumerate(stock.model.layers):
        layer.self_attn.register_forward_pre_hook(look(index), with_kwargs=True)
    ids = prompt(48, 2)
    for start, stop in ((0, 40), *((n, n + 1) for n in range(40, 48))):
        if start:
            hidden[:] = [mask_of(layer.positions, start) for layer in cache.layers]
        out = feed(model, ids[:, start:stop], cache)
        torch.testing.assert_close(out, feed(stock, ids[:, start:stop], whole), atol=5e-4, rtol=1e-3)
    assert len({layer.kept for layer in cache.layers}) > 1 or not extra


def mask_of(positions, seen):
    """[B, 4, 1, seen + 1]: minus infinity where a KV head (two query heads each) does not hold the token."""
    held = torch.zeros(*positions.shape[:2], seen + 2, dtype=torch.bool)
    held.scatter_(2, torch.where(positions < 0, seen + 1, positions), True)
    held[..., seen] = True
    return torch.where(held[..., : seen + 1], 0.0, float("-inf")).repeat_interleave(2, 1)[:, :, None]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("extra", ["pyramid", "adaptive"])
def test_b27_one_mask_for_unequal_layers_is_refused(attention, extra):
    model = llama(attention)
    cache = cache_for(model, f"{KNORM[:-1]},{extra})")
    with pytest.raises(ValueError, match=f'{extra} budgets differ.*set_attn_implementation\\("kvcache"\\)'):
        greedy(model, prompt(5), cache)
    assert cache.get_seq_length() == 0


# -- beyond the trained length -----------------------------------------------------------------------------------------


def test_b34_learned_positions_end_where_they_end():
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32, initializer_range=0.4)
    with pytest.raises(ValueError, match="GPT2Config has no rotary positions"):
        SinkWindowCache(config, 4, 16, reposition=True)
    model, ids = build(config), prompt(8)
    cache = SinkWindowCache(config, 4, 16)
    out = greedy(model, ids, cache, 25)  # 32 positions are fed, and the last token is not
    assert torch.equal(out, greedy(model, ids, ReferenceCache(config, "sink(4,16)"), 25))
    with pytest.raises((ValueError, IndexError)):
        greedy(model, out, cache, 1)


@torch.no_grad()
def test_b34_rotary_positions_stay_within_the_window():
    model, stock = (build(llama_config(1, max_position_embeddings=32), name) for name in ("kvcache", "sdpa"))
    cache = SinkWindowCache(model.config, 4, 16, reposition=True)
    ids = greedy(model, prompt(8), cache, 100)
    assert cache.get_seq_length() == 107 and cache.layers[0].kept == 20
    logits = feed(model, ids[:, -1:], cache)[:, 0]
    seen = torch.cat([ids[:, :4], ids[:, -16:]], 1)  # positions 0 to 19 for the stock model
    torch.testing.assert_close(logits, stock(seen).logits[:, -1], atol=2e-4, rtol=1e-4)


# -- quantization ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
@pytest.mark.parametrize("storage", ["int8", "fp8", "int4", "int2", "k8v4"])
@pytest.mark.parametrize("place", ["", "+cpu"])
def test_b56_a_residual_and_sinks_are_never_encoded(storage, place, attention):
    model, plain = llama(attention), cache_for(llama(attention), "full")
    group = ",group=8" if storage[0] in "ik" and storage != "int8" else ""
    cache = cache_for(model, f"{storage}(residual=32,sinks=4{group}){place}")
    for each in (cache, plain):
        feed(model, prompt(20), each)
    assert cache.stats().tokens_quantized == 0
    first = plain.layers[0].keys
    assert torch.equal(cache.layers[0].keys, first) and torch.equal(cache.layers[1].values, plain.layers[1].values)
    feed(model, prompt(60, seed=2), cache, 7)
    assert cache.stats().tokens_quantized >= 80 - 4 - 32 - 7
    assert torch.equal(cache.layers[0].keys[:, :, :4], first[:, :, :4])


@pytest.mark.parametrize("attention", ["eager", "kvcache"])
def test_b85_learned_sinks_over_encoded_keys(attention):
    """Fluent is not enough: the distribution itself, and it must feel the learned sinks."""
    model = copy.deepcopy(case("gpt_oss").model)
    model.set_attn_implementation(attention)
    ids, kl, logits = prompt(33), {}, {}
    sinks = [layer.self_attn.sinks for layer in model.model.layers]
    try:
        for strength in (0.0, 4.0):
            for one in sinks:
                one.data.fill_(strength)
            outcomes = scoring.score(model, ids, ["full", "int8", "int2(group=8,residual=0)"], step=4, attn=attention)
            kl[strength] = [outcome.score.kl_mean for outcome in outcomes.values()]
            logits[strength] = feed(model, ids, KVCache.from_spec(model.config, "int8"), 4)
            assert 0.5 < outcomes["int8"].score.top1_agreement <= 1
    finally:
        for one in sinks:
            one.data.zero_()
    assert (logits[0.0] - logits[4.0]).abs().max() > 0.1
    for full, int8, int2 in kl.values():
        assert full < 1e-5 < int8 < 0.02 < int2  # and a loss is seen where there is one


# -- eviction ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, store", [*((name, "full") for name in POLICIES), ("knorm", LOW), ("snapkv", LOW)])
def test_b49_b65_a_budget_holds_and_newcomers_stay(policy, store):
    """A prompt as long as the budget: not frozen. A longer one: never more than the budget, while decoding too."""
    model = llama("kvcache")
    for length, steps in ((14, 43), (40, 50)):
        cache = cache_for(model, f"{store}+{policy}(budget=14,sinks=2,recent=4)")
        for n in (length, *[1] * steps):
            feed(model, prompt(n, seed=n), cache)
            assert all(layer.kept <= 14 for layer in cache.layers)
        for kept in cache.layers[1].positions[0].tolist():
            assert {0, 1} | set(range(length + steps - 4, length + steps)) <= set(kept) and kept != list(range(14))


def test_b66_a_real_model_needs_its_sinks():
    """At five times the window, on text; random models show nothing of it."""
    if not (models.home() / f"{models.DEFAULT_MODEL}-float32" / "config.json").is_file():
        pytest.skip("no converted model; `make demo` makes one")
    loaded = models.load_model()
    ids = models.token_ids(loaded, models.load_text(models.DEFAULT_TEXT), 161)

    def perplexity(cache):
        logits = feed(loaded.model, ids[:, :-1], cache)[0, 32:].float()
        return torch.nn.functional.cross_entropy(logits, ids[0, 33:]).exp().item()

    dense = perplexity(DynamicCache(config=loaded.model.config))
    assert perplexity(cache_for(loaded.model, "sink(4,28)")) < 2 * dense
    assert perplexity(cache_for(loaded.model, "sink(0,32)")) > 5 * dense


@every_policy
@pytest.mark.parametrize("length", [1, 5, 63, 64, 65])
@torch.no_grad()
def test_b69_a_window_as_long_as_the_prompt(policy, length):
    """The first forward is exact whatever the window; what fits the budget stays exact."""
    model, stock, ids = llama("kvcache"), llama(), prompt(length + 6)
    windows = {"snapkv": "window=64,kernel=7", "expected": "queries=64"}.get(policy, "")
    expected = feed(stock, ids, DynamicCache(config=stock.config))
    for budget in (80, 8):
        cache = cache_for(model, f"{policy}(budget={budget},sinks=2,recent=4,{windows})".replace(",)", ")"))
        out = feed(model, ids[:, :length], cache), feed(model, ids[:, length:], cache, 1)
        exact = torch.cat(out, 1)[:, : length + 6 if budget == 80 else length]
        torch.testing.assert_close(exact, expected[:, : exact.shape[1]], atol=5e-4, rtol=1e-3)
        assert out[1].isfinite().all() and cache.layers[0].kept == min(budget, length + 6)


@every_policy
def test_b75_a_budget_in_tokens_and_as_a_share(policy):
    """One meaning for all policies, and what is reported is what is held."""
    model, ids = llama("kvcache"), prompt(40, 2)
    for budget, kept in ((10, 10), (0.25, 10), (0.5, 20), (64, 40)):
        cache = EvictionCache(model.config, policy, budget, sinks=2, recent=4)
        feed(model, ids, cache)
        stats = cache.stats()
        assert (stats.tokens_kept, stats.tokens_evicted, stats.tokens_seen) == (kept, 40 - kept, 40)
        assert all(layer.keys.shape[2] == kept == (layer.positions >= 0).sum(-1).max() for layer in cache.layers)


@pytest.mark.parametrize("spec", ["full", "int8", "sink(2,6)", LOW, MIXED, *FAR, *BY_KEYS])
def test_b72_eager_equals_sdpa(spec):
    """In float64, where no rounding of a codec hangs on the attention."""
    ids, logits = prompt(40, 2), []
    for model in (llama(name, dtype=torch.float64) for name in ("eager", "sdpa")):
        cache = cache_for(model, spec)
        logits.append(torch.cat([feed(model, ids[:, :28], cache, 14), feed(model, ids[:, 28:], cache, 1)], 1))
    assert (logits[0] - logits[1]).abs().max() < 1e-4


# -- families ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.filterwarnings("ignore:.*changes nothing")
def test_b113_memory_is_bounded_for_any_family(family):
    """By a window, in every layer; or refused by name."""
    this, sizes = case(family), []
    try:
        with this.attention("stock" if family == "deepseek_v3" else "kvcache"):
            cache = KVCache.from_spec(this.model.config, "sink(2,6)")
            feed(this.model, prompt(12), cache)
            for _ in range(2):
                feed(this.model, prompt(20), cache, 1)
                sizes.append(cache.nbytes)
    except ValueError as error:
        assert "retention 'all'" in str(error) and family in ("bloom", "mpt", "falcon:alibi", "deepseek_v3")
        return
    assert sizes[0] == sizes[1] > 0 and cache.get_seq_length() == 52


def qwen2_vl():
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = dict(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.4, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]),
    )  # fmt: skip
    vision = dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2, patch_size=2, initializer_range=0.4)
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=90, video_token_id=91, vision_start_token_id=92,
        vision_end_token_id=93,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def looked_at(seed):
    """A prompt with a picture of four tokens, two by two."""
    ids = torch.cat([prompt(5, vocab=80), torch.tensor([[92, 90, 90, 90, 90, 93]]), prompt(4, vocab=80, seed=2)], 1)
    torch.manual_seed(seed)
    kinds = (ids == 90).long()
    return ids, dict(
        pixel_values=torch.randn(16, 24), image_grid_thw=torch.tensor([[1, 4, 4]]), mm_token_type_ids=kinds
    )


@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
@pytest.mark.parametrize("spec", ["full", "cpu", "int8", LOW, "sink(4,60)", KNORM.replace("14", "60")])
def test_b90_text_then_a_picture_then_text(attention, spec):
    """Positions are fewer than tokens after a picture, and none of it may survive into the next prompt."""
    model = qwen2_vl()
    text, (ids, picture) = prompt(12, vocab=80), looked_at(3)
    turns = [(text, {}), (ids, picture), (text, {})]
    exact = [greedy(model, x, DynamicCache(config=model.config), 8, **extra) for x, extra in turns]
    model.set_attn_implementation(attention)
    out, spans = [], []
    for x, extra in turns:
        cache = cache_for(model, spec)
        out.append(greedy(model, x, cache, 8, **extra))
        spans.append(cache.get_seq_length())
    assert spans == [19, 22, 19] and torch.equal(out[0], out[2])
    if spec not in ("int8", LOW):
        assert all(torch.equal(a, b) for a, b in zip(out, exact, strict=True))


def test_b90_a_prefix_with_a_picture_is_known_by_its_pixels():
    model, store = qwen2_vl(), PrefixStore(1 << 30)
    ids, picture = looked_at(3)
    other = looked_at(4)[1]
    with torch.no_grad():
        cache = KVCache(model.config)
        model(ids, past_key_values=cache, **picture)
    keys = [content_hash(x["pixel_values"]) for x in (picture, other)]
    assert keys[0] != keys[1] and store.put(ids, cache, extra=keys[0])
    assert store.match(ids, extra=keys[1]) == store.match(ids) == (None, 0)
    assert store.match(ids, extra=keys[0])[1] == ids.shape[1] - 1
    with pytest.raises(ValueError, match="pixel_values"):
        generate_with_prefix(model, store, input_ids=ids, max_new_tokens=2, **picture)


# -- cost of a step ----------------------------------------------------------------------------------------------------


@pytest.fixture
def torch_alone():
    """Without the compiled kernel, whose loops are not seen here."""
    before = cpu_decode.wanted
    hf_kvcache.register(compiled=False)
    yield
    hf_kvcache.register(compiled=before)


def step_of(spec, length, batch=1, heads=2, steps=3):
    """Operations of one decode step after so many tokens and steps, and the cache. The least of three: some grow."""
    config = llama_config(1, hidden_size=16 * heads, num_attention_heads=2 * heads, num_key_value_heads=heads)
    model = build(config, "kvcache")
    cache = cache_for(model, spec)
    feed(model, prompt(length, batch), cache)
    feed(model, prompt(steps, batch), cache, 1)
    counts = []
    for _ in range(3):
        with speed.Operators() as counted:
            feed(model, prompt(1, batch), cache)
        counts.append(counted.count)
    return min(counts), cache


@stored_spec
def test_b100_a_step_costs_no_more_operations_later(spec):
    """No list of chunks that grows: neither of what is held, nor of what is done."""
    (early, short), (late, long) = step_of(spec, 100), step_of(spec, 420, steps=20)
    assert early == late
    tensors = [len(list(hf_kvcache.caches.tensors_of(cache.layers))) for cache in (short, long)]
    assert tensors[0] == tensors[1]


@stored_spec
def test_b101_a_step_does_not_loop_over_rows_or_heads(spec, torch_alone):
    assert step_of(spec, 60, batch=2)[0] == step_of(spec, 60, batch=4, heads=6)[0]


# -- evaluation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["int8", "sink(2,6)", LOW, KNORM, f"int8+{BY_MASS[0]}"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_b104_a_fresh_cache_for_every_batch(spec, batch_size):
    """In either order of the requests, and a second time: the same numbers to the last digit."""
    model, caches = llama(attention_of(spec) if "snapkv" not in spec else "kvcache"), []

    def make():
        caches.append(cache_for(model, spec))
        return caches[-1]

    ids = {n: tuple(prompt(n + 4, seed=n)[0].tolist()) for n in (12, 14, 15, 17)}
    requests = [Request(row[:n], row[n:]) for n, row in ids.items()]
    first, again = (score(model, requests, make, batch_size=batch_size) for _ in range(2))
    turned = score(model, requests[::-1], make, batch_size=batch_size)[::-1]
    assert len(caches) >= 3 * 4 / batch_size and len(set(map(id, caches))) == len(caches)
    for a, b, c in zip(first, again, turned, strict=True):
        assert torch.equal(a.logprobs, b.logprobs)
        torch.testing.assert_close(a.logprobs, c.logprobs, atol=1e-5 if batch_size == 1 else 2e-2, rtol=0)


def test_b106_stored_and_peak_bytes_are_two_numbers():
    """Under "sdpa" a step decodes the history: what is stored shrinks, the peak does not, and the record shows both."""
    model, ids = build(llama_config()), prompt(200)
    past = speed.states_of(model, ids[:, :180])
    laps = speed.race(model, ids, 180, ["dynamic", "int8"], "sdpa", past, rounds=3)
    got = {name: speed.metrics(lap, laps["dynamic"], 0, 180) for name, lap in laps.items()}
    assert got["int8"]["nbytes"] < 0.5 * got["dynamic"]["nbytes"]
    assert got["int8"]["peak_bytes"] > got["int8"]["nbytes"] + got["dynamic"]["nbytes"] / 4


@pytest.mark.parametrize("spec", ["int8", "sink(2,10)", LOW, KNORM])
def test_b108_a_ratio_is_one_of_equal_token_counts(spec):
    """Against a full cache that was fed the same tokens, whatever the cache has evicted."""
    model, ids = build(llama_config()), prompt(61)
    outcome = scoring.score(model, ids, [spec], step=4, attn="sdpa")[spec]
    record, caches = quality.metrics(outcome, 60), [DynamicCache(config=model.config), cache_for(model, spec)]
    for cache in caches:
        feed(model, ids[:, :60], cache, 4)
    whole = 60 * 2 * 2 * 2 * 8 * 4
    assert record["baseline_nbytes"] == contenders.stored_bytes(caches[0]) == whole and record["tokens_seen"] == 60
    assert record["bytes_ratio"] == pytest.approx(caches[1].nbytes / whole)


# -- asked for ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["full", "int8", f"int8+{KNORM}", f"int8+{BY_MASS[0]}"])
def test_b114_rows_leave_a_padded_batch_when_they_are_done(spec):
    model, spec = llama("kvcache"), spec
    rows, ids, mask = padded((9, 20, 14))
    cache, first = cache_for(model, spec), None
    out = greedy(model, ids, cache, 4, attention_mask=mask)
    cache.batch_select_indices(torch.tensor([0, 2]))  # the second row has ended
    left = torch.tensor([0, 2])
    mask = torch.cat([mask[left], torch.ones(2, 4, dtype=torch.long)], 1)
    first = greedy(model, out[left], cache, 8, attention_mask=mask)
    for i, row in ((0, rows[0]), (1, rows[2])):
        assert torch.equal(first[i, 20:], greedy(model, row[None], cache_for(model, spec), 12)[0, len(row) :])
