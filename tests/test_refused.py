"""A forward that attention refuses has not happened: the cache is as it was, and what comes next is as if alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import case
from models import build, feed, greedy, llama, prompt
from test_caches import gemma3_config, mistral_config, qwen3_next_config
from test_masks import shaped

from hf_kvcache import KVCache, OffloadedCache, compat

SPECS = [
    "full",
    "int8",
    "int4(group=4,residual=4)",
    "sink(2,6)",
    "int8+sink(2,6)",
    "int4(group=4,residual=4)+sink(2,6)",
    "int4(group=4,residual=4)+knorm(budget=9,sinks=2,recent=3)",
    "knorm(budget=8,sinks=2,recent=3)",
    "int8+cpu",
    "int4(group=4,residual=4)+cpu",
    "int8+sink(2,6)+cpu",
]
SIZES = [(5, 4), (13, 1), (13, 6), (13, 14), (0, 1), (0, 4), (0, 14)]  # tokens held, and those that are refused


def look(cache: KVCache) -> tuple[Any, ...]:
    """What a cache says of itself."""
    plain = []
    for layer in cache.layers:
        states = [getattr(layer, side, None) for side in ("keys", "values")]
        states += [t for held in ("conv_states", "recurrent_states") for t in getattr(layer, held, {}).values()]
        plain.append([None if t is None else t.tolist() for t in states])
        plain.append([getattr(layer, name, None) for name in ("torn", "padded", "seen", "cumulative_length")])
    return plain, cache.get_seq_length(), cache.stats(), cache._last_positions


@torch.no_grad()
def check(model: Any, spec: str, sizes: tuple[int, int], refuse: Any, vocab: int = 90) -> bool:
    """Whether ``refuse`` was refused; then nothing has changed, and the forward without the fault is right."""
    held, new = sizes
    ids = prompt(held + new + 3, 2, vocab)
    cache, twin = (KVCache.from_spec(model.config, spec) for _ in range(2))
    for each in (cache, twin):
        for chunk in ids[:, :held].split(4, 1) if held else ():
            model(chunk, past_key_values=each)
    before = look(cache)
    assert before == look(twin)
    try:
        refuse(model, ids[:, held : held + new], cache)
        return False
    except ValueError as error:
        assert "\n" not in str(error)
    assert look(cache) == before
    if not held:  # as a new one
        assert cache.nbytes == twin.nbytes and not any(getattr(layer, "is_initialized", 0) for layer in cache.layers)
    for chunk in (ids[:, held : held + new], ids[:, held + new :]):
        expected = model(chunk, past_key_values=twin).logits
        torch.testing.assert_close(model(chunk, past_key_values=cache).logits, expected, atol=1e-6, rtol=0)
    assert look(cache) == look(twin) and cache.nbytes == twin.nbytes
    return True


def with_unknown_argument(model: Any, ids: torch.Tensor, cache: KVCache) -> None:
    model(ids, past_key_values=cache, slopes=torch.ones(4))


def with_pads(model: Any, ids: torch.Tensor, cache: KVCache) -> None:
    seen = cache.get_seq_length()
    mask = torch.ones(2, seen + ids.shape[1], dtype=torch.long)
    mask[0, seen] = mask[0, 0] = 0
    model(ids, past_key_values=cache, attention_mask=mask)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "spec", [*SPECS, "tova(budget=8,sinks=2,recent=3)", "knorm(budget=8,sinks=2,recent=3,adaptive)"]
)
def test_an_argument_that_attention_does_not_know(spec, sizes):
    assert check(llama("kvcache"), spec, sizes, with_unknown_argument)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvcache"])
def test_pads_that_come_too_late(attention, spec, sizes):
    refused = check(llama(attention), spec, sizes, with_pads)
    evicts = ("sink" in spec or "knorm" in spec) and sum(sizes) > (9 if "budget=9" in spec else 8)
    if evicts and (attention != "kvcache" or "cpu" in spec):
        assert refused
    elif not evicts and ("int4" not in spec or "cpu" in spec):
        assert not refused


@pytest.mark.parametrize("spec", ["int4(group=4,residual=4)", "int8(residual=3)", "sink(2,6)", "int8(residual=3)+cpu"])
@pytest.mark.parametrize("sizes", [(0, 14), (13, 6), (5, 9)])
@pytest.mark.parametrize("attention", ["stock", "kvcache"])
def test_a_model_that_takes_its_keys_apart(attention, spec, sizes):
    """Multi-head latent attention: the mask of a chunk cannot follow."""
    this = case("deepseek_v3")
    with this.attention(attention):
        before = KVCache.from_spec(this.model.config, spec)
        ids = prompt(sum(sizes) + 1, 2, 90)
        for token in ids[:, : sizes[0]].split(1, 1) if sizes[0] else ():
            feed(this.model, token, before)
        then, held = before.fork(), look(before)
        with pytest.raises(ValueError, match="applies linear"):
            feed(this.model, ids[:, sizes[0] :], before)
        assert look(before) == held
        for token in ids[:, sizes[0] :].split(1, 1):
            torch.testing.assert_close(feed(this.model, token, before), feed(this.model, token, then))


@pytest.mark.parametrize("config", [gemma3_config, qwen3_next_config])
@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
@pytest.mark.parametrize("sizes", [(13, 1), (13, 6), (0, 14)])
def test_layers_before_the_one_that_refuses(config, attention, sizes):
    """Native windows and recurrent states, which go back, too."""
    model = build(config(), attention)
    if model.config.model_type == "qwen3_next" and not compat.ASKS_FOR_STATES:
        pytest.skip("there, nobody is asked for recurrent states")
    assert check(model, "sink(2,6)", sizes, with_pads) == (attention == "sdpa" or sizes == (13, 1))


@pytest.mark.parametrize("sizes", [(5, 4), (13, 6), (0, 14)])
def test_a_first_layer_that_takes_what_the_second_refuses(sizes):
    this = case("deepseek_v3")
    spec = "int4(group=4,residual=1,sinks=0,skip_layers=0)"

    def whole(model, ids, cache):
        model(ids, past_key_values=cache)

    cache = KVCache.from_spec(this.model.config, spec)
    ids = prompt(20, 2, 90)
    for token in ids[:, : sizes[0]].split(1, 1) if sizes[0] else ():
        feed(this.model, token, cache)
    before = look(cache)
    with pytest.raises(ValueError, match="applies linear"):
        feed(this.model, ids[:, : max(sizes[1], 6)], cache)
    assert look(cache) == before


@torch.no_grad()
def test_a_refusal_that_comes_again_is_the_same():
    model, ids = llama("sdpa"), prompt(20, 2)
    cache, found = KVCache.from_spec(model.config, "sink(2,6)"), []
    model(ids[:, :13], past_key_values=cache)
    for _ in range(3):
        with pytest.raises(ValueError) as refusal:
            with_pads(model, ids[:, 13:], cache)
        found.append(str(refusal.value))
    assert len(set(found)) == 1 and "hides some" in found[0]


@torch.no_grad()
def test_past_recording_survives_a_refused_first_forward():
    model, ids = llama("kvcache"), prompt(6, 2)
    cache = KVCache.from_spec(model.config, "sink(2,6)")
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="does not know"):
        with_unknown_argument(model, ids, cache)
    with pytest.raises(ValueError, match="records the past"):
        model(prompt(9, 2), past_key_values=cache)


def of_width(columns: int):
    def masked(model: Any, ids: torch.Tensor, cache: KVCache) -> None:
        mask = torch.ones(2, 1, ids.shape[1], max(cache.get_seq_length() + columns + ids.shape[1], 1), dtype=torch.bool)
        model(ids, past_key_values=cache, attention_mask=shaped(mask.tril(), model.config._attn_implementation))

    return masked


@pytest.mark.parametrize("sizes", [(5, 4), (13, 6), (13, 14)])
@pytest.mark.parametrize("columns", [-1, 1, 9])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
def test_a_mask_of_another_width(attention, spec, columns, sizes):
    assert check(llama(attention), spec, sizes, of_width(columns))


@pytest.mark.parametrize("spec", ["int8", "sink(2,6)", "int4(group=4,residual=4)"])
@pytest.mark.parametrize("sizes", [(0, 4), (5, 1), (13, 1)])
def test_a_mask_of_another_width_for_a_prompt_or_one_token(spec, sizes):
    assert check(llama("kvcache"), spec, sizes, of_width(3))


@pytest.mark.parametrize("sizes", [(13, 6), (13, 14)])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvcache"])
@pytest.mark.parametrize("config", [gemma3_config, mistral_config])
@pytest.mark.filterwarnings("ignore:.*changes nothing")
def test_a_mask_of_all_tokens_for_a_native_window(config, attention, sizes):
    assert check(build(config(), attention), "int8", sizes, of_width(0))


@pytest.mark.parametrize("length", [1, 3, 6])
@pytest.mark.parametrize("spec", ["full", "int8", "sink(2,6)", "int4(group=4,residual=4)"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvcache"])
@torch.no_grad()
def test_a_new_prompt_of_at_most_half_of_what_is_held(attention, spec, length):
    model, ids = llama(attention), prompt(12, 2)
    cache = KVCache.from_spec(model.config, spec)
    model(ids, past_key_values=cache)
    before = look(cache)
    with pytest.raises(ValueError, match="no token left to feed.*rewind"):
        greedy(model, prompt(length, 2, seed=4), cache, 2)
    assert look(cache) == before
    text, alone = torch.cat([ids, prompt(length, 2, seed=4)], 1), KVCache.from_spec(model.config, spec)
    model(ids, past_key_values=alone)
    assert torch.equal(greedy(model, text, cache, 3), greedy(model, text, alone, 3))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_a_forward_of_pads_alone_is_named(attention, spec):
    def all_pads(model: Any, ids: torch.Tensor, cache: KVCache) -> None:
        seen = cache.get_seq_length()
        mask = torch.ones(2, seen + ids.shape[1], dtype=torch.long)
        mask[:, seen:] = 0
        with pytest.raises(ValueError, match="covers none of the new tokens: leave out a forward of pads alone"):
            model(ids, past_key_values=cache, attention_mask=mask)
        raise ValueError

    assert check(llama(attention), spec, (13, 4), all_pads)


@pytest.mark.parametrize("spec", ["int4(group=4,residual=4,sinks=2)", "int8+sink(2,6)"])
@pytest.mark.parametrize("held", [1, 2, 5])
@torch.no_grad()
def test_a_staged_far_tier_goes_back(spec, held):
    """Also where nothing was sealed before, and a ring has gone round since."""
    model, ids = llama("kvcache"), prompt(held + 15, 2)
    axes = KVCache.from_spec(model.config, spec)
    cache, twin = (
        OffloadedCache(model.config, _stage=True, storage=axes.storage, retention=axes.retention) for _ in range(2)
    )
    for each in (cache, twin):
        model(ids[:, :held], past_key_values=each)
    before = look(cache)
    with pytest.raises(ValueError, match="does not know"):
        with_unknown_argument(model, ids[:, held:], cache)
    if cache.layers[0].torn:
        assert "sink" in spec and held > 2  # a full window off the device
        return
    assert look(cache) == before
    expected = model(ids[:, held:], past_key_values=twin).logits
    torch.testing.assert_close(model(ids[:, held:], past_key_values=cache).logits, expected)
    assert look(cache) == look(twin)
