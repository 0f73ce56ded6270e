"""A rollback equals a history that was never longer, or it is refused with what would be exact."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from models import build, feed, llama_config, prompt, states

from hf_kvcache import KVCache

SPECS = [
    "full",
    "int8",
    "int8(residual=5)",
    "int4(residual=8,group=8)",
    "int4(residual=0,group=8,sinks=3)",
    "k8v2(residual=4,group=8,quantize_after=20)",
    "int2(residual=8,group=8)+sink(2,16)",
    "int8+sink(2,16)",
]


def filled(spec, keys, values, n):
    cache = KVCache.from_spec(llama_config(1), spec)
    cache.update(keys[:, :, :n], values[:, :, :n], 0)
    return cache


def content(cache):
    layer = cache.layers[0]
    return layer.keys, layer.values


@pytest.mark.parametrize("seen", [1, 19, 45])
@pytest.mark.parametrize("spec", SPECS)
def test_every_rollback_is_exact_or_refused_with_what_is(spec, seen):
    keys, values = states(60)
    cache = filled(spec, keys, values, seen)
    allowed = []
    for tokens in range(seen + 1):
        one = copy.deepcopy(cache)
        assert one.can_rollback(tokens) == cache.can_rollback(tokens)
        if not one.can_rollback(tokens):
            with pytest.raises(ValueError, match="evicted|sealed") as refusal:
                one.rollback(tokens)
            assert one.get_seq_length() == seen and torch.equal(content(one)[0], content(cache)[0])
            continue
        one.rollback(tokens)
        allowed.append(tokens)
        left = seen - tokens
        one.update(keys[:, :, left : left + 2], values[:, :, left : left + 2], 0)
        direct = filled(spec, keys, values, left) if left else KVCache.from_spec(llama_config(1), spec)
        direct.update(keys[:, :, left : left + 2], values[:, :, left : left + 2], 0)
        assert all(torch.equal(a, b) for a, b in zip(content(one), content(direct), strict=True))
    if len(allowed) < seen + 1 and "sink(" not in spec:
        exact = int(re.search(r"up to (\d+) tokens", str(refusal.value))[1])
        assert allowed[: exact + 1] == list(range(exact + 1)) and exact + 1 not in allowed


def test_whole_groups_come_back_without_a_residual():
    keys, values = states(60)
    cache = filled("int4(residual=0,group=8,sinks=3)", keys, values, 45)
    assert [n for n in range(46) if cache.can_rollback(n)] == [0, 1, 2, 10, 18, 26, 34, 42, 43, 44, 45]
    with pytest.raises(ValueError, match="up to 2 tokens, or back to a multiple of 8 after 3"):
        cache.rollback(3)


def test_an_evicted_token_names_how_many_are_gone():
    cache = filled("sink(2,16)", *states(60), 30)
    with pytest.raises(ValueError, match=r"crop\(-1\): layer 0 has evicted 12 tokens.*fork\(\)"):
        cache.rollback(1)


def test_a_recurrent_state_is_named_and_nothing_changes():
    from test_caches import qwen3_next_config

    model = build(qwen3_next_config())
    cache = KVCache.from_spec(model.config, "int8")
    feed(model, prompt(9), cache)
    full = next(layer for layer in cache.layers if hasattr(layer, "sealed"))
    before = full.keys
    assert not cache.can_rollback(1) and cache.can_rollback(0)
    with pytest.raises(ValueError, match="recurrent state, which cannot go back; fork"):
        cache.rollback(1)
    assert cache.get_seq_length() == 9 and torch.equal(full.keys, before)
