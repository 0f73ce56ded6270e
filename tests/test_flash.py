"""Plans executed by flash kernels, against attention by definition."""

from __future__ import annotations

import pytest
import torch
from test_plan import random_rules

from hf_kvcache import compat, flash
from hf_kvcache import spec as specs
from hf_kvcache.flash import attend_masked, attend_segments, partial, partial_reference
from hf_kvcache.part import Part
from hf_kvcache.plan import causal, segments
from hf_kvcache.reference import attend_reference


def part(storage: str, tokens: int, heads: int, widths: tuple[int, int], batch: int, seed: int) -> Part:
    g = torch.Generator().manual_seed(seed)
    kept = specs.storage(storage)
    keys, values = (torch.randn(batch, heads, tokens, w, generator=g) for w in widths)
    return Part(kept.key_codec, kept.key_codec.encode(keys), kept.value_codec, kept.value_codec.encode(values))


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """The same values inside a larger buffer full of NaN."""
    room = x.new_full((*x.shape[:2], x.shape[2] + 5, x.shape[3] + 3), float("nan"))
    view = room[:, :, 2 : x.shape[2] + 2, : x.shape[3]]
    view.copy_(x)
    return view


CASES = [
    (["full"], 300, 300, 1, 2, 3, (16, 16)),
    (["full", "int8", "full"], 290, 901, 2, 2, 1, (8, 8)),
    (["int4(group=32)", "full"], 700, 1024 + 64, 1, 1, 4, (24, 24)),
    (["fp8", "int2(group=16)"], 33, 512, 3, 2, 2, (12, 20)),
    (["k4v2(group=16)", "int8"], 40, 2080, 1, 3, 3, (16, 8)),
]


@pytest.mark.parametrize("storages, queries, slots, batch, heads, groups, widths", CASES)
@pytest.mark.parametrize("kind", ["causal", "random"])
@pytest.mark.parametrize("extra", ["", "softcap", "s_aux"])
def test_segments_equal_the_definition(storages, queries, slots, batch, heads, groups, widths, kind, extra):
    share = slots // len(storages) // 32 * 32
    sizes = [share] * (len(storages) - 1)
    sizes.append(slots - sum(sizes))
    parts = [part(s, n, heads, widths, batch, i) for i, (s, n) in enumerate(zip(storages, sizes, strict=True))]
    query = torch.randn(batch, heads * groups, queries, widths[0], generator=torch.Generator().manual_seed(9))
    rules = causal(queries, slots) if kind == "causal" else random_rules(1, queries, slots)
    more = {"softcap": dict(softcap=3.0), "s_aux": dict(s_aux=torch.randn(heads * groups))}.get(extra, {})
    expected = attend_reference(query, parts, 0.3, rules.rows(), **more)
    for out in (
        attend_segments(query, parts, segments(rules), 0.3, **more),
        attend_masked(query, parts, rules.rows_of, 0.3, **more),
    ):
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("heads, own", [(1, 1), (2, 2), (2, 6)])
@pytest.mark.parametrize("additive", [False, True])
def test_masks_per_head_and_queries_that_see_nothing(heads, own, additive):
    g = torch.Generator().manual_seed(3)
    parts, query = [part("full", 90, heads, (8, 8), 2, 0)], torch.randn(2, heads * 3, 70, 8, generator=g)
    mask = torch.rand(2, own if own != 2 else heads, 70, 90, generator=g) > 0.7
    mask[1, :, 5] = False
    if additive:
        mask = torch.randn(mask.shape, generator=g).masked_fill(~mask, torch.finfo(torch.float32).min)
    whole = mask if mask.shape[1] != heads else mask.repeat_interleave(3, 1)
    hidden = whole if not additive else whole.masked_fill(whole < -1e30, float("-inf"))
    out = attend_masked(query, parts, lambda a, b: mask[..., a:b, :], 0.4)
    torch.testing.assert_close(out, attend_reference(query, parts, 0.4, hidden), atol=1e-5, rtol=1e-4)
    assert bool((out[1, :, 5] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_equals_its_reference_in_poisoned_buffers(dtype, masked):
    g = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, h, n, 40, generator=g).to(dtype) for h, n in ((6, 37), (2, 71), (2, 71)))
    bias = torch.randn(2, 1, 37, 71, generator=g).to(dtype) if masked else None
    out, lse = partial(query, poisoned(keys), poisoned(values), 0.2, bias=bias)
    wide = [t.float().repeat_interleave(3, 1) for t in (keys, values)]
    exact, level = partial_reference(query.float(), *wide, 0.2, None if bias is None else bias.float())
    plain = torch.nn.functional.scaled_dot_product_attention(
        query, keys.repeat_interleave(3, 1), values.repeat_interleave(3, 1), bias, scale=0.2
    )
    worst = 2 * (plain.float() - exact).abs().max() + 1e-6
    assert (out.float() - exact).abs().max() <= worst
    torch.testing.assert_close(lse, level, atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=0)


def test_without_a_kernel_the_reference_does_the_work(monkeypatch):
    monkeypatch.setattr(compat, "flash_with_lse", lambda device: None)
    parts, query = [part("int8", 300, 2, (16, 16), 1, 0)], torch.randn(1, 4, 280, 16)
    rules = causal(280, 300)
    out = attend_segments(query, parts, segments(rules), 0.25)
    torch.testing.assert_close(out, attend_reference(query, parts, 0.25, rules.rows()), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("storage", ["int8", "int4(group=32)"])
def test_what_is_decoded_at_a_time_is_bounded(storage, monkeypatch):
    monkeypatch.setattr(flash, "BLOCK", 1 << 14)
    sizes, tokens, width = [], 4096, 32
    kept = part(storage, tokens, 1, (width, width), 1, 0)
    decode = type(kept.value_codec).decode
    monkeypatch.setattr(type(kept.value_codec), "decode", lambda *a: sizes.append((x := decode(*a)).numel()) or x)
    rules = causal(600, tokens)
    attend_segments(torch.randn(1, 2, 600, width), [kept], segments(rules), 0.2)
    assert max(sizes) <= max(1 << 14, 2 * 256 * width) and sum(sizes) >= tokens * width
