"""Model families at tiny size: a sample of the cells of ``docs/support.md``, and what no cell shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import families
import pytest
import torch
import transformers
from families import ATTENTIONS, CACHES, EVERY, case, sample
from transformers import DynamicCache

from hf_kvcache import KVCache

ROOT = Path(__file__).resolve().parent.parent


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


table, suite = load_script("support_table"), load_script("stock_suite")
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
    verdict, (kind, message) = families.check(family, name, attention), PAGE[family, name, attention]
    assert verdict.kind == kind
    if f"With transformers {transformers.__version__}." in PAGE_TEXT:
        assert verdict.message == message


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", [name for name in EVERY if name not in families.ENCODER_DECODERS])
def test_padded_rows_are_what_dynamic_cache_gives(family, attention):
    this = needed(family)
    mask = torch.ones_like(this.ids)
    mask[1, : 1 if family in families.IMAGES else 5] = 0  # an image begins at the second token
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
