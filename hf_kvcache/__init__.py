"""KV caches for Hugging Face transformers: less memory, no slow-down, measured cost.

from hf_kvcache import QuantizedCache
cache = QuantizedCache(model.config, "int8")
model.generate(**inputs, past_key_values=cache)
"""

from .attention import register
from .caches import CacheStats, EvictionCache, KVCache, OffloadedCache, QuantizedCache, SinkWindowCache
from .families import trust
from .planner import plan
from .prefix import PrefixStore, StoreStats, content_hash, generate_with_prefix, rewind

__all__ = [
    "CacheStats",
    "EvictionCache",
    "KVCache",
    "OffloadedCache",
    "PrefixStore",
    "QuantizedCache",
    "SinkWindowCache",
    "StoreStats",
    "content_hash",
    "generate_with_prefix",
    "plan",
    "register",
    "rewind",
    "trust",
]
__version__ = "0.1.0"
