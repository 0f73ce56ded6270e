"""KV caches for Hugging Face transformers: less memory, no slow-down, measured cost.

from hf_kvcache import QuantizedCache
cache = QuantizedCache(model.config, "int8")
model.generate(**inputs, past_key_values=cache)
"""

from .attention import register
from .caches import CacheStats, KVCache, OffloadedCache, QuantizedCache, SinkWindowCache

__all__ = ["CacheStats", "KVCache", "OffloadedCache", "QuantizedCache", "SinkWindowCache", "register"]
__version__ = "0.1.0"
