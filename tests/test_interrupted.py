"""A forward that dies midway: what follows equals the history that was never interrupted, or is one ValueError.

Each seed is one history: a model, a cache, chunks of tokens, and an exception in one of the forwards, between two
modules or inside of what stores tokens. Then somebody retries, rolls back, forks, saves or resets.
"""

from __future__ import annotations

import copy
import functools
import os
import random
from typing import Any

import pytest
import torch
from models import build, llama_config, prompt
from test_caches import gemma3_config, mistral_config, qwen3_next_config

from hf_kvcache import KVCache, compat
from hf_kvcache.caches import OffloadedCache
from hf_kvcache.eviction import EvictionLayer
from hf_kvcache.layers import KVLayer, Run
from hf_kvcache.slots import Slots
from hf_kvcache.store import Slab

HISTORIES = 1000 if os.environ.get("CI") == "true" else 150
MODELS = {
    "llama": functools.partial(llama_config, 3),
    "gemma3": gemma3_config,
    "mistral": mistral_config,
    "qwen3_next": qwen3_next_config,
}
SPECS = [
    "full",
    "int8",
    "fp8",
    "int8(residual=3)",
    "int4(group=4,residual=4,sinks=2)",
    "int2(group=4,residual=0,sinks=1)",
    "k8v4(group=4,residual=2,quantize_after=9)",
    "sink(2,6)",
    "sink(2,40)",
    "int8+sink(2,6)",
    "int4(group=4,residual=2)+sink(1,8)",
    "knorm(budget=10,sinks=2,recent=4)",
    "knorm(budget=60,sinks=2,recent=4)",
    "random(budget=8,sinks=1,recent=3,adaptive)",
    "tova(budget=9,sinks=1,recent=3)",
    "int8+h2o(budget=10,sinks=2,recent=4)",
    "int4(group=4,residual=4)+snapkv(budget=16,sinks=2,recent=4)",
]
EXACT = ("full", "int8", "fp8")  # whatever was fed can be taken back
OURS = ("adaptive", "tova", "h2o", "snapkv")  # policies that need our attention
INSIDE = [
    (Slab, "append"), (Slab, "_write"), (Slab, "_reserve"), (Slab, "drop"), (Slab, "put"),
    (Run, "encode"), (Run, "append"), (Run, "replace"), (KVLayer, "_history"),
    (Slots, "fill"), (Slots, "append"), (Slots, "put"), (EvictionLayer, "_number"), (torch, "cat"),
]  # fmt: skip


class Died(BaseException):
    """As KeyboardInterrupt, nobody catches it by accident."""


@functools.cache
def model_of(kind: str, attention: str) -> Any:
    return build(MODELS[kind](), attention)


def make(rng: random.Random, model: Any, spec: str, folder: Any) -> KVCache:
    place = rng.choice(["device"] * 4 + ["staged", "cpu", "disk"])
    if place == "device" or "adaptive" in spec or model.config.model_type == "mistral":
        return KVCache.from_spec(model.config, spec)
    axes = KVCache.from_spec(model.config, spec)
    options = dict(storage=axes.storage, retention=axes.retention)
    if place == "cpu":
        return OffloadedCache(model.config, **options)
    if place == "staged":
        return OffloadedCache(model.config, _stage=True, **options)
    return OffloadedCache(model.config, directory=folder / "far", **options)


class History:
    """One interrupted history and its twin."""

    def __init__(self, seed: int, folder: Any) -> None:
        self.rng = rng = random.Random(seed)
        kind = rng.choice(["llama"] * 4 + ["gemma3", "mistral", "qwen3_next"])
        if kind == "qwen3_next" and not compat.ASKS_FOR_STATES:  # there, nobody is asked for recurrent states
            kind = "llama"
        self.spec = rng.choice(SPECS)
        ours = any(name in self.spec for name in OURS)
        self.attention = "kvcache" if ours else rng.choice(["sdpa", "kvcache", "eager"])
        self.model, self.folder = model_of(kind, self.attention), folder
        self.batch = rng.choice([1, 1, 2, 3])
        sizes = [rng.choice([1, 1, 2, 3, 5, 8, 11]) for _ in range(rng.randint(1, 5))]
        self.chunks = list(prompt(sum(sizes), self.batch, 90, seed).split(sizes, 1))
        self.padded = self.batch > 1 and self.attention == "kvcache" and kind == "llama" and rng.random() < 0.5
        self.mask = torch.ones(self.batch, sum(sizes), dtype=torch.long)
        if self.padded:
            self.mask[0, : rng.randint(0, sizes[0] - 1)] = 0
        self.at = rng.randrange(len(sizes))
        state = rng.getstate()
        self.twin = make(rng, self.model, self.spec, folder / "twin")
        rng.setstate(state)
        self.cache = make(rng, self.model, self.spec, folder / "own")
        if self.padded and self.twin.placement.offloads and self.twin.retention.evicts:  # refused, and not for this
            self.padded, self.mask = False, torch.ones_like(self.mask)
        self.expected = [self.forward(self.twin, i) for i in range(len(sizes))]
        for i in range(self.at):
            self.forward(self.cache, i)
        self.before = self.cache.get_seq_length()

    @torch.no_grad()
    def forward(self, cache: KVCache, i: int) -> torch.Tensor:
        seen = sum(chunk.shape[1] for chunk in self.chunks[: i + 1])
        given = {"attention_mask": self.mask[:, :seen]} if self.padded else {}
        logits = self.model(self.chunks[i], past_key_values=cache, **given).logits
        real = self.mask[:, seen - self.chunks[i].shape[1] : seen].bool()
        return logits[real]

    def die(self, patch: pytest.MonkeyPatch) -> bool:
        """An exception in forward ``at``; whether there was one."""
        with patch.context() as within:
            handle = self._between() if self.rng.random() < 0.6 else self._inside(within)
            try:
                self.forward(self.cache, self.at)
            except Died:
                return True
            finally:
                if handle is not None:
                    handle.remove()
        return False

    def _between(self) -> Any:
        layers = self.model.model.layers
        layer = self.rng.choice(list(layers))
        module = layer.mlp if self.rng.random() < 0.6 else layer

        def fail(*_: Any) -> None:
            raise Died

        return module.register_forward_pre_hook(fail)

    def _inside(self, within: pytest.MonkeyPatch) -> None:
        owner, name = self.rng.choice(INSIDE)
        real, after, count = getattr(owner, name), self.rng.random() < 0.5, self.rng.randint(1, 12)
        calls = iter(range(1, 10**6))

        def fail(*args: Any, **kwargs: Any) -> Any:
            now = next(calls) == count
            if now and not after:
                raise Died
            out = real(*args, **kwargs)
            if now:
                raise Died
            return out

        within.setattr(owner, name, fail)

    def go_on(self, cache: KVCache, start: int) -> None:
        """Everything from chunk ``start`` on, as if nothing had happened."""
        for i in range(start, len(self.chunks)):
            torch.testing.assert_close(self.forward(cache, i), self.expected[i], atol=2e-5, rtol=1e-5)

    def lengths(self) -> set[int]:
        return {layer.get_seq_length() for layer in self.cache.layers if hasattr(layer, "get_seq_length")}


def refused(call: Any) -> bool:
    """Whether ``call`` raises one ValueError that names a way out."""
    try:
        call()
    except ValueError as error:
        text = str(error)
        assert "\n" not in text and ("reset()" in text or "rollback(" in text), text
        assert "layer" in text and ("differ" in text or "interrupted" in text), text
        return True
    return False


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_an_interrupted_history_equals_an_uninterrupted_one_or_is_refused(seed, tmp_path, monkeypatch):
    history = History(seed, tmp_path)
    cache, n = history.cache, history.chunks[history.at].shape[1]
    if not history.die(monkeypatch):
        return history.go_on(cache, history.at + 1)
    uneven = refused(cache.fork)
    if not uneven and max(history.lengths()) == history.before + n and history.rng.random() < 0.5:
        return history.go_on(cache, history.at + 1)  # it died after its last attention: nothing to do again
    action = history.rng.choice(["retry", "rollback", "further", "fork", "save", "rows", "reset", "copy", "ask"])
    if action == "copy":
        cache = history.cache = copy.deepcopy(cache)
        action = history.rng.choice(["retry", "rollback"])
    if action in ("fork", "save", "rows"):
        calls = {
            "fork": cache.fork,
            "save": lambda: cache.save(tmp_path / "file"),
            "rows": lambda: cache.reorder_cache(torch.arange(history.batch)),
        }
        assert refused(calls[action]) == uneven
        action = "rollback" if uneven else "retry"
    if action == "ask":  # questions are answered, whatever there is
        assert cache.nbytes >= 0 and cache.memory() and cache.stats() and repr(cache) and list(cache)
        cache.can_rollback(n)
        assert refused(lambda: cache.get_mask_sizes(3, 0)) == uneven  # with that a forward begins
        action = "retry"
    start, lost = history.at, 0
    if not uneven and max(history.lengths()) == history.before + n and action == "retry":
        action = "rollback"
    if action == "further":
        start = history.rng.randint(0, history.at)
        lost = sum(chunk.shape[1] for chunk in history.chunks[start : history.at])
        action = "rollback"
    if action == "rollback":
        longest = max(history.lengths())
        if longest == history.before and not uneven:  # every layer is where it was
            n = 0
        if longest not in (history.before, history.before + n) or n + lost > longest:
            n = longest - history.before
        try:
            cache.rollback(n + lost)
            start = start if cache.get_seq_length() else 0  # all that attention has counted
        except ValueError as error:
            assert "\n" not in str(error) and "layer" in str(error)
            easy = history.spec in EXACT and history.model.config.model_type == "llama"
            assert not easy or "interrupted" in str(error), error
            action = "reset"
    if action == "reset":
        cache.reset()
        return history.go_on(cache, 0)
    outcome: list[bool] = []
    if refused(lambda: outcome.append(history.go_on(cache, start) is None)):
        cache.reset()
        history.go_on(cache, 0)
