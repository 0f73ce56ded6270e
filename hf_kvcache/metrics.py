"""How does it look on a dashboard? ``cache.stats()``, ``cache.memory()`` and ``store.stats()`` for Prometheus.

    from hf_kvcache.metrics import export
    export(store, "prompts")
    prometheus_client.start_http_server(9000)

Each field of a stats dataclass becomes one metric, labelled with the name given here: a counter where it only ever
grows, a gauge otherwise. Bytes of a cache come by tier and part. The exporter looks when it is asked and keeps nothing
alive: what is gone is no longer shown. Needs ``pip install hf-kvcache[metrics]``.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

# Fields that say how much there is now; all others only grow while their object lives.
LEVELS = set("entries disk_entries memory_bytes disk_bytes".split())
LEVELS |= set("tokens_seen tokens_kept tokens_evicted tokens_quantized".split())


class Exporter:
    """A collector over caches and stores; ``registry.register`` it, or call ``export``."""

    def __init__(self) -> None:
        self._sources: dict[str, weakref.ref[Any]] = {}

    def add(self, source: Any, name: str) -> None:
        """Show ``source`` (a cache or a store) with the label ``name`` from now on, instead of what had it before."""
        if not hasattr(source, "stats"):
            raise ValueError(f"{type(source).__name__} has no stats(): give a cache or a PrefixStore")
        self._sources[name] = weakref.ref(source)

    def collect(self) -> Iterator[Any]:
        """What a Prometheus registry asks for: metric families, one per field and kind of object."""
        client = _client()
        families: dict[str, Any] = {}
        for labels, field, value, grows in self._samples():
            kind = client.CounterMetricFamily if grows else client.GaugeMetricFamily
            if field not in families:
                families[field] = kind(field, f"{field} of hf_kvcache", labels=list(labels))
            families[field].add_metric(list(labels.values()), value)
        yield from families.values()

    def _samples(self) -> Iterator[tuple[dict[str, str], str, float, bool]]:
        for name, reference in list(self._sources.items()):
            source = reference()
            if source is None:
                del self._sources[name]
                continue
            stats, is_store = source.stats(), not hasattr(source, "memory")
            prefix = "kvcache_store_" if is_store else "kvcache_"
            for field in dataclasses.fields(stats):
                value = getattr(stats, field.name)
                if isinstance(value, (int, float)):
                    yield {"name": name}, prefix + field.name, value, field.name not in LEVELS
            for tier, parts in {} if is_store else source.memory().items():
                for part, size in parts.items():
                    yield {"name": name, "tier": tier, "part": part}, "kvcache_bytes", size, False


def export(source: Any, name: str, registry: Any = None) -> Exporter:
    """Show a cache's or a store's stats under ``name`` in a Prometheus registry (the default one if none is given).

    Raises:
        ImportError: ``prometheus_client`` is not installed.
        ValueError: something without ``stats()``.
    """
    _client()
    if registry is None:
        from prometheus_client import REGISTRY as registry
    exporter = _exporters.get(registry)
    if exporter is None:
        exporter = Exporter()
        registry.register(exporter)
        _exporters[registry] = exporter
    exporter.add(source, name)
    return exporter


_exporters: weakref.WeakKeyDictionary[Any, Exporter] = weakref.WeakKeyDictionary()


def _client() -> Any:
    try:
        from prometheus_client import core
    except ImportError:
        raise ImportError("metrics need prometheus_client: pip install 'hf-kvcache[metrics]'") from None
    return core
