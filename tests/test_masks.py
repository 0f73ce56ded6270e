"""Masks of the caller: trees of drafts, holes, images, pads anywhere; by every storage and retention, or refused.

What a cache that has dropped and encoded nothing gives is what ``DynamicCache`` gives. Beyond that, one mask fed at
once and in pieces must agree, and a branch of a tree is what the branch alone is.
"""

from __future__ import annotations

import pytest
import torch
from models import llama, prompt
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, EncoderDecoderCache

from hf_kvcache import KVCache
from hf_kvcache import masked as module
from hf_kvcache.plan import LEAF, Visible

LOWEST = torch.finfo(torch.float32).min
# Nothing is dropped or encoded here: all of them are "full".
WIDE = ["full", "sink(2,60)", "knorm(budget=60)", "int8(residual=60)", "int4", "int4+sink(4,60)", "cpu"]
OURS = ["snapkv(budget=60)", "h2o(budget=60)", "knorm(budget=60,adaptive=on)", "tova(budget=60)"]
LOSSY = ["int8", "int8(residual=4)", "int4(group=4,residual=4,sinks=1)", "int8(residual=4)+cpu"]
BEYOND = ["sink(2,6)", "int4(group=4,residual=4)+sink(2,6)", "knorm(budget=8,sinks=2,recent=2)"]
LATER = ["sink(2,6)", "int8+sink(3,9)", "int4(group=4,residual=4)", "int2(group=4,residual=5)+sink(1,8)"]
SMALL = "snapkv(budget=9,sinks=2,recent=2)"
ATTENTIONS = ["sdpa", "eager", "kvcache"]


def shaped(mask: torch.Tensor, attention: str) -> torch.Tensor:
    """[q, n] bool as this attention is handed it."""
    mask = mask if mask.dim() == 4 else mask[None, None]
    return torch.zeros(mask.shape).masked_fill(~mask, LOWEST) if attention == "eager" else mask


def run(model, ids, mask, cache, attention, pieces=None, positions=None):
    positions = torch.arange(ids.shape[1])[None] if positions is None else positions
    ends, out, start = pieces or [ids.shape[1]], [], 0
    for end in ends:
        asked = dict(attention_mask=shaped(mask[..., start:end, :end], attention), past_key_values=cache)
        out.append(model(ids[:, start:end], position_ids=positions[:, start:end], **asked).logits)
        start = end
    return torch.cat(out, 1)


def specs(attention):
    return [*WIDE, *(OURS if attention == "kvcache" else ())]


@pytest.mark.parametrize("attention, spec", [(a, s) for a in ATTENTIONS for s in [*specs(a), *LOSSY]])
@torch.no_grad()
def test_a_branch_of_a_tree_is_the_branch_alone(attention, spec):
    """Four drafts: 1 and 2 are children of 0, 3 of 1."""
    model, ids, drafts = llama(attention), prompt(12), prompt(4, seed=5)
    cache = KVCache.from_spec(model.config, spec)
    model(ids, past_key_values=cache)
    tree = torch.ones(4, 16, dtype=torch.bool).tril(12)
    tree[2, 13] = tree[3, 14] = False
    branches = []
    for nodes in ([0, 1, 3], [0, 2]):
        fork = cache.fork()
        branches.append([model(drafts[:, i : i + 1], past_key_values=fork).logits[:, 0] for i in nodes])
    out = model(
        drafts,
        past_key_values=cache,
        attention_mask=shaped(tree, attention),
        position_ids=torch.tensor([[12, 13, 13, 14]]),
    ).logits
    # Nodes that are one token later than in their branch may see one more token encoded: that is all.
    atol = 2e-4 if spec not in LOSSY[1:] else 0.2
    for nodes, branch in zip(([0, 1, 3], [0, 2]), branches, strict=True):
        for node, expected in zip(nodes, branch, strict=True):
            torch.testing.assert_close(out[:, node], expected, atol=atol, rtol=0)
    wrong = model(drafts, past_key_values=KVCache.from_spec(model.config, "full")).logits
    assert (wrong[:, 3] - out[:, 3]).abs().max() > 1  # the mask matters here


@pytest.mark.parametrize("attention, spec", [(a, s) for a in ATTENTIONS for s in specs(a)])
@pytest.mark.parametrize("pieces", [None, [7, 8, 15], list(range(1, 16))])
@torch.no_grad()
def test_a_hole_is_a_hole_while_nothing_is_dropped(attention, spec, pieces):
    model, ids = llama(attention), prompt(15)
    mask = torch.ones(15, 15, dtype=torch.bool).tril()
    mask[5:, 2] = False
    expected = run(model, ids, mask, DynamicCache(config=model.config), attention)
    out = run(model, ids, mask, KVCache.from_spec(model.config, spec), attention, pieces)
    torch.testing.assert_close(out, expected, atol=2e-4, rtol=0)
    plain = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    assert (plain - expected).abs().max() > 1


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("spec", ["int8(residual=3)", "int4(group=4,residual=3,sinks=1)", "int8(residual=20)", "int8"])
@torch.no_grad()
def test_a_hole_agrees_at_once_and_in_pieces_beside_encoded_tokens(attention, spec):
    model, ids = llama(attention), prompt(40)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    mask[5:, 2] = mask[20:30, 10:13] = False
    once = run(model, ids, mask, KVCache.from_spec(model.config, spec), attention)
    for pieces in ([7, 8, 40], list(range(1, 41)), [39, 40]):
        out = run(model, ids, mask, KVCache.from_spec(model.config, spec), attention, pieces)
        torch.testing.assert_close(out, once, atol=5e-3 if spec == "int8" else 2e-2, rtol=0)


@pytest.mark.parametrize(
    "spec", ["sink(2,6)", "int4(group=4,residual=4)+sink(2,6)", "knorm(budget=8,sinks=2,recent=2)"]
)
@torch.no_grad()
def test_beyond_the_window_a_hole_is_honoured_by_ours_and_refused_elsewhere(spec):
    model, ids = llama("kvcache"), prompt(15)
    mask = torch.ones(15, 15, dtype=torch.bool).tril()
    mask[5:, 2] = False
    if "knorm" not in spec:  # which tokens a policy keeps depends on the forwards
        once = run(model, ids, mask, KVCache.from_spec(model.config, spec), "kvcache")
        out = run(model, ids, mask, KVCache.from_spec(model.config, spec), "kvcache", [7, 8, 15])
        torch.testing.assert_close(out, once, atol=2e-4 if "int4" not in spec else 2e-2, rtol=0)
    stock = llama("sdpa")
    with pytest.raises(ValueError, match="hides some"):
        run(stock, ids, mask, KVCache.from_spec(stock.config, spec), "sdpa", [7, 8, 9, 10, 15])


@pytest.mark.parametrize(
    "spec", ["full", "int4", "sink(4,40)", "snapkv(budget=40)", "snapkv(budget=9,sinks=2,recent=2)"]
)
@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
@torch.no_grad()
def test_pads_on_the_right_are_what_stock_makes_of_them(spec, attention):
    """``generate`` samples from the last query, which is a pad's: it sees the row's tokens."""
    if "snapkv" in spec and attention == "sdpa":
        pytest.skip("needs what sdpa does not hand over")
    model, ids, mask = llama(attention), prompt(20, 2), torch.ones(2, 20, dtype=torch.long)
    mask[1, 14:] = 0
    expected = llama("sdpa")(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config)).logits
    out = model(ids, attention_mask=mask, past_key_values=KVCache.from_spec(model.config, spec)).logits
    torch.testing.assert_close(out, expected, atol=2e-4, rtol=0)
    greedy = dict(do_sample=False, max_new_tokens=4, attention_mask=mask)
    stock = llama("sdpa").generate(ids, past_key_values=DynamicCache(config=model.config), **greedy)
    if spec != SMALL:
        got = model.generate(ids, past_key_values=KVCache.from_spec(model.config, spec), **greedy)
        assert torch.equal(got, stock)


@pytest.mark.parametrize(
    "spec", ["sink(2,6)", "int8+sink(3,9)", "int4(group=4,residual=4)", "int2(group=4,residual=5)+sink(1,8)"]
)
@pytest.mark.parametrize("sizes", [(9, 5), (30, 4), (1, 3), (3, 40)])
@torch.no_grad()
def test_pads_that_first_come_in_a_later_turn(spec, sizes):
    """Rows that were alike until then; afterwards each is what it is alone."""
    model, (first, second) = llama("kvcache"), sizes
    ids, mask = prompt(first + second, 2), torch.ones(2, first + second, dtype=torch.long)
    mask[1, first : first + 2] = 0
    cache, positions = KVCache.from_spec(model.config, spec), mask.cumsum(-1) - 1
    model(ids[:, :first], past_key_values=cache)
    out = model(ids[:, first:], attention_mask=mask, position_ids=positions[:, first:], past_key_values=cache).logits
    alone = KVCache.from_spec(model.config, spec)
    model(ids[1:, :first], past_key_values=alone)
    expected = model(ids[1:, first + 2 :], past_key_values=alone).logits
    torch.testing.assert_close(out[1:, 2:], expected, atol=2e-4 if spec.startswith("sink") else 2e-2, rtol=0)


@pytest.mark.parametrize("spec", ["sink(2,60)", "int4", "int4(group=4,residual=4,sinks=1)", "sink(2,6)"])
@torch.no_grad()
def test_a_pad_that_comes_alone(spec):
    """A row that has ended, in a forward of one token; long chunks after it see no more of it than short ones."""
    model, ids, mask = llama("kvcache"), prompt(25, 2), torch.ones(2, 25, dtype=torch.long)
    mask[1, 4] = 0
    cache, positions = KVCache.from_spec(model.config, spec), mask.cumsum(-1) - 1
    for a, b in ((0, 4), (4, 5), (5, 25)):
        asked = dict(attention_mask=mask[:, :b], position_ids=positions[:, a:b], past_key_values=cache)
        out = model(ids[:, a:b], **asked).logits
    expected = model(ids[1:][:, mask[1].bool()], past_key_values=KVCache.from_spec(model.config, spec)).logits
    torch.testing.assert_close(out[1:], expected[:, 4:], atol=2e-4 if "int4(" not in spec else 2e-2, rtol=0)


@torch.no_grad()
def test_a_pad_that_comes_alone_when_tokens_are_gone_is_refused():
    model, ids, mask = llama("kvcache"), prompt(12, 2), torch.ones(2, 12, dtype=torch.long)
    mask[1, 11] = 0
    cache = KVCache.from_spec(model.config, "sink(2,6)")
    model(ids[:, :11], past_key_values=cache)
    with pytest.raises(ValueError, match="hides some"):
        model(ids[:, 11:], attention_mask=mask, past_key_values=cache)


@torch.no_grad()
def test_a_token_that_nobody_sees_yet_is_no_pad():
    """Each token sees those before it only."""
    model, ids = llama("kvcache"), prompt(8)
    mask = torch.ones(8, 8, dtype=torch.bool).tril(-1)
    mask[0, 0] = True
    expected = run(model, ids, mask, DynamicCache(config=model.config), "kvcache", [2, 4, 6, 8])
    for spec in ("sink(2,60)", "int8(residual=40)", "knorm(budget=60)"):
        out = run(model, ids, mask, KVCache.from_spec(model.config, spec), "kvcache", [2, 4, 6, 8])
        torch.testing.assert_close(out, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("spec", ["full", "sink(2,40)", "int8(residual=40)"])
@torch.no_grad()
def test_positions_of_the_caller_are_taken(attention, spec):
    """Contexts side by side: positions begin again, and the mask covers all tokens."""
    model, ids = llama(attention), prompt(16)
    positions = torch.cat([torch.arange(12), torch.arange(3, 7)])[None]

    def logits(cache):
        model(ids[:, :12], past_key_values=cache)
        asked = dict(position_ids=positions[:, 12:], attention_mask=torch.ones(1, 16, dtype=torch.long))
        return model(ids[:, 12:], past_key_values=cache, **asked).logits

    torch.testing.assert_close(
        logits(KVCache.from_spec(model.config, spec)), logits(DynamicCache(config=model.config)), atol=2e-4, rtol=0
    )


@pytest.mark.parametrize("cached", [False, True])
@torch.no_grad()
def test_an_encoder_shorter_than_its_decoder(cached):
    torch.manual_seed(0)
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 64))}
    config = BartConfig(vocab_size=97, d_model=32, encoder_attention_heads=4, decoder_attention_heads=4, **sizes)
    model, ids, labels = BartForConditionalGeneration(config).eval(), prompt(5), prompt(8, seed=2)
    asked = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)
    expected = model(**asked).logits
    model.set_attn_implementation("kvcache")
    if cached:
        asked["past_key_values"] = EncoderDecoderCache(KVCache(model.config), DynamicCache())
    torch.testing.assert_close(model(**asked).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [[150], [100, 97, 80]], ids=str)
@pytest.mark.parametrize("spec", ["int4(group=4,residual=8)", "sink(3,40)", "int8+sink(2,70)"])
@torch.no_grad()
def test_stock_attention_goes_by_the_plan(spec, sizes, masked, monkeypatch):
    """No mask of queries by history is written out; one that hides nothing changes nothing."""
    model, ids = llama("sdpa", layers=1), prompt(sum(sizes), 2)  # one: rounding does not reach other codes

    def run_all(limit: int) -> torch.Tensor:
        monkeypatch.setattr(module, "LEAF", limit)  # fewer queries take the mask
        cache, out, start = KVCache.from_spec(model.config, spec), [], 0
        for n in sizes:
            mask = torch.ones(2, start + n, dtype=torch.long) if masked else None
            out.append(model(ids[:, start : start + n], attention_mask=mask, past_key_values=cache).logits)
            start += n
        return torch.cat(out, 1)

    expected = run_all(10**6)
    monkeypatch.setattr(Visible, "rows", lambda *args: pytest.fail("a mask was written out"))
    torch.testing.assert_close(run_all(LEAF), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("spec", ["sink(2,6)", "sink(0,3)", "int8+sink(2,6)", "int4(group=4,residual=4)+sink(2,6)"])
@pytest.mark.parametrize("nodes", [[-1, 0, 0, 1], [-1, -1, 0, 1, 2, 3, 3, 4], [-1, 0, 1, 1, 2, 0, 5, 6, 7]])
@torch.no_grad()
def test_a_window_reaches_back_from_a_draft_s_own_place(attention, spec, nodes):
    """Trees by their parents, beyond a full window: a node is what its branch alone is."""
    model, ids, drafts = llama(attention), prompt(12, 2), prompt(len(nodes), 2, seed=5)
    if not compat_gives_positions(model) and attention != "kvcache":
        pytest.skip("there, only attention hears of positions")
    cache = KVCache.from_spec(model.config, spec)
    model(ids, past_key_values=cache)
    n, paths = len(nodes), []
    for node in range(n):
        paths.append([*(paths[nodes[node]] if nodes[node] >= 0 else ()), node])
    tree = torch.ones(n, 12 + n, dtype=torch.bool)
    for node, path in enumerate(paths):
        tree[node, 12:] = torch.isin(torch.arange(n), torch.tensor(path))
    depths = torch.tensor([[len(path) - 1 for path in paths]])
    alone = []
    for path in paths:
        fork = cache.fork()
        alone.append(model(drafts[:, path], past_key_values=fork).logits[:, -1])
    out = model(
        drafts, past_key_values=cache, attention_mask=shaped(tree, attention), position_ids=(12 + depths).expand(2, -1)
    ).logits
    torch.testing.assert_close(out, torch.stack(alone, 1), atol=5e-3 if "int8" in spec else 2e-4, rtol=0)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("spec, fed", [("sink(1,1)", 0), ("sink(2,3)", 1), ("sink(3,2)", 1), ("int8+sink(1,1)", 0)])
@torch.no_grad()
def test_a_draft_is_a_sink_by_its_own_place(attention, spec, fed):
    """Two roots, and a branch of six below the second."""
    model, ids, drafts = llama(attention), prompt(fed, 2), prompt(7, 2, seed=5)
    if not compat_gives_positions(model) and attention != "kvcache":
        pytest.skip("there, only attention hears of positions")
    mask = torch.ones(7, fed + 7, dtype=torch.bool).tril(fed)
    mask[1:, fed] = False

    def cache() -> KVCache:
        new = KVCache.from_spec(model.config, spec)
        if fed:
            model(ids, past_key_values=new)
        return new

    expected = model(drafts[:, 1:], past_key_values=cache()).logits
    places = (fed + torch.tensor([[0, *range(6)]])).expand(2, -1)
    asked = dict(attention_mask=shaped(mask, attention), position_ids=places)
    out = model(drafts, past_key_values=cache(), **asked).logits[:, 1:]
    # The branch alone holds its sink plain; logits that miss it are off by more than 10.
    torch.testing.assert_close(out, expected, atol=0.5 if "int8" in spec else 2e-4, rtol=0)


def compat_gives_positions(model) -> bool:
    """Whether this transformers hands position ids to ``update``."""
    found, cache = [], KVCache(model.config)
    update = cache.update
    cache.update = lambda *args, **kwargs: (found.append(str(kwargs) + str(args[3:])), update(*args, **kwargs))[1]
    model(prompt(2), past_key_values=cache)
    return "position_ids" in found[0]
