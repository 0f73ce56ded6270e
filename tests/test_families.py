"""Model families at tiny size: a sample of the cells of ``docs/support_caches.md``, and what no cell shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import families
import pytest
import torch
import transformers
import zoo
from families import ATTENTIONS, CACHES, EVERY, case, sample
from models import feed, llama, llama_config, prompt, states
from transformers import DynamicCache, LlamaConfig

import hf_kvcache
from hf_kvcache import KVCache
from hf_kvcache import families as known

ROOT = Path(__file__).resolve().parent.parent


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


table, suite, sweep = map(load_script, ("support_table", "stock_suite", "family_sweep"))
EVERY_FAMILY = sweep.PAGE.read_text()
PAGE_TEXT = table.PAGE.read_text()
PAGE = table.read(PAGE_TEXT)


def needed(family):
    if family not in families.FAMILIES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return case(family)


def test_every_family_and_every_cache_has_its_cell():
    assert set(PAGE) == {(family, name, attention) for family in EVERY for name in CACHES for attention in ATTENTIONS}
    assert {name for _, name, _ in sample()} == set(CACHES)


@pytest.mark.parametrize("family, name, attention", sample(), ids=lambda part: part)
def test_the_page_says_what_the_checks_find(family, name, attention):
    this_version = f"With transformers {transformers.__version__}." in PAGE_TEXT
    if family == "mpt" and not this_version:
        pytest.skip("MPT of 5.17 hides the tokens of a later chunk from each other, with any cache; ours refuses that")
    verdict, (kind, message) = families.check(family, name, attention), PAGE[family, name, attention]
    assert verdict.kind == kind
    if this_version:
        assert verdict.message == message


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", [name for name in EVERY if name not in families.ENCODER_DECODERS])
def test_padded_rows_are_what_dynamic_cache_gives(family, attention):
    this = needed(family)
    mask = torch.ones_like(this.ids)
    mask[1, : 1 if family in families.IMAGES else 5] = 0  # an image begins at the second token
    if family == "mpt":  # its generate feeds the whole prompt again in every step, beside a mask
        with pytest.raises(ValueError, match="already holds"):
            this.generate(KVCache(this.model.config), attention_mask=mask)
        return
    right = this.generate(DynamicCache(config=this.model.config), attention_mask=mask).sequences
    with this.attention(attention):
        assert torch.equal(this.generate(KVCache(this.model.config), attention_mask=mask).sequences, right)


def test_a_cache_hears_which_attention_its_encoder_decoder_was_given_later():
    this = case("bart")
    cache = KVCache.from_spec(this.model.config, "snapkv(budget=8,sinks=2,recent=3)")
    with this.attention("kvcache"):
        this.generate(cache)
    assert cache.stats().tokens_kept == 8


def test_a_decoder_with_a_config_of_its_own_wraps_a_bare_cache():
    settings = dict(families.DECODERS["gpt2"], vocab_size=97)
    encoder = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    decoder = transformers.GPT2Config(**settings, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model, ids = transformers.EncoderDecoderModel(config).eval(), families.prompt(9, 2)
    with torch.no_grad():
        right = model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
        for cache in (KVCache(config), transformers.EncoderDecoderCache(KVCache(config), DynamicCache())):
            out = model(input_ids=ids, decoder_input_ids=ids, past_key_values=cache).logits
            torch.testing.assert_close(out, right)


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_layers_that_leave_out_queries_turn_those_that_are_left(family):
    """``generate`` needs the last token only, and layers without keys of their own leave out the others."""
    this, logits = needed(family), []
    with this.attention("kvcache"), torch.no_grad():
        for keep in (0, 1, 3):
            cache = KVCache.from_spec(this.model.config, "sink(2,6,reposition=on)")
            logits.append(this.model(this.ids, past_key_values=cache, logits_to_keep=keep).logits)
    for some in logits[1:]:
        torch.testing.assert_close(some, logits[0][:, -some.shape[1] :], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", ["snapkv(budget=64)", "knorm(budget=64,pyramid=on)", "sink(2,6,reposition=on)"])
def test_no_one_is_sent_to_an_attention_that_the_model_does_not_take(spec):
    this = case("falcon")
    with this.attention("kvcache"), pytest.raises(ValueError, match="use 'knorm'|leave out") as error:
        this.generate(KVCache.from_spec(this.model.config, spec))
    assert "set_attn_implementation" not in str(error.value)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["int8", "sink", "keydiff", "snapkv", "adaptive"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3n_text", "gemma4_text", "deepseek_v3", "jamba"])
def test_a_padded_row_is_the_row_alone_or_refused(family, name, attention):
    this, ids, pads = needed(family), families.sequence(family), 5
    mask = torch.ones_like(ids)
    mask[1, :pads] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)

    @torch.no_grad()
    def run(rows, start):
        cache, out = KVCache.from_spec(this.model.config, CACHES[name]), []
        for a, b in [(start, 12), *((i, i + 1) for i in range(12, 20))]:
            asked = dict(attention_mask=mask[rows, start:b], position_ids=positions[rows, a:b])
            out.append(this.model(ids[rows, a:b], past_key_values=cache, **asked).logits)
        return torch.cat(out, 1)

    with this.attention(attention):
        try:
            together = run(slice(0, 2), 0)[1, pads:]
        except ValueError as error:
            assert any(word in str(error) for word in ("padding", "set_attn", "as they are", "before attention"))
            return
        torch.testing.assert_close(together, run(slice(1, 2), pads)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", suite.MODES)
def test_the_stock_suite_finds_no_difference(mode):
    assert suite.compare("llama", mode) in ("=", "x" if mode == "contrastive" else "=")


def test_the_stock_suite_sees_a_difference(monkeypatch):
    monkeypatch.setattr(KVCache, "reorder_cache", lambda self, beam_idx: None)
    assert "other tokens" in suite.compare("llama", "beams")
    monkeypatch.setattr(KVCache, "reset", lambda self: None)
    assert len(suite.compare("llama", "reset")) > 1


# -- every family ------------------------------------------------------------------------------------------------------

NEED_MASKS = ("int8(residual=3)", "int4", "sink(2,6)", "knorm(budget=8,sinks=2,recent=3)", "int8+sink(2,6)")
NEED_NOTHING = ("full", "int8", "fp8", "int8(sinks=2)", "int8+cpu")
WERE_WRONG = {  # and what was
    "gpt_neo": ("int8", "int8(residual=3)", "sink(2,6)"),
    "jetmoe": ("int8(residual=3)", "sink(2,6)"),
    "diffllama": ("int8(residual=3)", "sink(2,6)", "knorm(budget=8,sinks=2,recent=3)"),
    "bigbird_pegasus:decoder": ("full", "sink(2,6)"),
    "blip": ("full", "sink(2,6)"),
    "canary": ("knorm(budget=8,sinks=2,recent=3)",),
    "mllama": ("full", "sink(2,6)"),
    "deepseek_v3": ("knorm(budget=8,sinks=2,recent=3)",),
    "t5gemma2": ("full", "knorm(budget=8,sinks=2,recent=3)"),
}


def of_this_version():
    return f"With transformers {transformers.__version__}." in EVERY_FAMILY


def test_the_page_covers_every_family_of_this_transformers():
    if not of_this_version():
        pytest.skip("the page was made with another transformers")
    cells, others = sweep.read(EVERY_FAMILY), sweep.not_tried(EVERY_FAMILY)
    assert {name for name, _, _ in cells} | set(others) == set(zoo.names()) and len(others) < 20
    assert {kind for kind, _ in cells.values()} == {"equal", "within codec error", "refused"}
    assert len(cells) == len({name for name, _, _ in cells}) * len(zoo.SPECS) * len(ATTENTIONS)
    assert {name for name, _, _ in cells if ":" not in name} <= known.tested()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name, spec", [(name, spec) for name, specs in WERE_WRONG.items() for spec in specs])
def test_a_cell_of_the_page_over_all_families_is_what_it_says(name, spec, attention):
    if name not in zoo.names():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    spec = next(long for long in zoo.SPECS if long.startswith(spec))
    verdict = zoo.check(name, spec, attention)
    kind, message = sweep.read(EVERY_FAMILY)[name, spec, attention]
    assert verdict.kind == kind
    assert verdict.message == message or not of_this_version()


def test_the_sweep_sees_a_wrong_mask_a_wrong_token_and_a_raw_error(monkeypatch):
    monkeypatch.setattr(known, "OWN_WAYS", {})
    zoo.check.cache_clear()
    assert zoo.check("gpt_neo", "int8(residual=3)", "stock").kind == "wrong"
    assert zoo.check("diffllama", "int8(residual=3)", "stock").kind == "raw error"
    assert zoo.check("diffllama", zoo.SPECS[-1], "stock").kind == "wrong"
    zoo.check.cache_clear()


def test_the_page_is_read_as_it_was_written():
    verdicts = [["equal", ""], ["within codec error", "a remark"], ["refused", "no"], ["equal", ""], ["equal", ""]]
    cells = {
        f"{a} {spec}": verdict
        for a in ATTENTIONS
        for spec, verdict in zip(zoo.SPECS, [*verdicts, ["refused", a]], strict=True)
    }
    found = {
        "one": {"unbuilt": "", "cells": cells},
        "two": {"unbuilt": "", "cells": {cell: ["equal", ""] for cell in cells}},
        "three": {"unbuilt": "why", "cells": {}},
    }
    page = sweep.render(found)
    read = sweep.read(page)
    expected = {(n, s, a): found[n]["cells"][f"{a} {s}"] for n in ("one", "two") for s in zoo.SPECS for a in ATTENTIONS}
    assert read == {cell: tuple(verdict) for cell, verdict in expected.items()} and "| two | both |" in page
    assert sweep.not_tried(page) == {"three": "why"}


class StrangeConfig(LlamaConfig):
    model_type = "strange"


def strange():
    return StrangeConfig(**llama_config().to_diff_dict() | {"model_type": "strange"})


@pytest.fixture
def trusted(monkeypatch):
    monkeypatch.setattr(known, "_trusted", set())


@pytest.mark.parametrize("spec", NEED_NOTHING)
def test_a_family_that_nobody_tried_has_caches_that_need_no_mask(spec, trusted):
    assert KVCache.from_spec(strange(), spec).spec


@pytest.mark.parametrize("spec", NEED_MASKS)
def test_a_family_that_nobody_tried_is_refused_the_others_until_it_is_trusted(spec, trusted):
    with pytest.raises(ValueError, match=r"never tried with model_type 'strange'.*trust\('strange'\)"):
        KVCache.from_spec(strange(), spec)
    hf_kvcache.trust("strange")
    assert KVCache.from_spec(strange(), spec).spec


@pytest.mark.parametrize("names, words", [(("",), "model_type"), ((None,), "model_type"), (("gpt_neo",), "slots")])
def test_trust_takes_names_of_families_that_may_be_right(names, words, trusted):
    with pytest.raises(ValueError, match=words):
        hf_kvcache.trust("other", *names)
    assert not known._trusted


@pytest.mark.parametrize("spec", NEED_MASKS)
def test_mllama_is_refused_by_name_what_its_image_layers_cannot_have(spec):
    for config in (transformers.MllamaConfig(), transformers.MllamaConfig().text_config):
        with pytest.raises(ValueError, match="Mllama.*keys of its images"):
            KVCache.from_spec(config, spec)
        assert KVCache.from_spec(config, "int8").spec == "int8"


def test_cross_attention_does_not_land_in_a_bare_cache():
    this = zoo.family("blip")
    with pytest.raises(ValueError, match="EncoderDecoderCache"), torch.no_grad():
        this.model(**zoo.INPUTS["blip"](this, 0, 5), input_ids=this.ids[:, :5], past_key_values=KVCache(this.config))


@pytest.mark.parametrize("spec", ["knorm(budget=10,sinks=2,recent=4)", "keydiff(budget=10,sinks=2,recent=4)"])
@pytest.mark.parametrize("sizes", [(20,), (7, 7, 6), (1,) * 20])
def test_latents_are_kept_under_our_attention_as_under_stock(spec, sizes):
    """The model takes apart what it is handed: no attention of ours follows, and whoever asks must be up to date."""
    this, ids, found = case("deepseek_v3"), prompt(20, 2, 90), []
    for attention in ATTENTIONS:
        with this.attention(attention), torch.no_grad():
            cache = KVCache.from_spec(this.model.config, spec)
            logits = [this.model(piece, past_key_values=cache).logits for piece in ids.split(sizes, 1)]
        stats = cache.stats()
        assert (stats.tokens_seen, stats.tokens_kept, stats.tokens_evicted) == (20, 10, 10)
        assert (cache.can_rollback(9), cache.exact_rollback()) == (False, 0)
        with pytest.raises(ValueError, match="has evicted 10 tokens"):
            cache.rollback(9)
        assert all(layer.positions.shape[-1] == 10 for layer in cache.layers)
        found.append(torch.cat(logits, 1))
    torch.testing.assert_close(found[1], found[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("columns", [16, 20])
def test_latents_take_no_mask_that_is_more_than_causal_once_tokens_are_evicted(attention, columns):
    """The model applies it itself, to slots that are no tokens; a causal one says what is right, whoever made it."""
    this, ids = case("deepseek_v3"), prompt(20, 2, 90)
    mask = torch.ones(2, 1, 6, columns).tril(columns - 6).bool()
    with this.attention(attention), torch.no_grad():
        cache = KVCache.from_spec(this.model.config, "knorm(budget=10,sinks=2,recent=4)")
        this.model(ids[:, :14], past_key_values=cache)
        right = this.model(ids[:, 14:], past_key_values=cache.fork()).logits
        if columns == 16:
            out = this.model(ids[:, 14:], past_key_values=cache.fork(), attention_mask=mask).logits
            torch.testing.assert_close(out, right, atol=2e-4, rtol=1e-4)
        mask[:, :, 2, 3] = False
        with pytest.raises(ValueError, match="more than causal"):
            this.model(ids[:, 14:], past_key_values=cache, attention_mask=mask)


def test_latents_are_rolled_back_under_our_attention_while_nothing_is_evicted():
    this, ids = case("deepseek_v3"), prompt(12, 2, 90)
    with this.attention("kvcache"):
        cache, other = (KVCache.from_spec(this.model.config, "knorm(budget=10,sinks=2,recent=4)") for _ in range(2))
        feed(this.model, ids[:, :9], cache)
        assert cache.can_rollback(3)
        cache.rollback(3)
        logits = feed(this.model, ids[:, 6:], cache)
        torch.testing.assert_close(logits, feed(this.model, ids, other, 6)[:, 6:], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["knorm", "keydiff", "random"])
def test_given_states_are_evicted_when_they_come(name):
    hf_kvcache.register()
    model = llama("kvcache")
    cache = KVCache.from_states(model.config, [states(20)] * 2, f"{name}(budget=8,sinks=2,recent=3)")
    assert cache.stats().tokens_kept == 8 and not cache.can_rollback(5)
    with pytest.raises(ValueError, match="has evicted 12 tokens"):
        cache.rollback(5)
