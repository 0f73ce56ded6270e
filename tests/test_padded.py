"""Left padding where it matters which of its own tokens a row's slot holds: every row is what it is alone."""

from __future__ import annotations

import copy

import pytest
import torch
from families import case
from models import feed, greedy, llama, prompt
from test_caches import memory_total, reachable_bytes
from transformers import DynamicCache, EncoderDecoderCache

from hf_kvcache import KVCache

LOW = "int4(group=4,residual=4,sinks=2)"
WINDOWS = (
    "sink(2,6)",
    "sink(0,5)",
    "sink(2,6,reposition=on)",
    "int8+sink(2,6)",
    "fp8+sink(3,20)",
    f"{LOW}+sink(2,6)",
    "int4(group=8,residual=8)+sink(4,9)",
)
GROUPS = (
    LOW,
    "int2(group=4,residual=6)",
    "k4v2(group=4,residual=0,sinks=1)",
    "int4(group=4,residual=2,quantize_after=9)",
    "int8(sinks=2)",
    "int8(residual=3)",
)
every_spec = pytest.mark.parametrize("spec", [*WINDOWS, *GROUPS])
some_specs = pytest.mark.parametrize("spec", ["sink(2,6)", "int8+sink(2,6,reposition=on)", LOW, f"{LOW}+sink(2,6)"])


def close(spec, mine, theirs):
    """A code may fall on the other side of a tie when a product is summed in another order: one step of it."""
    exact = spec.split("+")[0].startswith("sink")
    torch.testing.assert_close(mine, theirs, atol=1e-4 if exact else 3e-2, rtol=0)


def cache_of(spec):
    return KVCache.from_spec(llama("kvcache").config, spec)


class Batch:
    """Rows of these lengths, padded on the left to ``width``, then ``new`` tokens that are fed one by one."""

    def __init__(self, lengths, width=None, new=8):
        self.rows = [prompt(n + new, seed=n) for n in lengths]
        self.width, self.new = width or max(lengths), new
        total = self.width + new
        self.ids = torch.zeros(len(lengths), total, dtype=torch.long)
        self.mask = torch.zeros_like(self.ids)
        for i, row in enumerate(self.rows):
            self.ids[i, total - row.shape[1] :], self.mask[i, total - row.shape[1] :] = row, 1
        self.positions = (self.mask.cumsum(-1) - 1).clamp_min(0)

    def feed(self, cache, start, stop, chunk=None):
        out = []
        for a in range(start, stop, chunk or stop - start):
            b = min(a + (chunk or stop - start), stop)
            with torch.no_grad():
                logits = llama("kvcache")(
                    self.ids[:, a:b],
                    attention_mask=self.mask[:, :b],
                    position_ids=self.positions[:, a:b],
                    past_key_values=cache,
                ).logits
            out.append(logits)
        return torch.cat(out, 1)

    def prefill(self, cache, chunk=None):
        return self.feed(cache, 0, self.width, chunk)

    def decode(self, cache):
        return self.feed(cache, self.width, self.width + self.new, 1)

    def alone(self, i, spec):
        """Logits of a row by itself, and its cache."""
        cache = cache_of(spec)
        n = self.rows[i].shape[1] - self.new
        first = feed(llama("kvcache"), self.rows[i][:, :n], cache)
        return torch.cat([first, feed(llama("kvcache"), self.rows[i][:, n:], cache, 1)], 1)[0], cache


@every_spec
@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.parametrize("lengths, width", [((20, 9, 3), None), ((1, 7), 13)])
def test_b37_a_padded_row_equals_the_row_alone(spec, chunk, lengths, width):
    batch, cache = Batch(lengths, width), cache_of(spec)
    logits = torch.cat([batch.prefill(cache, chunk), batch.decode(cache)], 1)
    assert cache.get_seq_length() == batch.width + batch.new
    for i, row in enumerate(batch.rows):
        expected, alone = batch.alone(i, spec)
        close(spec, logits[i, -row.shape[1] :], expected)
        positions = cache.layers[1].positions[i, 0]
        held = positions[positions >= 0]
        assert torch.equal(held, held.sort().values) and held[-1] == row.shape[1] - 1
        keys, theirs = cache.layers[1].keys[i, :, : len(held)], alone.layers[1].keys[0]
        if len(held) == theirs.shape[1]:
            close(spec, keys, theirs)
        assert len(held) <= theirs.shape[1]


@pytest.mark.parametrize("spec", GROUPS)
def test_codes_do_not_depend_on_how_many_pads_precede(spec):
    near, far = Batch((20, 11)), Batch((20, 11), 27)
    caches = [cache_of(spec), cache_of(spec)]
    for batch, cache in zip((near, far), caches, strict=True):
        batch.prefill(cache)
    for layer, other in zip(*(c.layers for c in caches), strict=True):
        assert torch.equal(layer.own, other.own) and layer.own.tolist() == [20, 11]
        torch.testing.assert_close(layer.keys, other.keys, atol=1e-5, rtol=0)


@some_specs
def test_generate_in_a_padded_batch(spec):
    batch = Batch((20, 9), new=0)
    together = greedy(llama("kvcache"), batch.ids, cache_of(spec), 12, attention_mask=batch.mask)
    for i, row in enumerate(batch.rows):
        alone = greedy(llama("kvcache"), row, cache_of(spec), 12)
        assert torch.equal(together[i, 20:], alone[0, row.shape[1] :])


@some_specs
@pytest.mark.parametrize("beams", [2, 3])
def test_beams_in_a_padded_batch(spec, beams):
    batch = Batch((20, 9), new=0)
    together = greedy(llama("kvcache"), batch.ids, cache_of(spec), 6, attention_mask=batch.mask, num_beams=beams)
    for i, row in enumerate(batch.rows):
        alone = greedy(llama("kvcache"), row, cache_of(spec), 6, num_beams=beams)
        assert torch.equal(together[i, 20:], alone[0, row.shape[1] :])


@some_specs
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_second_turn_that_is_padded_too(spec, chunk):
    """Pads between the turns, fed to rows that were padded before."""
    batch = Batch((12, 5), new=0)
    turn = prompt(6, 2, seed=7)
    hidden = torch.ones_like(turn)
    hidden[0, :3] = 0
    batch.ids, batch.mask = torch.cat([batch.ids, turn], 1), torch.cat([batch.mask, hidden], 1)
    batch.positions = (batch.mask.cumsum(-1) - 1).clamp_min(0)
    cache = cache_of(spec)
    batch.prefill(cache)
    logits = batch.feed(cache, 12, 18, chunk)
    for i, row in enumerate(batch.rows):
        own = turn[i : i + 1, 3 if i == 0 else 0 :]
        alone = cache_of(spec)
        feed(llama("kvcache"), row, alone)
        close(spec, logits[i, -own.shape[1] :], feed(llama("kvcache"), own, alone, chunk)[0])


@some_specs
@pytest.mark.parametrize("chunk", [3, None])
def test_a_second_turn_without_pads(spec, chunk):
    batch = Batch((12, 5), new=9)
    cache = cache_of(spec)
    batch.prefill(cache)
    logits = batch.feed(cache, 12, 21, chunk)
    for i in range(2):
        close(spec, logits[i], batch.alone(i, spec)[0][-9:])


@some_specs
def test_what_every_cache_can_do(spec, tmp_path):
    """Copies, files, rows and rollback, each continued and compared."""
    batch, cache = Batch((20, 9, 14)), cache_of(spec)
    batch.prefill(cache)
    expected = batch.decode(cache.fork())
    cache.save(tmp_path / "cache")
    copies = [cache.fork(), copy.deepcopy(cache), KVCache.load(tmp_path / "cache", llama("kvcache").config)]
    first = [batch.decode(each) for each in copies]
    for logits in first:
        assert torch.equal(logits, expected)
    assert cache.get_seq_length() == 20

    rows = cache.fork()
    rows.reorder_cache(torch.tensor([2, 2, 0]))
    batch.ids, batch.mask, batch.positions = (t[[2, 2, 0]] for t in (batch.ids, batch.mask, batch.positions))
    close(spec, batch.decode(rows), expected[[2, 2, 0]])
    rows = cache.fork()
    rows.batch_select_indices(torch.tensor([2]))
    rows.batch_repeat_interleave(3)
    batch.ids, batch.mask, batch.positions = (t[[0, 0, 0]] for t in (batch.ids, batch.mask, batch.positions))
    close(spec, batch.decode(rows), expected[[2, 2, 2]])

    batch = Batch((20, 9, 14))
    once = cache.fork()
    batch.feed(once, 20, 21)
    left = once.exact_rollback()
    if left:
        once.rollback(1)
        torch.testing.assert_close(batch.decode(once), expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="crop"):
        once.rollback(18)

    assert cache.nbytes == reachable_bytes(cache) == memory_total(cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == cache_of(spec).nbytes
    whole = prompt(15, 2)
    assert torch.equal(feed(llama("kvcache"), whole, cache, 4), feed(llama("kvcache"), whole, cache_of(spec), 4))


def test_a_window_in_a_padded_batch_is_bounded():
    batch, cache = Batch((40, 9), new=30), cache_of("int8+sink(2,6)")
    batch.prefill(cache)
    before = cache.nbytes
    batch.decode(cache)
    assert cache.nbytes == before and cache.stats().tokens_kept == 8


@some_specs
@torch.no_grad()
def test_pads_beside_a_mask_that_is_not_causal(spec):
    """A prompt whose first tokens see each other (an image), in rows that start at different tokens."""
    if "reposition" in spec:
        pytest.skip("turns queries by their own number")
    model, ids = llama("kvcache"), prompt(8, 2)
    alone = torch.ones(8, 8, dtype=torch.bool).tril()
    alone[:3, :3] = True
    mask = torch.zeros(2, 1, 11, 11, dtype=torch.bool)
    mask[0, 0, :8, :8] = mask[1, 0, 3:, 3:] = alone
    padded = torch.stack([torch.cat([ids[0], ids[0, :3]]), torch.cat([ids[1, :3], ids[1]])])
    positions = torch.stack([torch.arange(11), (torch.arange(11) - 3).clamp_min(0)])
    asked = dict(attention_mask=mask, position_ids=positions, past_key_values=cache_of(spec))
    together = model(padded, **asked).logits
    for row, start in ((0, 0), (1, 3)):
        out = model(ids[row : row + 1], attention_mask=alone[None, None], past_key_values=cache_of(spec)).logits
        close(spec, together[row, start : start + 8], out[0])


@some_specs
def test_padded_rows_stay_with_our_attention(spec):
    batch, cache = Batch((8, 5)), cache_of(spec)
    batch.prefill(cache)
    model = copy.deepcopy(llama("kvcache"))
    model.set_attn_implementation("sdpa")
    cache.config._attn_implementation, before = "sdpa", cache.config._attn_implementation
    try:
        with pytest.raises(ValueError, match="set_attn_implementation"), torch.no_grad():
            model(batch.ids[:, 8:9], attention_mask=batch.mask[:, :9], past_key_values=cache)
    finally:
        cache.config._attn_implementation = before


@pytest.mark.parametrize("fill", [0, None])
@pytest.mark.parametrize("spec", ["int8", "int8+sink(2,6)"])
def test_a_turn_that_is_padded_in_every_row_is_not_a_prompt_fed_twice(spec, fill):
    """Also where rows moved, and where a chunk is pads alone; ``fill``: what stands at pads, or the last position."""
    batch, cache = Batch((12, 5, 8), new=0), cache_of(spec)
    batch.prefill(cache)
    cache.reorder_cache(torch.tensor([1, 0, 2]))
    cache.batch_repeat_interleave(2)
    order = [1, 1, 0, 0, 2, 2]
    turn, hidden = prompt(9, 6, seed=7), torch.ones(6, 9, dtype=torch.long)
    hidden[:, :3], hidden[2:, :6] = 0, 0  # the longest rows have no token in the middle chunk
    batch.ids, batch.mask = torch.cat([batch.ids[order], turn], 1), torch.cat([batch.mask[order], hidden], 1)
    batch.positions = (batch.mask.cumsum(-1) - 1).clamp_min(0)
    if fill is not None:
        batch.positions = batch.positions.masked_fill(batch.mask == 0, fill)
    logits = batch.feed(cache, 12, 21, 3)
    for i, own in enumerate(turn):
        alone = cache_of(spec)
        feed(llama("kvcache"), batch.rows[order[i]], alone)
        close(spec, logits[i, 3:][hidden[i, 3:] == 1], feed(llama("kvcache"), own[None, hidden[i] == 1], alone)[0])


@some_specs
def test_a_pad_for_a_row_that_is_shorter_than_one_that_is_gone(spec):
    """Slots of the row that is gone stay behind, and a pad brings nothing to put there."""
    batch, cache = Batch((1, 9), new=1), cache_of(spec)
    batch.prefill(cache)
    cache.batch_select_indices(torch.tensor([0]))
    before = [layer.keys for layer in cache.layers]
    mask = torch.cat([batch.mask[:1, :9], torch.zeros(1, 1, dtype=torch.long)], 1)
    with torch.no_grad():
        llama("kvcache")(batch.ids[:1, 9:10], attention_mask=mask, past_key_values=cache)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert layer.get_seq_length() == 10 and layer.own.tolist() == [1] and torch.equal(layer.keys, keys)


@pytest.mark.parametrize("attention", ["stock", "kvcache"])
@pytest.mark.parametrize("spec", ["full", "int4", "sink(2,40)", "int8(residual=20)", "int4(sinks=2)+sink(4,40)"])
@torch.no_grad()
def test_pads_beside_scores_by_position(spec, attention):
    """T5: slots stay tokens, pads too, as long as nothing is evicted or encoded; after that it is refused anyway."""
    this = case("t5")
    ids, mask = prompt(12, 2, 90), torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    with this.attention(attention):
        found = []
        for own in (DynamicCache(config=this.model.config), KVCache.from_spec(this.model.config, spec)):
            both, out = EncoderDecoderCache(own, DynamicCache(config=this.model.config)), []
            for a, b in ((0, 6), (6, 7), (7, 12)):
                asked = dict(decoder_attention_mask=mask[:, :b], past_key_values=both, **this.extra)
                out.append(this.model(decoder_input_ids=ids[:, a:b], **asked).logits)
            found.append(torch.cat(out, 1)[mask.bool()])
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("spec", ["int8(residual=5)", "sink(2,9)", "int4(group=4,residual=4)", "knorm(budget=40)"])
@torch.no_grad()
def test_a_fork_does_not_hear_of_the_pads_of_its_original(spec):
    model, ids = llama("kvcache"), prompt(40, 2)
    mask = torch.ones_like(ids)
    mask[0, :21] = 0
    cache = KVCache.from_spec(model.config, spec)
    model(ids, past_key_values=cache, attention_mask=mask)
    later = torch.ones(2, 6, dtype=torch.long)
    later[0, :2] = 0

    def go_on(cache):
        whole = torch.cat([mask, later], 1)
        return model(ids[:, :6], past_key_values=cache, attention_mask=whole).logits[:, 2:]

    fork, expected = cache.fork(), go_on(copy.deepcopy(cache))
    model(ids[:, :1], past_key_values=cache, attention_mask=torch.cat([mask, later[:, :1]], 1))
    torch.testing.assert_close(go_on(fork), expected, atol=0, rtol=0)
