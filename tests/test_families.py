"""Model families at tiny size with random weights: the same tokens as a stock cache, with stock attention and ours.

A family is left out where a tiny model takes long to build; that says nothing about whether it works.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from models import build, prompt
from transformers import AutoConfig, DynamicCache

from hf_kvcache import KVCache

BASE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.4,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
MOE = dict(num_local_experts=4, num_experts_per_tok=2)
HEAD = dict(head_dim=8)
HYBRID = ["sliding_attention", "full_attention"]

# Settings beside BASE (None: not a setting of this family); "type:variant" names a second model of one type.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(sliding_window=6),
    "qwen2": {},
    "qwen3": HEAD,
    "gemma2": dict(**HEAD, sliding_window=6, layer_types=HYBRID, query_pre_attn_scalar=8),
    "gemma3_text": dict(**HEAD, sliding_window=6, layer_types=HYBRID),
    "phi3": {},
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "gpt_neox": {},
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32, init_std=0.4),
    "bloom": dict(n_layer=2, n_head=4),
    "falcon": dict(multi_query=True, alibi=False),
    "falcon:alibi": dict(multi_query=False, new_decoder_architecture=False, alibi=True),
    "cohere2": dict(sliding_window=6, layer_types=HYBRID),
    "olmo2": {},
    "glm4": HEAD,
    "smollm3": {},
    "granite": {},
    "starcoder2": {},
    "mixtral": MOE,
    "deepseek_v3": dict(
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "gpt_oss": dict(**HEAD, **MOE, sliding_window=6, layer_types=HYBRID),
    "llama4_text": dict(
        **HEAD, num_local_experts=2, attention_chunk_size=8, intermediate_size_mlp=64, interleave_moe_layer_step=2
    ),
    "qwen3_next": dict(
        **HEAD,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "jamba": dict(
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_expand=2,
        mamba_dt_rank=4,
    ),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def model_of(family: str) -> Any:
    """A model and the stock attention it runs."""
    settings = {**BASE, **FAMILIES[family]}
    config = AutoConfig.for_model(family.split(":")[0], **settings)
    if family == "gemma2":  # before 5.24 sdpa leaves its softcap out
        return build(config, "eager"), "eager"
    try:
        return build(config, "sdpa"), "sdpa"
    except ValueError:
        return build(config, "eager"), "eager"


def tokens(model: Any, cache: Any, ids: torch.Tensor, **options: Any) -> Any:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        do_sample=False,
        max_new_tokens=8,
        min_new_tokens=8,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


@functools.cache
def expected(family: str) -> Any:
    model, attention = model_of(family)
    model.set_attn_implementation(attention)
    return tokens(model, DynamicCache(config=model.config), prompt(12, 2))


def cache_of(model: Any, spec: str) -> KVCache:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "changes nothing": all layers have a native window
        return KVCache.from_spec(model.config, spec)


@every_family
@pytest.mark.parametrize("ours", [False, True], ids=["stock", "kvcache"])
def test_full_gives_the_tokens_of_dynamic_cache(family, ours):
    right = expected(family)
    model, attention = model_of(family)
    model.set_attn_implementation("kvcache" if ours else attention)
    out = tokens(model, cache_of(model, "full"), prompt(12, 2))
    assert torch.equal(out.sequences, right.sequences)
    for mine, theirs in zip(out.logits, right.logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


@every_family
@pytest.mark.parametrize("ours", [False, True], ids=["stock", "kvcache"])
def test_padded_rows_are_what_dynamic_cache_gives(family, ours):
    model, attention = model_of(family)
    ids = prompt(12, 2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    settings = dict(do_sample=False, max_new_tokens=5, min_new_tokens=5, attention_mask=mask)
    model.set_attn_implementation(attention)
    right = model.generate(ids, past_key_values=DynamicCache(config=model.config), **settings)
    model.set_attn_implementation("kvcache" if ours else attention)
    assert torch.equal(model.generate(ids, past_key_values=cache_of(model, "full"), **settings), right)


@every_family
@pytest.mark.parametrize("ours", [False, True], ids=["stock", "kvcache"])
def test_int8_is_near_or_refused(family, ours):
    right = expected(family)
    model, attention = model_of(family)
    model.set_attn_implementation("kvcache" if ours else attention)
    try:
        cache = cache_of(model, "int8")
        out = tokens(model, cache, prompt(12, 2))
    except ValueError as error:
        assert any(word in str(error) for word in (type(model.config).__name__, "layer"))
        return
    # The prompt's last logits and the first step's: later ones may follow another token.
    first, stock = out.logits[0], right.logits[0]
    assert (first - stock).abs().mean() <= 0.05 * stock.abs().mean()
    assert cache.get_seq_length() == 19
    if cache.stats().tokens_quantized:
        assert not torch.equal(out.logits[1], right.logits[1])


@every_family
def test_a_sink_window_is_the_same_in_every_way(family):
    """Two sinks and a window of six over twenty tokens: in chunks, one by one, with each attention; or refused."""
    model, stock = model_of(family)
    ids, logits = prompt(20, 2), {}
    chunk = 20 if family == "jamba" else 7  # its recurrent layers cannot go on in chunks, with any cache
    for name, size in [(stock, 1), (stock, chunk), ("eager", chunk), ("kvcache", 1), ("kvcache", chunk)]:
        try:
            model.set_attn_implementation(name)
            cache = cache_of(model, "sink(2,6)")
            with torch.no_grad():
                pieces = [model(c, past_key_values=cache).logits for c in ids.split(size, 1)]
            logits[name, size] = torch.cat(pieces, 1)
        except ValueError as error:
            assert any(word in str(error) for word in ("kvcache", "ALiBi", "retention 'all'"))
    for out in logits.values():
        assert out.isfinite().all()
        torch.testing.assert_close(out, next(iter(logits.values())), atol=2e-3, rtol=1e-3)
