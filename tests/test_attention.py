"""Attention over stored form: against its definition, through models, and what it may not do."""

from __future__ import annotations

import pytest
import torch
from families import case
from models import build, feed, llama, llama_config, prompt, states
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

import hf_kvcache
from hf_kvcache import KVCache, reference
from hf_kvcache.codecs import CODECS
from hf_kvcache.part import Part
from hf_kvcache.reference import attend_reference, attend_torch
from hf_kvcache.store import Slab
from hf_kvcache.view import Stored

every_codec = pytest.mark.parametrize("name", list(CODECS))


def slab(codec, x):
    """``x`` in a slab whose spare rows are poisoned: NaN, or the code that is furthest from anything."""
    out = Slab()
    n = x.shape[2]
    out.append(codec.encode(x[:, :, : n - n // 3]))
    if n // 3:
        out.append(codec.encode(x[:, :, n - n // 3 :]))
    if out.capacity == n:
        out._reserve(n + 1, codec.encode(x[:, :, :1]))
    assert out.capacity > n
    for t in out.state:
        spare = t[:, :, n:]
        spare.fill_(float("nan")) if t.dtype.is_floating_point else spare.view(torch.uint8).fill_(0x7F)
    return out


def part(name, n, batch=1, heads=2, width=32, value_width=None, dtype=torch.float32, values=None):
    key_codec, value_codec = CODECS[name], CODECS[values or name]
    keys = torch.randn(batch, heads, n, width).to(dtype)
    vals = torch.randn(batch, heads, n, value_width or width).to(dtype)
    return Part(key_codec, slab(key_codec, keys).view(), value_codec, slab(value_codec, vals).view())


def query_for(parts, groups=1, queries=1, dtype=torch.float32):
    batch, heads, _, width = parts[0].keys[0].shape
    return torch.randn(batch, heads * groups, queries, width).to(dtype)


def compare(query, parts, scaling=None, tolerance=2e-5, **options):
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    saved = query.clone(), {k: v.clone() for k, v in options.items() if isinstance(v, torch.Tensor)}
    out = attend_torch(query, parts, scaling, **options)
    expected = attend_reference(query, parts, scaling, **options)
    assert out.shape == expected.shape == (*query.shape[:3], parts[0].values[0].shape[-1])
    assert out.dtype == query.dtype and out.isfinite().all()
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=1e-5)
    assert torch.equal(query, saved[0])
    assert all(torch.equal(options[k], v) for k, v in saved[1].items())
    return out


@pytest.mark.parametrize("sinks", [False, True], ids=["", "s_aux"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_gradients_are_those_of_the_definition(sinks, softcap, mask):
    """Of queries, keys, values and learned sinks, where each scores step could be done in place."""
    torch.manual_seed(0)
    keys, values, query = (torch.randn(2, heads, n, 8) for heads, n in ((2, 5), (2, 5), (4, 3)))
    aux = torch.randn(4) if sinks else None
    seen = torch.ones(3, 5, dtype=torch.bool).tril(2)[None, None]
    given = {None: None, "bool": seen, "float": torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))}[mask]
    weight, found = torch.randn(2, 4, 3, 8), []
    for run in (attend_torch, attend_reference):
        q, k, v, *a = (t.clone().requires_grad_() for t in (query, keys, values, aux) if t is not None)
        plain = CODECS["full"]
        run(q, [Part(plain, plain.encode(k), plain, plain.encode(v))], 0.4, given, softcap, *a).mul(
            weight
        ).sum().backward()
        found.append([t.grad for t in (q, k, v, *a)])
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-4)


def test_the_reference_is_sdpa():
    """The definition itself, against torch on decoded tensors."""
    p = part("full", 50, batch=2)
    query, mask = query_for([p], 3, 5), torch.rand(2, 6, 5, 50) > 0.3
    out = attend_reference(query, [p], 0.3, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, p.keys.values, p.values.values, mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@every_codec
@pytest.mark.parametrize("n", [1, 63, 129, 1000, 2500])
@pytest.mark.parametrize("groups, queries, batch", [(1, 1, 1), (3, 1, 3), (4, 5, 1), (3, 5, 3)])
def test_odd_lengths(name, n, groups, queries, batch):
    parts = [part(name, n, batch)]
    compare(query_for(parts, groups, queries), parts)


@every_codec
@pytest.mark.parametrize("width, value_width", [(32, 32), (64, 64), (80, 80), (128, 128), (96, 16), (24, 64)])
def test_head_sizes(name, width, value_width):
    parts = [part(name, 129, 2, 2, width, value_width)]
    compare(query_for(parts, 3, 2), parts, scaling=0.2)


@every_codec
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_queries(name, dtype):
    """Computed in float32 and rounded once."""
    parts = [part(name, 200, 2, dtype=dtype)]
    query = query_for(parts, 3, 4, dtype)
    out = compare(query, parts, tolerance=2**-7 if dtype == torch.bfloat16 else 2**-10)
    wide = attend_reference(query.float(), parts, query.shape[-1] ** -0.5)
    assert (out.float() - wide).abs().max() <= torch.finfo(dtype).eps * wide.abs().max()


@every_codec
@pytest.mark.parametrize("other", list(CODECS))
def test_keys_and_values_in_different_codecs_and_two_parts(name, other):
    parts = [part("full", 4, 2, 2, 64), part(name, 300, 2, 2, 64, values=other)]
    compare(query_for(parts, 3, 3), parts)
    compare(query_for(parts, 3, 3), parts[::-1], mask=torch.rand(1, 1, 3, 304) > 0.5)


@pytest.mark.parametrize("name", ["full", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (3, 6), (1, 6)])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("kind", ["bool", "float", "-inf", "half"])
def test_masks(name, shape, queries, kind):
    parts = [part(name, 129, 3)]
    mask = torch.rand(*shape, queries, 129) > 0.5
    if kind == "float":
        mask = torch.randn(*shape, queries, 129)
    elif kind != "bool":
        mask = torch.zeros(*shape, queries, 129).masked_fill(~mask, float("-inf"))
        mask = mask.half() if kind == "half" else mask
    compare(query_for(parts, 3, queries), parts, mask=mask)


@pytest.mark.parametrize("name", ["full", "int8", "fp8_e5m2"])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_fully_hidden_rows_give_zeros(name, additive, sinks):
    parts = [part(name, 70, 2)]
    mask = torch.rand(2, 1, 4, 70) > 0.5
    mask[0, :, 1] = mask[1, :, 3] = False
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    aux = torch.randn(6) if sinks else None
    out = compare(query_for(parts, 3, 4), parts, mask=mask, s_aux=aux)
    assert (out[0, :, 1] == 0).all() and (out[1, :, 3] == 0).all() and (out[0, :, 0] != 0).any()


@pytest.mark.parametrize("name", ["full", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("softcap, sinks", [(5.0, False), (None, True), (5.0, True)])
@pytest.mark.parametrize("queries", [1, 5])
def test_softcap_and_learned_sinks(name, masked, softcap, sinks, queries):
    parts = [part("full", 4), part(name, 129)]
    query = query_for(parts, 3, queries) * 6
    mask = (torch.rand(1, 1, queries, 133) > 0.5) if masked else None
    aux = torch.randn(6) + 22 if sinks else None  # comparable to the largest scores
    out = compare(query, parts, mask=mask, softcap=softcap, s_aux=aux)
    without = attend_torch(query, parts, query.shape[-1] ** -0.5, mask)
    assert (out - without).abs().max() > 0.05  # they do something


@every_codec
@pytest.mark.parametrize("block, rows", [(64, 1), (3000, 1 << 22), (1 << 20, 500), (1000, 3000)])
@pytest.mark.parametrize("masked", [False, True])
def test_small_workspaces(monkeypatch, name, block, rows, masked):
    """Many blocks of codes, few rows of scores at a time: the same result."""
    parts = [part("full", 3, 2, dtype=torch.bfloat16), part(name, 130, 2, dtype=torch.bfloat16)]
    query = query_for(parts, 3, 5)
    mask = (torch.rand(2, 6, 5, 133) > 0.5) if masked else None
    whole = compare(query, parts, mask=mask, softcap=20.0, s_aux=torch.ones(6))
    monkeypatch.setattr(reference, "BLOCK", block)
    monkeypatch.setattr(reference, "ROWS", rows)
    torch.testing.assert_close(
        compare(query, parts, mask=mask, softcap=20.0, s_aux=torch.ones(6)), whole, atol=1e-5, rtol=1e-5
    )
    compare(query, parts, mask=torch.rand(1, 1, 1, 133) > 0.5)  # one mask row for all queries


@every_codec
def test_large_scores_do_not_overflow(name):
    parts = [part(name, 40)]
    parts[0].keys[0].view(torch.uint8)  # any storage
    compare(query_for(parts, 3, 2) * 1e4, parts, scaling=1.0, tolerance=1e-3)


@every_codec
def test_order_of_tokens_does_not_matter(name):
    codec, n = CODECS[name], 129
    keys, values = torch.randn(1, 2, n, 32), torch.randn(1, 2, n, 32)
    order = torch.randperm(n)
    a = Part(codec, codec.encode(keys), codec, codec.encode(values))
    b = Part(codec, codec.encode(keys[:, :, order]), codec, codec.encode(values[:, :, order]))
    query = query_for([a], 3)
    torch.testing.assert_close(attend_torch(query, [a], 0.2), attend_torch(query, [b], 0.2), atol=1e-5, rtol=1e-5)


# -- handles -----------------------------------------------------------------------------------------------------------


def handles(spec="int8", n=9):
    config = llama_config(1)
    config._attn_implementation = "kvcache"
    layer = KVCache.from_spec(config, spec).layers[0]
    new = states(n)
    keys, values = layer.update(*new)
    assert isinstance(keys, Stored) and isinstance(values, Stored)
    return keys, values, layer


def test_a_handle_is_a_tensor_to_whoever_touches_it():
    keys, values, layer = handles()
    plain = layer.keys
    assert keys.shape == plain.shape == (2, 2, 9, 8) and keys.dtype == plain.dtype and keys.device == plain.device
    assert torch.equal(keys[:, :, 3:], plain[:, :, 3:])
    assert torch.equal(keys.transpose(1, 2), plain.transpose(1, 2))
    assert torch.equal(torch.cat([keys, keys], 2), torch.cat([plain, plain], 2))
    assert torch.equal(torch.matmul(torch.ones(2, 2, 1, 9), values), torch.ones(2, 2, 1, 9) @ layer.values)
    assert torch.equal(keys.to(torch.bfloat16), plain.bfloat16()) and keys.size(2) == 9 and keys.dim() == 4
    with pytest.raises(AttributeError):
        keys.no_such_thing  # noqa: B018


@pytest.mark.parametrize("attention_name, handed", [("kvcache", True), ("sdpa", False), ("eager", False)])
def test_handles_only_for_our_attention(attention_name, handed):
    config = llama_config(1)
    config._attn_implementation = attention_name
    out = KVCache.from_spec(config, "int8").layers[0].update(*states(3))
    assert [isinstance(x, Stored) for x in out] == [handed] * 2


# -- through models ----------------------------------------------------------------------------------------------------

MODELS = ["llama", "mistral", "gemma2", "gemma3_text", "qwen2", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("chunk", [1, 7, None])
def test_full_through_models(family, chunk):
    model, stock = case(family).model, case(family).stock
    ids = prompt(24, 2)
    try:
        model.set_attn_implementation(stock)
        expected = feed(model, ids, DynamicCache(config=model.config), chunk)
        model.set_attn_implementation("kvcache")
        out = feed(model, ids, KVCache(model.config), chunk)
    finally:
        model.set_attn_implementation(stock)
    assert (out - expected).abs().max() <= 2e-4 * max(1, expected.abs().max() / 10)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("spec", ["int8", "fp8"])
def test_lossy_through_models(family, spec):
    """What our attention reads from the codes is what stock attention reads from decoded tensors."""
    model, stock = case(family).model, case(family).stock
    ids, logits = prompt(24, 2), []
    try:
        for name in (stock, "kvcache"):
            model.set_attn_implementation(name)
            logits.append(feed(model, ids, KVCache(model.config, spec), 7))
    finally:
        model.set_attn_implementation(stock)
    difference = (logits[0] - logits[1]).abs()
    assert difference.mean() <= 1e-3 * logits[0].abs().mean()  # one code of one value may fall the other way


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("chunk", [1, 5, None])
def test_padding_through_models(family, chunk):
    """The registered mask function hands the padding mask on: a padded row equals the row alone."""
    model, stock = case(family).model, case(family).stock
    ids = prompt(14, 2)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    try:
        model.set_attn_implementation("kvcache")
        cache, out = KVCache(model.config), []
        for start in range(0, 14, chunk or 14):
            stop = min(start + (chunk or 14), 14)
            options = dict(attention_mask=mask[:, :stop], position_ids=positions[:, start:stop])
            out.append(feed(model, ids[:, start:stop], cache, **options))
        alone = feed(model, ids[1:, 6:], KVCache(model.config))
    finally:
        model.set_attn_implementation(stock)
    assert (torch.cat(out, 1)[1:, 6:] - alone).abs().max() <= 2e-4 * max(1, alone.abs().max() / 10)


def test_without_a_cache():
    """``use_cache=False`` gives our attention plain tensors."""
    ids = prompt(20, 2)
    with torch.no_grad():
        out = llama("kvcache")(ids, use_cache=False).logits
        assert torch.equal(out, llama()(ids, use_cache=False).logits)


def test_stock_caches_under_our_attention():
    ids = prompt(20, 2)
    for chunk in (1, 7, None):
        out = feed(llama("kvcache"), ids, DynamicCache(config=llama("kvcache").config), chunk)
        assert (out - feed(llama(), ids, DynamicCache(config=llama().config), chunk)).abs().max() < 2e-4


def test_registering_twice_and_turning_off():
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    hf_kvcache.register()
    assert before == (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping))
    assert "kvcache" in AttentionInterface().valid_keys()
    assert "kvcache" in AttentionMaskInterface().valid_keys()
    model, ids = build(llama_config()), prompt(9)
    cache = KVCache(model.config, "int8")
    model.set_attn_implementation("kvcache")
    feed(model, ids, cache)
    model.set_attn_implementation("sdpa")
    out = cache.layers[0].update(*states(1, 1))
    assert not isinstance(out[0], Stored)


# -- workspace ---------------------------------------------------------------------------------------------------------


class Outputs(TorchDispatchMode):
    """Every tensor that any operation returns, by shape and dtype."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.seen.append((str(func), tuple(t.shape), t.dtype))
        return out


def decoded_history(seen, n, head, heads):
    """Float tensors that hold the keys or values of the history: by their last dimensions, or by their size."""
    return [
        item
        for item in seen
        if item[2].is_floating_point
        and ({n, head} <= set(item[1][-2:]) or torch.Size(item[1]).numel() > 0.6 * n * head * heads)
    ]


@pytest.mark.parametrize("spec", ["int8", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b100_no_float_copy_of_the_history_during_decode(spec, dtype):
    n, heads, head = 5000, 2, 32
    config = llama_config(2, hidden_size=128, head_dim=head)
    model = build(config, "kvcache", dtype=dtype)
    past = [states(n - 1, 1, heads, head, dtype) for _ in range(2)]
    cache = KVCache.from_states(config, past, spec)
    feed(model, prompt(1), cache)  # the first step may grow the slabs
    with Outputs() as outputs:
        feed(model, prompt(1, seed=2), cache)
    assert len(outputs.seen) > 50
    assert decoded_history(outputs.seen, n + 1, head, heads) == []
    model.set_attn_implementation("sdpa")  # and the check does see one where there is one
    with Outputs() as outputs:
        feed(model, prompt(1, seed=3), cache)
    assert decoded_history(outputs.seen, n + 2, head, heads)


@pytest.mark.parametrize("spec", ["int8", "fp8"])
def test_workspace_of_a_chunk_is_bounded(spec, monkeypatch):
    """Sixty-four queries over 5,000 tokens: scores in slices, codes in blocks."""
    n, heads, head = 5000, 2, 32
    monkeypatch.setattr(reference, "ROWS", 1 << 18)
    config = llama_config(1, hidden_size=128, head_dim=head)
    model = build(config, "kvcache")
    cache = KVCache.from_states(config, [states(n, 1, heads, head)], spec)
    feed(model, prompt(1), cache)
    with Outputs() as outputs:
        feed(model, prompt(64), cache)
    sizes = [torch.Size(shape).numel() for _, shape, dtype in outputs.seen if dtype.is_floating_point]
    assert max(sizes) <= max(1 << 18, n * heads * head * 0.6 + 1)


def test_a_full_step_copies_no_history():
    """No ``torch.cat`` of the history: a decode step with ``full`` writes one row and makes no tensor of that size."""
    n, heads, head = 5000, 2, 32
    config = llama_config(1, hidden_size=128, head_dim=head)
    model = build(config, "kvcache")
    cache = KVCache.from_states(config, [states(n, 1, heads, head)], "full")
    feed(model, prompt(1), cache)
    with Outputs() as outputs:
        feed(model, prompt(1, seed=2), cache)
    views = ("slice", "view", "transpose", "expand", "alias", "unsqueeze", "reshape", "detach", "as_strided", "permute")
    made = [
        item
        for item in outputs.seen
        if torch.Size(item[1]).numel() >= n * heads * head and not any(view in item[0] for view in views)
    ]
    assert made == []


@pytest.mark.parametrize("spec", ["sink(4,1000)", "sink(2,6)", "int8+sink(2,6)"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_softcap_and_sinks_with_gradients(family, spec):
    """With a graph the logits are those without one; where nothing has left, the gradients are stock's."""
    it = case(family)
    ids, model, weights = prompt(20, 2, 90), it.model, list(it.model.parameters())
    new = lambda: KVCache.from_spec(model.config, spec)  # noqa: E731
    with it.attention("kvcache"):
        for schedule in ("once", "chunks"):
            right, cache = it.feed(ids, new(), schedule), new()
            rows = [model(piece, past_key_values=cache).logits for piece in ids.split(it.sizes(schedule), 1)]
            assert rows[-1].requires_grad
            torch.testing.assert_close(torch.cat(rows, 1), right, atol=2e-4, rtol=1e-4)
        mine = torch.autograd.grad(model(ids, past_key_values=new()).logits.sum(), weights)
    if spec == "sink(4,1000)":
        for a, b in zip(mine, torch.autograd.grad(model(ids).logits.sum(), weights), strict=True):
            assert (a - b).abs().max() < 1e-3 * b.abs().max()


def test_gradients_of_a_residual_beside_a_softcap_are_refused():
    it = case("gemma2")
    cache = KVCache.from_spec(it.model.config, "int8(residual=3)")
    with it.attention("kvcache"), pytest.raises(ValueError, match=r"no_grad\(\)"):
        it.model(prompt(20, 2, 90), past_key_values=cache)
