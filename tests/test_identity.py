"""Whose states are these? Those of the weights that made them: nobody else is served, and nobody is refused his own."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from models import build, feed, greedy, llama, llama_config, prompt
from test_caches import mistral_config, qwen3_next_config
from test_reports import qwen2_vl
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from hf_kvcache import KVCache, PrefixStore, generate_with_prefix, identity

PLENTY = 1 << 30


class Lora(nn.Module):
    """An adapter made by hand; ``enabled`` and ``scaling`` are plain attributes, as in the usual libraries."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base, self.enabled, self.scaling = base, True, {"default": 2.0}
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.randn(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delta = self.scaling["default"] * x @ self.lora_A.T @ self.lora_B.T
        return self.base(x) + delta if self.enabled else self.base(x)

    def merge(self) -> None:
        """By ``.data``, which no version counter notices."""
        self.base.weight.data += self.scaling["default"] * self.lora_B.data @ self.lora_A.data
        self.enabled = False


def adapted(model):
    """The same model with an adapter in the first layer; the adapter."""
    attention = model.model.layers[0].self_attn
    attention.q_proj = Lora(attention.q_proj)
    return attention.q_proj


def train(model):
    """One step on one batch."""
    step = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = prompt(12, 2, seed=4)
    with torch.enable_grad():
        model(ids, labels=ids).loss.backward()
    step.step()


def copy_data(model):
    """As weights are synchronised: neither an address nor a version counter changes."""
    for p in model.parameters():
        p.data.copy_(p.data * 1.01)


def merge(model):
    adapter = model.model.layers[0].self_attn.q_proj
    adapter.merge()


def off(model):
    model.model.layers[0].self_attn.q_proj.enabled = False


def scale(model):
    model.model.layers[0].self_attn.q_proj.scaling["default"] = 3.0


def add(model):
    adapted(model)


CHANGES = [train, copy_data, merge, off, scale, add]


def changeable(change):
    """A model of our own, with an adapter where the change is about one."""
    model = build(llama_config())
    if change in (merge, off, scale):
        adapted(model)
    return model


# -- what identity is --------------------------------------------------------------------------------------------------


def test_every_weight_below_the_head_counts():
    """One after the other, each by less than a training step changes it."""
    model = build(llama_config())
    seen = {identity.of(model)}
    for name, p in model.named_parameters():
        before = p.detach().clone()
        p.data += 1e-3
        assert (identity.of(model) in seen) == name.startswith("lm_head"), name
        seen.add(identity.of(model))
        p.data.copy_(before)
        assert identity.of(model) in seen
    assert len(seen) == 2 + 9 * 2 + 1  # as it was; embedding and last norm; per layer seven projections and two norms


def test_saved_buffers_count_and_tables_do_not():
    model = build(llama_config())
    before = identity.of(model)
    model.model.rotary_emb.inv_freq.mul_(2)  # not saved: made from the config
    assert identity.of(model) == before
    model.model.layers[1].register_buffer("codes", torch.arange(6, dtype=torch.int8))
    with_codes = identity.of(model)
    model.model.layers[1].codes[3] += 1
    assert len({before, with_codes, identity.of(model)}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reload_another_folder_and_a_copy_keep_it(dtype, tmp_path):
    model = build(llama_config(), dtype=dtype)
    for folder in ("here", "there"):
        model.save_pretrained(tmp_path / folder)
    here, there = (AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype) for name in ("here", "there"))
    bare = AutoModel.from_pretrained(tmp_path / "here", dtype=dtype, attn_implementation="eager")
    compiled = torch.compile(model)
    same = [model, here, there, bare, copy.deepcopy(model), compiled, nn.Sequential(here), here.config, there.config]
    assert len({identity.of(source) for source in same}) == 1
    assert identity.of(here.to(torch.float16)) != identity.of(there)  # its states would be of another dtype


def test_layouts_and_kinds_of_tensors():
    """Transposed, one number, none, complex, 8 bits: the same values are the same, whatever their strides."""
    model, values = nn.Module(), torch.randn(700, 3)
    model.config = llama_config()
    for name, t in {
        "plain": values,
        "scalar": torch.tensor(2.0),
        "none": torch.empty(0, 4),
        "complex": torch.randn(5, dtype=torch.complex64),
        "fp8": torch.randn(40).to(torch.float8_e4m3fn),
    }.items():
        model.register_buffer(name, t)
    before = identity.of(model)
    model.plain = values.T.contiguous().T
    assert not model.plain.is_contiguous() and identity.of(model) == before
    for name in ("plain", "scalar", "complex", "fp8"):
        old = getattr(model, name)
        setattr(model, name, (old.float() * 2).to(old.dtype) if name == "fp8" else old * 2)
        assert identity.of(model) != before, name
        setattr(model, name, old)
    assert identity.of(model) == before


def test_weights_that_are_elsewhere_are_their_model_s_own():
    first, second = (build(llama_config()).to("meta") for _ in range(2))
    assert identity.of(first) == identity.of(first) != identity.of(second)


def test_precision_of_the_computation_counts():
    model = llama()
    with torch.autocast("cpu", torch.bfloat16):
        under = identity.of(model)
    assert under != identity.of(model)


def test_counters_are_no_switches():
    """What modules of others count while they run does not change whose states they are; switches and scales do."""
    model = build(llama_config())
    adapter = adapted(model)
    adapter.calls, adapter.longest = 0, None
    before = identity.of(model)
    adapter.calls, adapter.longest, adapter.training = 5, 77, True
    assert identity.of(model) == before
    adapter.active = ["a", "b"]
    assert identity.of(model) != before


# -- the store ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("by", ["model", "config", "nothing"])
def test_changed_weights_are_not_served_old_states(change, by):
    model, ids, store = changeable(change), prompt(40), PrefixStore(PLENTY)
    cache = KVCache(model.config)
    feed(model, ids, cache)
    assert store.put(ids, cache)
    source = {"model": (model,), "config": (model.config,), "nothing": ()}[by]
    assert store.match(ids, *source)[1] == 39
    change(model)
    assert store.match(ids, *source) == (None, 0)
    cache = KVCache(model.config)
    feed(model, ids, cache)
    assert store.put(ids, cache) and store.match(ids, *source)[1] == 39


@pytest.mark.parametrize("change", CHANGES)
def test_generate_with_prefix_after_a_change(change):
    model, ids, store = changeable(change), prompt(40), PrefixStore(PLENTY)
    for reused in (0, 39, 0, 39):
        before = store.stats().tokens_reused
        out = generate_with_prefix(model, store, input_ids=ids, max_new_tokens=6, do_sample=False)
        assert store.stats().tokens_reused - before == reused
        assert torch.equal(out, greedy(model, ids, KVCache(model.config), 6))
        if reused and change is not None:
            change(model)
            change = None


def test_switching_back_finds_the_old_states():
    model, ids, store = build(llama_config()), prompt(40), PrefixStore(PLENTY)
    adapter = adapted(model)
    for enabled, reused in ((True, 0), (False, 0), (True, 39), (False, 39)):
        adapter.enabled = enabled
        assert store.match(ids, model)[1] == reused
        if not reused:
            cache = KVCache(model.config)
            feed(model, ids, cache)
            store.put(ids, cache, model=model)


@pytest.mark.parametrize("change", [train, off, scale])
def test_a_cache_of_weights_that_are_gone_is_not_kept(change, tmp_path):
    """Fed, then the weights change, then put: they would be stored as states of the new ones."""
    model, ids, store = changeable(change), prompt(40), PrefixStore(PLENTY)
    assert store.match(ids, model.config) == (None, 0)  # from here on the model is known
    cache = KVCache(model.config)
    feed(model, ids, cache)
    change(model)
    for keep in (lambda: store.put(ids, cache), lambda: cache.fork().save(tmp_path / "cache")):
        with pytest.raises(ValueError, match="changed after this cache was fed: keep it before"):
            keep()
    cache.reset()
    feed(model, ids, cache)
    assert store.put(ids, cache)


@pytest.mark.parametrize("config", [llama_config, mistral_config, qwen3_next_config])
def test_another_object_with_the_same_weights_is_served(config):
    """Also after the first one was trained: what is in the store is still the second one's."""
    first, second, ids, store = build(config()), build(config()), prompt(20), PrefixStore(PLENTY)
    cache = KVCache(first.config)
    feed(first, ids, cache)
    store.put(ids, cache)
    train(first)
    cache, matched = store.match(ids, second, leave=0)
    assert matched == 20 and cache.config is second.config and store.match(ids, first, leave=0) == (None, 0)
    direct = KVCache(second.config)
    feed(second, ids, direct)
    new = prompt(5, seed=3)
    assert torch.equal(feed(second, new, cache), feed(second, new, direct))
    assert store.put(torch.cat([ids, new], 1), cache)


def test_two_dtypes_in_turn_reuse_their_own(tmp_path):
    """What is counted as reused was reused."""
    ids, store = prompt(40), PrefixStore(PLENTY, tmp_path / "store")
    models = [build(llama_config(), dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for model, reused in zip(models * 2, (0, 0, 39, 78), strict=True):
        out = generate_with_prefix(model, store, input_ids=ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(out, greedy(model, ids, KVCache(model.config), 4))
        assert store.stats().tokens_reused == reused


def test_a_cache_on_another_device_is_neither_served_nor_counted():
    model, ids, store = build(llama_config()), prompt(40), PrefixStore(PLENTY)
    cache = KVCache(model.config)
    feed(model, ids, cache)
    store.put(ids, cache)
    for layer in next(iter(store._memory)).cache.layers:
        layer.device = torch.device("meta")
    assert store.match(ids, model) == (None, 0) and store.stats().tokens_reused == 0


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build_one", [lambda seed: build(llama_config(), seed=seed), lambda seed: vision(seed)])
def test_a_file_belongs_to_weights(build_one, tmp_path):
    """Vision models have no name in the config that their cache reads."""
    model, other, ids = build_one(0), build_one(1), prompt(20, vocab=80)
    cache = KVCache(model.config, "int8")
    feed(model, ids, cache)
    cache.save(tmp_path / "cache")
    for source in (other, other.config):
        with pytest.raises(ValueError, match="made by other weights than those of the model with this"):
            KVCache.load(tmp_path / "cache", source)
    for source in (model, model.config, copy.deepcopy(model)):
        assert KVCache.load(tmp_path / "cache", source).get_seq_length() == 20
    train(model)
    with pytest.raises(ValueError, match="other weights"):
        KVCache.load(tmp_path / "cache", model.config)


def vision(seed):
    model = qwen2_vl()
    torch.manual_seed(seed)
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.1
    return model


def test_prefixes_of_another_vision_model_are_not_served():
    first, second, ids, store = vision(0), vision(1), prompt(20, vocab=80), PrefixStore(PLENTY)
    cache = KVCache(first.config)
    feed(first, ids, cache)
    store.put(ids, cache)
    assert store.match(ids, second.config) == store.match(ids, second) == (None, 0)
    assert store.match(ids, first.config)[1] == store.match(ids)[1] == 19
    first.model.visual.patch_embed.proj.weight.data += 0.1  # what it sees in pictures is in the states, too
    assert store.match(ids, first) == (None, 0)


def test_a_moved_folder_is_the_same_model(tmp_path):
    model, ids = build(llama_config()), prompt(20)
    model.save_pretrained(tmp_path / "here")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "here")
    cache = KVCache(model.config)
    feed(model, ids, cache)
    cache.save(tmp_path / "cache")
    (tmp_path / "here").rename(tmp_path / "there")
    moved = AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    assert moved.config._name_or_path != model.config._name_or_path
    assert KVCache.load(tmp_path / "cache", moved.config).get_seq_length() == 20


def test_known_and_unknown_weights_are_not_mixed(tmp_path):
    model, ids = build(llama_config()), prompt(20)
    cache = KVCache(model.config)
    feed(model, ids, cache)
    cache.save(tmp_path / "known")
    with pytest.raises(ValueError, match="no model here holds this LlamaConfig .unnamed.: pass the model itself"):
        KVCache.load(tmp_path / "known", llama_config())
    states = [(keys, values) for keys, values, _ in cache]
    alone = KVCache.from_states(llama_config(), states)
    alone.save(tmp_path / "unknown")
    with pytest.raises(ValueError, match="does not say whose weights made it.*model=model"):
        KVCache.load(tmp_path / "unknown", model)
    alone.save(tmp_path / "unknown", model=model)
    assert KVCache.load(tmp_path / "unknown", model).get_seq_length() == 20
    with pytest.raises(ValueError, match="model=LlamaForCausalLM: this cache was made for another config"):
        alone.save(tmp_path / "other", model=build(llama_config(vocab_size=98)))


# -- the model of a config ---------------------------------------------------------------------------------------------


def test_models_that_share_a_config_have_to_be_named(tmp_path):
    config, ids, store = llama_config(), prompt(20), PrefixStore(PLENTY)
    first = build(config)
    cache = KVCache(config)
    feed(first, ids, cache)
    cache.save(tmp_path / "cache")
    store.put(ids, cache)
    assert store.match(ids, config)[1] == 19
    second = build(config, seed=1)  # only now, when the first is known
    assert first.config is second.config
    for call in (
        lambda: store.put(ids, cache),
        lambda: store.match(ids, config),
        lambda: cache.save(tmp_path / "cache"),
        lambda: KVCache.load(tmp_path / "cache", second.config),
    ):
        with pytest.raises(
            ValueError, match="2 models of different weights share this LlamaConfig object: pass the model"
        ):
            call()
    assert store.put(ids, cache, model=first)
    assert store.match(ids, first)[1] == 19 and store.match(ids, second) == (None, 0)
    cache.save(tmp_path / "cache", model=first)
    with pytest.raises(ValueError, match="other weights"):
        KVCache.load(tmp_path / "cache", second)
    second.load_state_dict(first.state_dict())
    assert store.match(ids, config)[1] == 19  # equal weights need no name


def test_the_search_is_done_once_and_holds_nothing():
    model = build(llama_config())
    config = model.config
    assert identity.find(config) == [model.model] and identity.known(config) is model.model
    adapted(model)  # a module on this config changed: looked for again, in case it was a new model
    assert identity.known(config) is None and identity.find(config) == [model.model]
    del model
    gc.collect()
    assert identity.known(config) is None and identity.find(config) == []


def test_models_that_nobody_has_any_more_do_not_count():
    config = llama_config()
    for seed in range(3):
        model = build(config, seed=seed)
        model.itself = [model]  # only the collector can free it
        assert identity.of(config) == identity.of(model)


@pytest.mark.parametrize("shape", [(3,), (255,), (256,), (700, 3), (1024, 1024), (4099, 64)])
def test_few_values_of_every_tensor_are_read(shape):
    """All of a small one, of a large one at most 256 or so, in as many columns as there are."""
    t = torch.arange(torch.Size(shape).numel()).view(shape)
    sample = identity._sample(t)
    assert min(t.numel(), 200) <= len(sample) <= 512 and len(set(sample.tolist())) == len(sample)
    assert len(set((sample % shape[-1]).tolist())) >= min(shape[-1], 64)
