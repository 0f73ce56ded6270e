"""Tiny random models, and a slow cache that says what every cache of the library should give.

``ReferenceCache`` keeps every token, rounds it the way the named storage rounds (written here a second time, without
the library), and hands out what the retention leaves. ``sink_mask`` is the same retention as an explicit mask.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Cache, LlamaConfig
from transformers.cache_utils import DynamicLayer

from hf_kvcache import KVCache
from hf_kvcache.slots import Ragged

SPECS = ("full", "int8", "fp8", "fp8_e5m2", "sink(2,6)", "int8+sink(2,6)")
KEEPING = SPECS[:4]
EVICTING = SPECS[4:]
LIMITS = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def llama_config(layers: int = 2, **options: Any) -> LlamaConfig:
    """The tiny Llama of the public reports: 4 query heads, 2 KV heads, head size 8."""
    settings: dict[str, Any] = dict(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaConfig(**{**settings, **options})


def build(config: Any, attention: str = "sdpa", seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


@functools.cache
def _llama(layers: int, attention: str, dtype: torch.dtype, seed: int) -> Any:
    return build(llama_config(layers), attention, seed, dtype)


def llama(attention: str = "sdpa", layers: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A shared tiny Llama; do not change it."""
    model = _llama(layers, attention, dtype, seed)
    assert model.config._attn_implementation == attention
    return model


def prompt(length: int, batch: int = 1, vocab: int = 97, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab, (batch, length), generator=generator)


def states(n: int, batch: int = 2, heads: int = 2, width: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    """Random keys and values of ``n`` tokens."""
    shape = (batch, heads, n, width)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


@torch.no_grad()
def feed(model: Any, ids: torch.Tensor, cache: Any, chunk: int | None = None, **options: Any) -> torch.Tensor:
    """Logits of ``ids``, fed in chunks."""
    chunk = chunk or ids.shape[1]
    pieces = [model(piece, past_key_values=cache, **options).logits for piece in ids.split(chunk, 1)]
    return torch.cat(pieces, 1)


def greedy(model: Any, ids: torch.Tensor, cache: Any, new: int = 8, **options: Any) -> torch.Tensor:
    """Token ids, the prompt included, of a greedy ``generate``."""
    return model.generate(
        ids, past_key_values=cache, do_sample=False, max_new_tokens=new, min_new_tokens=new, **options
    )


def reorders(model: Any, cache: Any) -> list[int]:
    """The layers that a beam search of six steps reordered, call by call."""
    calls: list[int] = []
    for index, layer in enumerate(cache.layers):
        original = layer.reorder_cache
        layer.reorder_cache = lambda beams, i=index, f=original: (calls.append(i), f(beams))
    greedy(model, prompt(6), cache, 7, num_beams=3)
    return calls


# -- what is right -----------------------------------------------------------------------------------------------------


def axes(config: Any, spec: str) -> tuple[str, int, int | None]:
    """(storage, sinks, window) of a spec."""
    cache = KVCache.from_spec(config, spec)
    return cache.storage.name, cache.retention.sinks, cache.retention.window


def round_trip(x: torch.Tensor, storage: str) -> torch.Tensor:
    """``x`` as the storage gives it back."""
    if storage == "full":
        return x
    scale = x.float().abs().amax(-1, keepdim=True) / LIMITS[storage]
    scale = torch.where(scale == 0, 1.0, scale)
    codes = x.float() / scale
    codes = codes.round() if storage == "int8" else codes.to(DTYPES[storage]).float()
    return (codes * scale).to(x.dtype)


def low_bits(x: torch.Tensor, over: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each run of ``x`` along ``over`` in 2^bits evenly spaced values, and their step: a bfloat16, rounded up.

    Two bits: at both ends of the run's range, or in the middles of its quarters, whichever is closer to all of it.
    """
    top, unit = 2**bits - 1, {4: 1, 2: 8}[bits]
    low, high = x.amin(over, keepdim=True), x.amax(over, keepdim=True)
    far = torch.maximum(low.abs(), high.abs()) * unit / 32000
    grids = []
    for steps in (top, top + 1 - 1 / unit)[: 2 if bits == 2 else 1]:
        step = torch.maximum((high - low) / steps, far)
        step = torch.where(step < 1e-37, 1.0, step)
        up = step.bfloat16().float()
        up = torch.where(up < step, (up.view(torch.int32) + 0x10000).view(torch.float32), up)  # the next bfloat16
        assert ((up >= step) & (up <= step * 1.01)).all()
        zero = (low / up).round() if steps == top else (((high + low) / (2 * up) - top / 2) * unit).round() / unit
        missed = x / up - zero
        missed = (missed - missed.round().clamp(0, top)).square().sum(over, keepdim=True, dtype=torch.float64)
        grids.append((missed * up.double() ** 2, zero, up))
    better = grids[-1][0] < grids[0][0]
    zero, up = (torch.where(better, grids[-1][i], grids[0][i]) for i in (1, 2))
    return ((x / up - zero).round().clamp(0, top) + zero) * up, up


class ReferenceLayer(DynamicLayer):
    """Every token, rounded once; ``update`` returns those that the new queries attend to, in token order."""

    def __init__(self, storage: str = "full", sinks: int = 0, window: int | None = None) -> None:
        super().__init__()
        self.storage, self.sinks, self.window = storage, sinks, window

    def update(self, key_states, value_states, *args, **kwargs):  # noqa: ANN001
        seen, new = self.get_seq_length(), key_states.shape[2]
        own = 0 if self.storage == "full" else min(max(self.sinks - seen, 0), new)
        rounded = [
            torch.cat([x[:, :, :own], round_trip(x[:, :, own:], self.storage)], 2) for x in (key_states, value_states)
        ]
        everything = super().update(*rounded)
        picked = self.positions(seen, new)
        return tuple(x[:, :, picked] for x in everything)

    def positions(self, seen: int, new: int) -> list[int]:
        """Tokens that at least one of the new queries attends to."""
        total = seen + new
        if self.window is None:
            return list(range(total))
        return [t for t in range(total) if t < self.sinks or seen - t < self.window]

    def reset(self):
        self.__init__(self.storage, self.sinks, self.window)  # older ones only zero what they hold

    def get_mask_sizes(self, query_length):  # noqa: ANN001
        seen = self.get_seq_length()
        held = len(self.positions(seen, query_length))
        return held, seen + query_length - held


class ReferenceCache(Cache):
    def __init__(self, config: Any, spec: str) -> None:
        layers = [ReferenceLayer(*axes(config, spec)) for _ in range(config.num_hidden_layers)]
        super().__init__(layers=layers)


def sink_mask(total: int, sinks: int, window: int | None) -> torch.Tensor:
    """[1, 1, total, total] bool: query p sees token t."""
    query, key = torch.arange(total)[:, None], torch.arange(total)[None]
    seen = key <= query
    if window is not None:
        seen &= (key < sinks) | (query - key < window)
    return seen[None, None]


class RoundedLayer(DynamicLayer):
    """One forward over everything: rounds, and leaves the window to an explicit mask."""

    def __init__(self, storage: str, sinks: int) -> None:
        super().__init__()
        self.storage, self.sinks = storage, sinks

    def update(self, key_states, value_states, *args, **kwargs):  # noqa: ANN001
        own = 0 if self.storage == "full" else self.sinks
        return tuple(
            torch.cat([x[:, :, :own], round_trip(x[:, :, own:], self.storage)], 2) for x in (key_states, value_states)
        )


@torch.no_grad()
def expected_logits(model: Any, ids: torch.Tensor, spec: str) -> torch.Tensor:
    """Logits of one full forward with an explicit 4-D mask; ``model`` runs sdpa."""
    assert model.config._attn_implementation == "sdpa"
    storage, sinks, window = axes(model.config, spec)
    cache = Cache(layers=[RoundedLayer(storage, sinks) for _ in range(model.config.num_hidden_layers)])
    mask = sink_mask(ids.shape[1], sinks, window).expand(ids.shape[0], -1, -1, -1)
    return model(ids, attention_mask=mask, past_key_values=cache).logits


def ragged(part, chosen):
    """The tokens of a part that ``chosen`` [B, H, n] bool marks, head after head."""
    slots = Ragged(part.key_codec, part.value_codec)
    number = torch.arange(chosen.shape[-1], device=chosen.device).expand(chosen.shape)
    slots.fill(part, number[..., None], torch.zeros(chosen.shape, device=chosen.device), chosen)
    return slots.part()
