"""How high does memory go while a cache grows? Bytes alive in ``update``, counted operator by operator, never timed."""

from __future__ import annotations

import pytest
import torch
from models import llama, llama_config, prompt
from torch.utils._python_dispatch import TorchDispatchMode

from eval.memory import PeakBytes
from hf_kvcache import KVCache
from hf_kvcache.codecs import CODECS
from hf_kvcache.store import Slab

LAYERS, CHUNK = 4, 64
CPU = torch.device("cpu")
SPECS = (
    "full",
    "int8",
    "fp8(residual=128)",
    "int4",
    "int2",
    "k4v2",
    "int4(group=4,residual=4)",
    "sink(4,508)",
    "int8+sink(4,508)",
    "int4+sink(4,508)",
    "knorm(budget=512)",
    "int8+knorm(budget=512)",
    "int4+knorm(budget=512)",
    "random(budget=512,adaptive)",
)


def worst(spec, width, dtype, tokens=1024, batch=1):
    """The largest of (bytes alive during one forward) / (stored after it + what one layer stores), once 512 tokens
    are held. Keys and values that come are made in between, and count."""
    config = llama_config(LAYERS, hidden_size=2 * width, num_attention_heads=2, num_key_value_heads=2)
    config._attn_implementation = "kvcache"  # nothing is decoded
    cache, found = KVCache.from_spec(config, spec), 0.0
    with torch.no_grad(), PeakBytes(CPU) as peak:
        for start in range(0, tokens, CHUNK):
            peak.bytes = peak._now
            for index, layer in enumerate(cache.layers):
                cache.update(*(torch.randn(batch, 2, CHUNK, width, dtype=dtype) for _ in range(2)), index)
                if "budget" in spec:  # as attention does when it has its output
                    layer.settle(None, None, None)
                else:  # as attention does when it comes
                    layer.catch_up()
            if start >= 512:
                found = max(found, peak.bytes / (cache.nbytes * (1 + 1 / LAYERS)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_u10_chunks_need_a_quarter_more_than_the_cache_and_one_layer(spec, dtype):
    assert worst(spec, 64, dtype) <= (1.28 if spec in ("int2", "k4v2") else 1.25)  # the plain tail is most of these


@pytest.mark.parametrize("spec", ["int4", "int8+sink(4,508)", "knorm(budget=512)"])
def test_u10_small_heads_and_batches(spec):
    """Heads of 8 channels, where numbers and scores weigh as much as keys."""
    assert worst(spec, 8, torch.float32, batch=2) <= 1.25


def test_a_wrapped_ring_is_joined_in_one_copy():
    """What early queries of a chunk still need, and the chunk: as much as the result, and no more."""
    slab, codec = Slab(limit=500, pinned=4), CODECS["full"]
    slab.append(codec.encode(torch.randn(1, 2, 700, 16)))
    new = codec.encode(torch.randn(1, 2, 64, 16))
    with PeakBytes(CPU) as peak:
        joined = slab.last(400, new)
    assert joined.values.shape[2] == 4 + 400 + 64
    assert peak.bytes == joined.values.nbytes


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_encoding_makes_few_copies(bits, axis):
    """In float32: where the values lie on a grid, for 2 bits also rounded; the rest is of codes and metadata."""
    from hf_kvcache.lowbit import GroupedCodec

    x = torch.randn(1, 4, 512, 64)
    with PeakBytes(CPU) as peak:
        GroupedCodec(bits, 32, axis).encode(x)
    assert peak.bytes <= {4: 1.7, 2: 2.9}[bits] * x.nbytes


class Largest(TorchDispatchMode):
    """The most values that the last two axes of any result have, where both are at least ``least`` long."""

    def __init__(self, least):
        super().__init__()
        self.least, self.shape = least, (0, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.dim() > 1 and min(t.shape[-2:]) >= self.least:
                self.shape = max(self.shape, tuple(t.shape[-2:]), key=lambda shape: shape[0] * shape[1])
        return out


@pytest.mark.parametrize("turns", [[1600], [800, 800]], ids=str)
@pytest.mark.parametrize(
    "spec",
    ["full", "int8", "fp8(residual=32)", "int4", "k4v2", "sink(4,508)", "int4+sink(4,252)", "knorm(budget=700)"]
    + ["snapkv(budget=256)", "expected(budget=256)", "int4+keydiff(budget=256)", "int8+cpu"],
)
@torch.no_grad()
def test_no_tensor_of_queries_by_history(spec, turns):
    """Neither scores nor a mask: only leaves of a plan are written out. (Padding comes as a mask that transformers
    made, once for all layers.)"""
    model = llama("kvcache", layers=1)
    cache, pieces = KVCache.from_spec(model.config, spec), prompt(1600, 2).split(turns, 1)
    for ids in pieces[:-1]:
        model(ids, past_key_values=cache)
    with Largest(turns[-1] // 4) as seen:
        model(pieces[-1], past_key_values=cache, logits_to_keep=1)
    rows, keys = seen.shape
    assert rows * keys <= turns[-1] * 1600 // 8, seen.shape
