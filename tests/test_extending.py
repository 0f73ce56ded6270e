"""A codec and a policy of somebody else's: found by name, planned, saved, read by every attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from models import build, feed, greedy, llama, llama_config, prompt, states

from hf_kvcache import KVCache, plan
from hf_kvcache.codecs import CODECS, Int8
from hf_kvcache.layers import Run
from hf_kvcache.policies import POLICIES, Policy


class Rows(NamedTuple):
    rows: torch.Tensor  # [B, H, n / group, group * D] bfloat16


class BFloat16:
    """Tokens in bfloat16, `group` of them in a row: a state that is like none of the library's."""

    lossless = False

    def __init__(self, name: str, group: int) -> None:
        self.name, self.group = name, group

    def encode(self, x: torch.Tensor) -> Rows:
        batch, heads, tokens, width = x.shape
        return Rows(x.to(torch.bfloat16).reshape(batch, heads, tokens // self.group, self.group * width))

    def decode(self, state: Rows, dtype: torch.dtype) -> torch.Tensor:
        batch, heads, rows, width = state.rows.shape
        return state.rows.reshape(batch, heads, rows * self.group, width // self.group).to(dtype)

    def scores(self, query: torch.Tensor, state: Rows) -> torch.Tensor:
        return query @ self.decode(state, query.dtype).transpose(-1, -2)

    def mix(self, probs: torch.Tensor, state: Rows) -> torch.Tensor:
        return probs @ self.decode(state, probs.dtype)


@pytest.fixture
def codecs(monkeypatch):
    for codec in (BFloat16("bf16", 1), BFloat16("bf16x4", 4)):
        monkeypatch.setitem(CODECS, codec.name, codec)


@pytest.mark.parametrize("attention", ["sdpa", "kvcache"])
@pytest.mark.parametrize(
    ("rest", "full"),
    [
        ("", "full"),
        ("(residual=4)", "full"),
        ("+sink(4,8)", "sink(4,8)"),
        ("+cpu", "cpu"),
        ("(quantize_after=9)+sink(2,9)", "sink(2,9)"),
    ],
)
@pytest.mark.parametrize("name", ["bf16", "bf16x4"])
def test_a_new_codec_goes_through_every_axis(codecs, name, rest, full, attention, tmp_path, monkeypatch):
    """Keys and values are such as bfloat16 holds exactly, so that the codec loses nothing.

    One layer: in a second one, an error of 1e-7 may round to another bfloat16.
    """
    update = KVCache.update

    def rounded(cache, keys, values, *rest, **options):
        return update(cache, keys.bfloat16().float(), values.bfloat16().float(), *rest, **options)

    monkeypatch.setattr(KVCache, "update", rounded)
    model, ids = llama(attention, layers=1), prompt(30)
    cache = KVCache.from_spec(model.config, name + rest)
    assert cache.spec == name + rest and KVCache.from_spec(model.config, cache.spec).spec == cache.spec
    own = feed(model, ids, cache, 1)
    exact = feed(model, ids, KVCache.from_spec(model.config, full), 1)
    assert torch.allclose(own, exact, atol=1e-4)
    other = KVCache.from_spec(model.config, name + rest)
    assert torch.allclose(feed(model, ids, other, 7), own, atol=1e-4)
    assert cache.stats().tokens_quantized > 0
    if "cpu" not in rest:
        cache.save(tmp_path / "c")
        loaded = KVCache.load(tmp_path / "c", model.config)
        assert torch.equal(feed(model, prompt(3), loaded, 1), feed(model, prompt(3), cache, 1))


@pytest.mark.parametrize("name", ["bf16", "bf16x4"])
def test_a_new_codec_is_planned(codecs, name):
    model = llama()
    cache = KVCache.from_spec(model.config, name)
    feed(model, prompt(40), cache)
    assert plan(model.config, context=40, spec=name).cache_bytes == cache.nbytes


def test_options_that_a_new_codec_has_not_are_refused(codecs):
    with pytest.raises(ValueError, match="'bf16' has no option 'rotate': known are skip_layers, sinks, residual"):
        KVCache.from_spec(llama_config(), "bf16(rotate=on)")
    with pytest.raises(ValueError, match="unknown spec part 'bf17': known are full, .*bf16"):
        KVCache.from_spec(llama_config(), "bf17")


def test_kernels_leave_a_new_8_bit_codec_alone(monkeypatch):
    """It inherits from one of ours, but its codes mean something else."""

    class Int6(Int8):
        name, limit = "int6", 31.0

        def to_codes(self, x: torch.Tensor) -> torch.Tensor:
            return x.round_().clamp_(-31, 31).to(torch.int8)

    monkeypatch.setitem(CODECS, "int6", Int6())
    pytest.importorskip("triton")
    cuda = SimpleNamespace(is_cuda=True, dtype=torch.float32, device=torch.device("cpu"))
    token = SimpleNamespace(keys=SimpleNamespace(values=cuda), values=SimpleNamespace(values=cuda))

    def fuses(name):
        run = Run(*KVCache.from_spec(llama_config(), name).storage[1:3])
        run.append(run.encode(*states(3)))
        return run.fuses(token)

    assert fuses("int8") and not fuses("int6")
    model = llama("kvcache")
    one, other = (feed(model, prompt(20), KVCache.from_spec(model.config, name), 1) for name in ("int6", "int8"))
    assert (one - other).abs().max() > 1e-3, "the CPU kernel took it for int8"


class Late(Policy):
    """The later the better, from `start` on."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def score(self, pool: Any) -> torch.Tensor:
        return pool.after(pool.position.clamp_min(self.start).float())


def test_a_new_policy_is_found_and_keeps_what_it_says(monkeypatch):
    monkeypatch.setitem(POLICIES, "late", Late)
    model = build(llama_config())
    cache = KVCache.from_spec(model.config, "int8+late(budget=12,sinks=2,recent=4,start=3)")
    assert cache.spec == "int8+late(budget=12,sinks=2,recent=4,start=3)"
    greedy(model, prompt(30), cache, 5)
    kept = [0, 1, *range(24, 34)]
    assert all(layer.positions.sort(-1)[0].tolist() == [[kept, kept]] for layer in cache.layers)
    with pytest.raises(ValueError, match="'late' cannot take .*known options are budget, .*start"):
        KVCache.from_spec(model.config, "late(stop=3)")
