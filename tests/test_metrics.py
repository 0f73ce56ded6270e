"""Stats as a dashboard sees them."""

from __future__ import annotations

import gc
import sys

import pytest
from models import feed, llama, prompt

from hf_kvcache import KVCache, PrefixStore
from hf_kvcache.metrics import export


def shown(registry):
    from prometheus_client import generate_latest

    lines = generate_latest(registry).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_caches_and_stores_are_shown_until_they_are_gone():
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    model, ids = llama(), prompt(40)
    cache = KVCache.from_spec(model.config, "int8+sink(2,12)")
    store = PrefixStore(1 << 20)
    export(cache, "chat", registry)
    export(store, "prompts", registry)
    feed(model, ids, cache)
    store.put(ids, cache)
    store.match(prompt(41), namespace="other")
    store.match(ids, leave=0)
    lines = shown(registry)
    assert float(lines['kvcache_tokens_evicted{name="chat"}']) == 26 == cache.stats().tokens_evicted
    size = sum(float(value) for line, value in lines.items() if line.startswith("kvcache_bytes{"))
    assert size == cache.nbytes
    assert float(lines['kvcache_store_hits_total{name="prompts"}']) == 1
    assert float(lines['kvcache_store_misses_total{name="prompts"}']) == 1
    assert float(lines['kvcache_store_tokens_reused_total{name="prompts"}']) == 40
    assert float(lines['kvcache_store_memory_bytes{name="prompts"}']) == store.stats().memory_bytes > 0
    del cache
    gc.collect()
    lines = shown(registry)
    assert not any('name="chat"' in line for line in lines) and any('name="prompts"' in line for line in lines)


def test_what_has_no_stats_is_refused():
    client = pytest.importorskip("prometheus_client")
    with pytest.raises(ValueError, match="int has no stats"):
        export(3, "three", client.CollectorRegistry())


def test_without_the_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"hf-kvcache\[metrics\]"):
        export(PrefixStore(1), "prompts")
