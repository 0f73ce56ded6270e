"""Which cache does this name mean, and what does it hold?

| name | cache |
|---|---|
| `dynamic` | stock `DynamicCache`, the baseline of every table |
| `zeroed` | `DynamicCache` with zeros handed to attention: what a score is worth that reads no cache |
| `stock:fp8`, `stock:hqq8`, `stock:quanto4`, ... | stock `QuantizedCache`: backend, then bits |
| anything else | a spec of `hf_kvcache`: `full`, `int8`, `sink(4,508)`, `int8+sink(4,508)`, ... |

Stock caches do not say what they hold, so their bytes are counted by walking every tensor they reach.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache

BASELINE = "dynamic"
ZEROED = "zeroed"
# backend -> (module it imports, what to install, its advised quantization axis, the bits it takes)
BACKENDS: dict[str, tuple[str, str, int, tuple[int, ...]]] = {
    "hqq": ("hqq", "hqq", 1, (1, 2, 3, 4, 8)),
    "quanto": ("optimum.quanto", "optimum-quanto", 0, (2, 4)),
}


def make_cache(spec: str, config: Any) -> Any:
    """A fresh cache for that name."""
    if spec == BASELINE:
        return DynamicCache(config=config)
    if spec == ZEROED:
        return zeroed(DynamicCache(config=config))
    if spec.startswith("stock:"):
        return _stock(spec, config)
    from hf_kvcache import KVCache

    return KVCache.from_spec(config, spec)


def canonical(spec: str, config: Any) -> str:
    """The one spelling under which a name's results are filed: `fp8` and `fp8_e4m3` are one cache."""
    return getattr(make_cache(spec, config), "spec", spec)


def available(specs: list[str], config: Any) -> list[str]:
    """Canonical names, the baseline first. A stock cache without its backend is a note, ours an error."""
    found = [BASELINE]
    for spec in specs:
        try:
            found.append(canonical(spec, config))
        except ValueError as error:
            if is_ours(spec):
                raise
            print(f"note: left out {spec}: {error}")
    return list(dict.fromkeys(found))


def is_ours(spec: str) -> bool:
    """Whether the name is a spec of hf_kvcache, and so can be read in its stored form."""
    return spec not in (BASELINE, ZEROED) and not spec.startswith("stock:")


def should_compress(spec: str) -> bool:
    """Whether the name promises fewer bytes than the baseline holds."""
    plain = {BASELINE, ZEROED, "full", "all", "device", "cpu"}
    return not all(part in plain or part.startswith("disk") for part in spec.split("+"))


# Retentions that choose tokens by importance, and what of their options `random` shares with them.
POLICIES = ("knorm", "keydiff", "tova", "h2o", "snapkv", "expected")
SHARED = ("budget", "sinks", "recent")


def random_beside(spec: str) -> str | None:
    """The same storage with tokens kept at random, as many of them; None where `spec` keeps all tokens."""
    parts = re.split(r"\+(?![^(]*\))", spec)
    for index, part in enumerate(parts):
        name, _, inside = part.strip().rstrip(")").partition("(")
        options = [option.strip() for option in inside.split(",") if option]
        if name in POLICIES:
            kept = [option for option in options if option.partition("=")[0] in SHARED]
            parts[index] = f"random({','.join(kept)})" if kept else "random"
        elif name == "sink":
            sizes = [int(option.partition("=")[2] or option) for option in options[:2]] or [4, 1020]
            sinks = "" if sizes[0] == 4 else f",sinks={sizes[0]}"  # as the canonical name has it
            parts[index] = f"random(budget={sum(sizes)}{sinks})"
        else:
            continue
        return "+".join(part for part in parts if part.strip() not in ("pyramid", "adaptive"))
    return None


def with_controls(specs: list[str], config: Any) -> list[str]:
    """Canonical names, and behind them what tells a policy from luck: `random` at the same budgets."""
    found = [canonical(spec, config) for spec in specs]
    for control in dict.fromkeys(filter(None, map(random_beside, found))):
        try:
            found.append(canonical(control, config))
        except ValueError as error:
            print(f"note: left out {control}: {error}")
    return list(dict.fromkeys(found))


def use_attention(model: Any, spec: str, implementation: str) -> None:
    """Switch attention for the next forward: `kvcache` reads our caches only, stock ones get a stock one."""
    if implementation == "kvcache":
        import hf_kvcache

        hf_kvcache.register()
        implementation = "kvcache" if is_ours(spec) else stock_attention(model)
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)


def stock_attention(model: Any) -> str:
    """`sdpa`, or `eager` for a model that has none, such as gpt-oss with its learned sinks."""
    return "sdpa" if model._supports_sdpa else "eager"


def _stock(spec: str, config: Any) -> QuantizedCache:
    if spec == "stock:fp8":
        if '"fp8"' not in inspect.getsource(QuantizedCache.__init__):
            raise ValueError("stock:fp8 is not in this transformers; install transformers>=5.24")
        return QuantizedCache("fp8", config)
    known = {f"stock:{name}{bits}": (name, bits) for name, row in BACKENDS.items() for bits in row[3]}
    if spec not in known:
        raise ValueError(f"{spec!r} is unknown; use one of stock:fp8, {', '.join(known)}")
    backend, bits = known[spec]
    module, package, axis, _ = BACKENDS[backend]
    if not _installed(module):
        raise ValueError(f"{spec} needs the package {package}, which is not installed; pip install {package}")
    return QuantizedCache(backend, config, nbits=bits, axis_key=axis, axis_value=axis)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


# ---- what a cache holds ------------------------------------------------------------------------------------


def stored_bytes(cache: Any) -> int:
    """Every byte a cache holds: what it says, or the storages of all tensors reachable from it."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    storages: dict[int, int] = {}
    _walk(cache.layers, storages, {})
    return sum(storages.values())


def _walk(thing: Any, storages: dict[int, int], visited: dict[int, Any]) -> None:
    if id(thing) in visited:
        return
    visited[id(thing)] = thing  # held, so that no id is used twice
    if isinstance(thing, torch.Tensor):
        if hasattr(thing, "__tensor_flatten__"):  # a wrapper, as quanto's: its parts hold the bytes
            for name in thing.__tensor_flatten__()[0]:
                _walk(getattr(thing, name), storages, visited)
        else:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    elif isinstance(thing, dict):
        for value in thing.values():
            _walk(value, storages, visited)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            _walk(value, storages, visited)
    elif type(thing).__module__.startswith("transformers.cache_utils"):
        _walk(vars(thing), storages, visited)


def tokens_kept(cache: Any) -> int:
    """Tokens a full-attention layer still holds: what the cache says, or the most any layer returns."""
    if hasattr(cache, "stats"):
        return int(cache.stats().tokens_kept)
    lengths = []
    for index, layer in enumerate(cache.layers):
        if hasattr(layer, "get_mask_sizes"):  # linear-attention layers have no keys
            lengths.append(cache.get_mask_sizes(1, index)[0] - 1)  # next key length, less the token it brings
    return max(lengths, default=0)


def zeroed(cache: Any) -> Any:
    """The same cache, except that attention is handed zeros: what a broken cache would look like."""
    kind = type(cache)

    def update(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = kind.update(self, *args, **kwargs)
        return torch.zeros_like(keys), torch.zeros_like(values)

    cache.__class__ = type(f"Zeroed{kind.__name__}", (kind,), {"update": update})  # so that copies are zeroed, too
    return cache
