"""The compiled kernel against the reference, at every level that this machine can run; its builder; the way around it.

Tolerance: both sides add float32 numbers, in different orders. An element may be off by 1e-5 of the largest output.
"""

from __future__ import annotations

import os
import shutil
import stat
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build, feed, llama_config, prompt, ragged, states

import hf_kvcache
from hf_kvcache import KVCache, cpu_build, cpu_decode, reference
from hf_kvcache.attention import attend
from hf_kvcache.codecs import ALWAYS, CODECS, Plain, find_codec
from hf_kvcache.lowbit import GroupedCodec
from hf_kvcache.part import Part, map_state, narrow
from hf_kvcache.reference import attend_reference, attend_torch

BUILT = cpu_decode.load()
LEVELS = cpu_decode.levels(BUILT.path) if BUILT else {}
needs_kernel = pytest.mark.skipif(
    BUILT is None, reason="the CPU kernel is not built: run python -m hf_kvcache.cpu_build (needs a C compiler)"
)
FORMATS = {
    **CODECS,
    "int8 rotated": find_codec("int8").rotating(ALWAYS),
    "fp8 rotated": find_codec("fp8").rotating(ALWAYS),
    "int4 channel": GroupedCodec(4, 32, "channel"),
    "int2 channel": GroupedCodec(2, 32, "channel"),
    "int4 token": GroupedCodec(4, 32, "token"),
    "int2 token": GroupedCodec(2, 32, "token"),
    "int4 channel rotated": GroupedCodec(4, 32, "channel", ALWAYS),
    "int2 token rotated": GroupedCodec(2, 32, "token", ALWAYS),
}


@pytest.fixture(params=list(LEVELS) or ["none"])
def level(request, monkeypatch):
    """The kernel as compiled for one instruction set."""
    if request.param == "none":
        pytest.skip(needs_kernel.kwargs["reason"])
    monkeypatch.setattr(cpu_decode, "load", lambda: LEVELS[request.param])
    return request.param


def test_ci_tests_the_kernel():
    """Where there is a compiler, an install that did not build the kernel would skip all of the below."""
    if os.environ.get("CI") != "true" or not shutil.which(os.environ.get("CC", "cc")):
        pytest.skip("only under CI=true, and where there is a C compiler")
    assert BUILT is not None, cpu_decode.status()


# -- reading -----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    tokens: int = 96
    widths: tuple[int, int] = (64, 64)
    groups: int = 3
    queries: int = 1
    batch: int = 1
    heads: int = 2
    dtype: torch.dtype = torch.float32


def poisoned(state: Any) -> Any:
    """The state as views of larger slabs: NaN, or the largest code where a format has none, in the spare rows."""

    def grow(t: torch.Tensor) -> torch.Tensor:
        garbage = float("nan") if t.is_floating_point() else 127  # 0x7F is NaN in both 8-bit floats
        slab = torch.full((*t.shape[:2], t.shape[2] + 5, *t.shape[3:]), garbage, dtype=t.dtype)
        slab[:, :, : t.shape[2]] = t
        return slab

    return narrow(map_state(state, grow), 0, state[0].shape[2])


def make_part(case: Case, keys: str, values: str) -> Part:
    def encoded(name: str, width: int) -> Any:
        sizes = torch.rand(case.tokens, 1) * 3 + 0.1  # scales differ by token
        x = torch.randn(case.batch, case.heads, case.tokens, width) * sizes
        return poisoned(FORMATS[name].encode(x.to(case.dtype)))

    return Part(FORMATS[keys], encoded(keys, case.widths[0]), FORMATS[values], encoded(values, case.widths[1]))


def make_query(case: Case) -> torch.Tensor:
    """As projections come: [B, Q, Hq, D] in memory."""
    shape = (case.batch, case.queries, case.heads * case.groups, case.widths[0])
    return torch.randn(shape).to(case.dtype).transpose(1, 2)


def check(query: torch.Tensor, parts: list[Part], mask: Any = None, softcap: Any = None, s_aux: Any = None) -> Any:
    scaling = query.shape[-1] ** -0.5
    assert cpu_decode.supports(query, parts, mask, softcap, s_aux)
    got = cpu_decode.attend_compiled(query, parts, scaling, mask, softcap, s_aux)
    want = attend_reference(query.float(), parts, scaling, mask, softcap, s_aux)
    assert got.dtype == query.dtype and got.shape == want.shape and got.isfinite().all()
    step = 0 if query.dtype == torch.float32 else torch.finfo(query.dtype).eps
    largest = want.abs().max().item() if want.numel() else 0
    torch.testing.assert_close(got.float(), want, atol=1e-5 * largest, rtol=step)
    check_mass(query, parts, mask, softcap, s_aux, got)
    return got


def check_mass(query: torch.Tensor, parts: list[Part], mask: Any, softcap: Any, s_aux: Any, out: torch.Tensor) -> None:
    """What each key got is added to what is there, and changes no bit of the output."""
    shape = (query.shape[0], parts[0].keys[0].shape[1], sum(part.tokens for part in parts))
    before = torch.rand(shape)
    mass, want = before.clone(), torch.zeros(shape)
    if not shape[2]:
        return
    again = cpu_decode.attend_compiled(query, parts, query.shape[-1] ** -0.5, mask, softcap, s_aux, mass)
    attend_torch(query.float(), parts, query.shape[-1] ** -0.5, mask, softcap, s_aux, want)
    assert torch.equal(again, out)
    torch.testing.assert_close(mass - before, want, atol=1e-5 * query.shape[2], rtol=1e-4)


@pytest.mark.parametrize("keys", FORMATS)
def test_every_pair_of_formats(level, keys):
    case = Case(batch=2)
    tail = make_part(case._replace(tokens=7), "full", "full")
    for values in FORMATS:
        check(make_query(case), [make_part(case, keys, values), tail])


@pytest.mark.parametrize("name", ["full", "int8", "fp8_e4m3", "int8 rotated"])
@pytest.mark.parametrize("heads", [1, 3])
def test_heads_of_different_lengths(level, name, heads):
    """One of them empty; nothing of the neighbours is read, and a mask goes by slots."""
    case = Case(batch=3, heads=heads, queries=2, tokens=150)
    part, tail, query = (
        make_part(case, name, name),
        make_part(case._replace(tokens=5), "full", "full"),
        make_query(case),
    )
    chosen = torch.rand(3, heads, 150) < torch.rand(3, heads, 1)
    chosen[0, -1] = False
    run = ragged(part, chosen)
    want = attend_reference(query, [part, tail], 0.125, shown(chosen, case.groups, 5))
    torch.testing.assert_close(cpu_decode.attend_compiled(query, [run, tail], 0.125), want, atol=1e-5, rtol=1e-5)
    first = chosen & (chosen.cumsum(-1) <= 3)
    slots = (torch.arange(run.tokens) < 3).expand(3, heads, -1)
    want = attend_reference(query, [part, tail], 0.125, shown(first, case.groups, 5))
    mass = torch.zeros(3, heads, run.tokens + 5)
    got = cpu_decode.attend_compiled(query, [run, tail], 0.125, shown(slots, case.groups, 5), mass=mass)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    slots = slots & (torch.arange(run.tokens) < run.sizes[..., None])
    want = torch.zeros_like(mass)
    attend_torch(query, [run, tail], 0.125, shown(slots, case.groups, 5), mass=want)
    assert not mass[..., : run.tokens][~slots].any()
    torch.testing.assert_close(mass, want, atol=1e-5, rtol=1e-4)


def shown(chosen, groups, more):
    """A mask [B, Hq, 1, n + more] that shows the chosen tokens and all of the others."""
    return torch.nn.functional.pad(chosen.repeat_interleave(groups, 1), (0, more), value=True)[:, :, None]


@pytest.mark.parametrize("groups, queries, batch", [(1, 1, 1), (3, 1, 3), (4, 5, 1), (8, 1, 1), (16, 16, 1), (5, 3, 2)])
@pytest.mark.parametrize("tokens", [0, 1, 63, 129, 1000])
def test_odd_lengths(level, tokens, groups, queries, batch):
    case = Case(tokens, (32, 32), groups, queries, batch, 1)
    out = check(make_query(case), [make_part(case, "int8", "fp8_e4m3")])
    assert tokens or not out.any()


@pytest.mark.parametrize("widths", [(5, 5), (32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (13, 40), (96, 16)])
@pytest.mark.parametrize("name", FORMATS)
def test_head_sizes(level, name, widths):
    case = Case(64, widths, 2, 2)
    check(make_query(case), [make_part(case, name, name)])


@pytest.mark.parametrize("bits, group", [(4, 2), (4, 6), (2, 4), (2, 12), (4, 64), (2, 128)])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_group_sizes(level, bits, group, axis):
    codec = GroupedCodec(bits, group, axis)
    keys, values = torch.randn(2, 1, 2 * group, 40), torch.randn(2, 1, 2 * group, 24)
    part = Part(codec, codec.encode(keys), codec, codec.encode(values))
    check(torch.randn(2, 3, 2, 40), [part, part.block(0, group)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["full", "int8 rotated", "int4 channel", "int2 token rotated"])
def test_half_precision(level, name, dtype):
    """Computed in float32, rounded once: within one unit in the last place of the rounded reference."""
    case = Case(200 // 32 * 32, queries=4, batch=2, dtype=dtype)
    check(make_query(case), [make_part(case, name, name)])


def test_a_mask_per_kv_head(level):
    """[B, H, q, n]: one for all query heads that share a KV head."""
    case = Case(129, (32, 32), 3, 2, 2)
    query, parts, mask = make_query(case), [make_part(case, "int8", "int8")], torch.rand(2, 2, 2, 129) > 0.5
    got = cpu_decode.attend_compiled(query, parts, 0.2, mask)
    want = attend_reference(query, parts, 0.2, mask.repeat_interleave(3, 1))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (3, 6), (1, 6)])
@pytest.mark.parametrize("queries, rows", [(1, 1), (5, 5), (5, 1)])
@pytest.mark.parametrize("kind", ["bool", "float", "-inf", "half", "strided"])
def test_masks(level, shape, queries, rows, kind):
    case = Case(129, (32, 32), 3, queries, 3)
    mask = torch.rand(*shape, rows, 129) > 0.5
    if kind == "strided":
        mask = (torch.rand(129, rows, *shape) > 0.5).permute(2, 3, 1, 0)
    elif kind == "float":
        mask = torch.randn(*shape, rows, 129)
    elif kind != "bool":
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        mask = mask.half() if kind == "half" else mask
    check(make_query(case), [make_part(case, "int8", "int8")], mask)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_fully_hidden_rows_give_zeros(level, additive, sinks):
    case = Case(70, (32, 32), 3, 4, 2)
    mask = torch.rand(2, 1, 4, 70) > 0.5
    mask[0, :, 1] = mask[1, :, 3] = False
    mask[0, :, 2, :64] = False  # nothing in the first tile
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    out = check(make_query(case), [make_part(case, "int8", "full")], mask, None, torch.randn(6) if sinks else None)
    assert not out[0, :, 1].any() and not out[1, :, 3].any() and (out[0, :, 0] != 0).any()


@pytest.mark.parametrize("softcap, sinks", [(5.0, False), (None, True), (5.0, True)])
def test_softcap_and_learned_sinks(level, softcap, sinks):
    case = Case(129, (32, 32), 3, 5)
    query = make_query(case)
    parts = [make_part(case._replace(tokens=4), "full", "full"), make_part(case, "int8", "int8")]
    aux = (torch.randn(6) + 20).bfloat16() if sinks else None
    mask = torch.rand(1, 1, 5, 133) > 0.5
    out = check(query * 4, parts, mask, softcap, aux)
    assert (out - cpu_decode.attend_compiled(query * 4, parts, 32**-0.5, mask)).abs().max() > 0.05


@needs_kernel
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_anything_goes(data):
    """Fresh random shapes, formats, parts, masks and threads."""
    pick = lambda *options: data.draw(st.sampled_from(options))  # noqa: E731
    torch.manual_seed(data.draw(st.integers(0, 9999)))
    widths = pick(8, 17, 64, 80, 128), pick(8, 17, 64, 80, 128)
    case = Case(0, widths, pick(1, 2, 3, 4, 7, 8), pick(1, 1, 2, 5, 9), pick(1, 2), pick(1, 3))
    parts = []
    for _ in range(pick(1, 2, 3)):
        keys, values = pick(*FORMATS), pick(*FORMATS)
        group = max(FORMATS[keys].group, FORMATS[values].group)
        tokens = group * (pick(0, 1, 2, 7) if group > 1 else pick(1, 9, 64, 200))
        parts.append(make_part(case._replace(tokens=tokens), keys, values))
    tokens = sum(part.tokens for part in parts)
    mask = torch.rand(pick(1, case.batch), pick(1, case.heads * case.groups), pick(1, case.queries), tokens) > 0.3
    aux = torch.randn(case.heads * case.groups) if pick(True, False) else None
    share = cpu_decode._share
    try:
        threads, splits = pick(1, 2, 3), pick(1, 2, 5)
        cpu_decode._share = lambda *_: (threads, splits)
        check(make_query(case), parts, pick(None, mask, mask.float()), pick(None, 8.0), aux)
    finally:
        cpu_decode._share = share


def test_splits_and_threads(level, monkeypatch):
    """Several threads: the same result to rounding, and the same bits each time."""
    monkeypatch.setattr(cpu_decode, "ALONE", 0)
    monkeypatch.setattr(cpu_decode, "PIECE", 64)
    case = Case(1024)
    query = make_query(case)
    parts = [make_part(case, "int8 rotated", "int2 token rotated"), make_part(case, "full", "full")]
    alone = check(query, parts)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert cpu_decode._share(2, 2048, 1) == (3, 6)
        shared = check(query, parts)
        assert all(torch.equal(cpu_decode.attend_compiled(query, parts, 0.125), shared) for _ in range(20))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(shared, alone, atol=5e-6, rtol=1e-5)


def test_what_is_not_a_number_is_carried_through(level):
    """``full`` refuses nothing: NaN and infinity come out where the reference has them."""
    for bad in (float("nan"), float("inf")):
        keys, values = torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16)
        keys[0, 0, 66, 3] = bad
        part = Part(CODECS["full"], Plain(keys), CODECS["full"], Plain(values))
        out = cpu_decode.attend_compiled(torch.ones(1, 2, 1, 16), [part], 1.0)
        assert out[0, 0].isnan().all() and out[0, 1].isfinite().all()


@needs_kernel
def test_scores_are_kept_within_bounds(monkeypatch):
    """Where many queries' scores would not be, torch does it, some queries at a time."""
    case = Case(70, (32, 32), queries=4)
    query, parts = make_query(case), [make_part(case, "int8", "int8")]
    calls = counted(monkeypatch, "try_attend")
    mass, want = torch.zeros(2, 1, 2, 70)
    attend_torch(query, parts, 0.2, mass=want)
    monkeypatch.setattr(reference, "ROWS", 6 * 4 * 70 - 1)
    attend(query, parts, 0.2, mass=mass)
    assert not calls and (mass - want).abs().max() < 1e-5
    attend(query[:, :, :1], parts, 0.2, mass=mass)
    monkeypatch.setattr(reference, "ROWS", 6 * 4 * 70)
    attend(query, parts, 0.2, mass=mass)
    assert calls == [1, 1]


def test_large_and_tiny_numbers(level):
    case = Case(70, (32, 32))
    part = make_part(case, "int8", "int8")
    part.values.scale[:, :, ::2] *= 1e-30
    query = make_query(case) * 1e4
    got, want = (f(query, [part], 1.0) for f in (cpu_decode.attend_compiled, attend_reference))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-5)


@needs_kernel
def test_what_is_not_supported():
    case = Case(9)
    part, query = make_part(case, "int8", "int8"), make_query(case)
    supports = cpu_decode.supports
    assert supports(query, [part])
    assert not supports(torch.randn(1, 6, 17, 64), [part])
    assert not supports(query.double(), [part])
    assert not supports(torch.randn(1, 6, 1, 128)[..., ::2], [part])
    assert not supports(query, [part], torch.ones(1, 1, 1, 8, dtype=torch.bool))
    assert not supports(query.detach().requires_grad_(), [part])
    assert not supports(query.to("meta"), [part])
    with torch.no_grad():
        assert supports(query.detach().requires_grad_(), [part])

    class Other:
        name, lossless, group = "other", False, 1

    assert not supports(query, [part._replace(key_codec=Other())])


def counted(monkeypatch, name: str) -> list[int]:
    """Calls of one function of the kernel's launcher that returned something."""
    calls: list[int] = []
    real = getattr(cpu_decode, name)

    def wrapper(*args: Any) -> Any:
        out = real(*args)
        calls.append(int(out is not None))
        return out

    monkeypatch.setattr(cpu_decode, name, wrapper)
    return calls


@needs_kernel
def test_attend_takes_it_for_decode_and_only_then(monkeypatch):
    case = Case(40)
    part, query = make_part(case, "int8", "int8"), make_query(case)
    calls = counted(monkeypatch, "try_attend")
    expected = attend_reference(query, [part], 0.125)
    torch.testing.assert_close(attend(query, [part], 0.125), expected, atol=5e-6, rtol=1e-5)
    assert calls == [1]
    attend(make_query(case._replace(queries=17)), [part], 0.125)
    assert calls == [1]
    hf_kvcache.register(compiled=False)
    try:
        out = attend(query, [part], 0.125)
        assert calls == [1, 0] and torch.equal(out, attend_torch(query, [part], 0.125))
        hf_kvcache.register()
        assert cpu_decode.status() == "compiled kernel: turned off"
    finally:
        hf_kvcache.register(compiled=True)
    assert str(BUILT.path) in cpu_decode.status()


@needs_kernel
def test_gradients_go_around_it():
    case = Case(9)
    part, query = make_part(case, "int8", "int8"), make_query(case).detach().requires_grad_()
    attend(query, [part], 0.125).sum().backward()
    assert query.grad.abs().max() > 0


# -- writing -----------------------------------------------------------------------------------------------------------


def hard_rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    """[2, 3, 50, width]: sizes over many orders, zeros, rows whose scale underflows, ties between codes."""
    x = torch.randn(2, 3, 50, width) * torch.logspace(-3, 2, 50)[:, None]
    x[0, 0, 0] = 0
    x[0, 0, 1] = -0.0
    x[0, 1] *= 1e-6
    x[0, 2, :3] *= 1e-42
    x[1, 0] *= torch.rand(50, width) ** 20
    x[1, 1, :, 0] = 127
    x[1, 1, :, 1:] = torch.randint(-120, 120, (50, width - 1)) + 0.5
    x[1, 2, :, 0] = 448
    x[1, 2, :, 1:] = torch.randint(-200, 200, (50, width - 1)) * 2.0 ** torch.randint(-12, 1, (50, width - 1))
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keys, values", [("int8", "fp8_e4m3"), ("fp8_e5m2", "int8"), ("int8 rotated", "full")])
def test_append_writes_the_bits_of_encode(level, keys, values, dtype):
    codecs = FORMATS[keys], FORMATS[values]
    x = hard_rows(36, dtype), hard_rows(21, dtype)
    slabs = []
    for codec, rows in zip(codecs, x, strict=True):
        like = codec.encode(rows[:, :, :1])
        slabs.append(map_state(like, lambda t: torch.full((2, 3, 60, t.shape[3]), 77).to(t.dtype)))
    for t in range(50):
        rows = [r[:, :, t : t + 1].transpose(1, 2).contiguous().transpose(1, 2) for r in x]
        wants = [codec.encode(r) for codec, r in zip(codecs, rows, strict=True)]
        assert cpu_decode.append(*rows, codecs, tuple(slabs), (t + 7, t + 7)) is None
        for slab, want in zip(slabs, wants, strict=True):
            for mine, expected in zip(slab, want, strict=True):
                assert torch.equal(mine[:, :, t + 7 : t + 8].view(torch.uint8), expected.view(torch.uint8))
    for slab in slabs:
        assert all((t[:, :, :7] == 77).all() and (t[:, :, 57:] == 77).all() for t in slab)


@needs_kernel
@pytest.mark.parametrize("spec", ["full", "int8", "fp8", "fp8_e5m2", "int8+sink(2,9)", "int8(sinks=3)", "sink(2,9)"])
@pytest.mark.parametrize("head", [8, 64])
def test_decode_steps_store_the_same_bytes(spec, head, monkeypatch):
    """Thirty steps with the kernel and without it: slabs, counters and decoded tensors agree to the last bit."""
    config = llama_config(1, head_dim=head)
    config._attn_implementation = "kvcache"
    calls, caches = counted(monkeypatch, "append"), []
    inputs = [states(7, width=head)] + [states(1, width=head) for _ in range(30)]
    for compiled in (True, False):
        hf_kvcache.register(compiled=compiled)
        try:
            caches.append(KVCache.from_spec(config, spec))
            for pair in inputs:
                caches[-1].update(*pair, 0)
        finally:
            hf_kvcache.register(compiled=True)
    assert len(calls) == 30  # and none of them by the second cache
    one, two = (cache.layers[0] for cache in caches)
    assert (one.seen, one.kept, caches[0].nbytes) == (two.seen, two.kept, caches[1].nbytes)
    for a, b in zip(one.runs, two.runs, strict=True):
        for left, right in zip(a.slabs, b.slabs, strict=True):
            assert left.appended == right.appended and (left.state is None) == (right.state is None)
            if left.state is not None:
                assert all(torch.equal(x, y) for x, y in zip(left.view(), right.view(), strict=True))


@needs_kernel
@pytest.mark.parametrize("spec", ["int4(residual=5,group=4)", "int8(residual=3)", "k4v2(group=8,residual=2)"])
def test_decode_steps_of_storages_with_a_tail(spec, monkeypatch):
    config = llama_config(1)
    config._attn_implementation = "kvcache"
    calls, layers = counted(monkeypatch, "append"), []
    inputs = [states(9)] + [states(1) for _ in range(30)]
    for compiled in (True, False):
        hf_kvcache.register(compiled=compiled)
        try:
            cache = KVCache.from_spec(config, spec)
            for pair in inputs:
                cache.update(*pair, 0)
            layers.append(cache.layers[0])
        finally:
            hf_kvcache.register(compiled=True)
    assert torch.equal(layers[0].keys, layers[1].keys) and torch.equal(layers[0].values, layers[1].values)
    assert len(calls) >= 10 or spec == "int8(residual=3)"  # there, each step seals a token


@needs_kernel
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("spec", ["int8", "int8(residual=9)", "int4(residual=8,group=8,sinks=0)"])
def test_what_is_not_finite_is_refused_and_nothing_written(spec, side, bad):
    cache = KVCache.from_spec(llama_config(1), spec)
    cache.update(*states(5), 0)
    before = cache.layers[0].keys.clone()
    pair = states(1)
    pair[side][1, 1, 0, 3] = bad
    with pytest.raises(
        ValueError, match=f"layer 0: non-finite {('keys', 'values')[side]} cannot be stored as {spec[:4]}"
    ):
        cache.update(*pair, 0)
    assert cache.get_seq_length() == 5 and torch.equal(cache.layers[0].keys, before)
    pair[side][1, 1, 0, 3] = 0
    cache.update(*pair, 0)
    assert cache.get_seq_length() == 6
    full = KVCache(llama_config(1))
    pair[side][1, 1, 0, 3] = bad
    full.update(*states(5), 0)
    full.update(*pair, 0)  # carried through


@needs_kernel
@pytest.mark.parametrize("spec", ["full", "int8", "fp8", "int4(residual=8,group=8)", "int8+sink(2,20)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_through_a_model(spec, dtype):
    """Tokens fed one by one, and in chunks of five, with and without the kernel."""
    model, ids = build(llama_config(2, head_dim=64), "kvcache", dtype=dtype), prompt(40, 2)
    logits = []
    for compiled in (True, False):
        hf_kvcache.register(compiled=compiled)
        try:
            cache = KVCache.from_spec(model.config, spec)
            pieces = [(ids[:, :10], None), (ids[:, 10:25], 5), (ids[:, 25:], 1)]
            logits.append(torch.cat([feed(model, piece, cache, chunk) for piece, chunk in pieces], 1))
        finally:
            hf_kvcache.register(compiled=True)
    scale = logits[1].abs().max()
    assert (logits[0] - logits[1]).abs().mean() <= (1e-5 if dtype == torch.float32 else 2e-2) * scale


# -- building ----------------------------------------------------------------------------------------------------------


def test_a_failing_compiler_leaves_nothing(tmp_path, monkeypatch):
    for compiler in ("false", "no-such-compiler-anywhere"):
        monkeypatch.setenv("CC", compiler)
        with pytest.raises(OSError, match=compiler):
            cpu_build.compile_to(tmp_path / cpu_build.NAME)
    assert list(tmp_path.iterdir()) == []


@needs_kernel
def test_a_library_of_another_source_is_not_used(tmp_path, monkeypatch):
    shutil.copy(BUILT.path, tmp_path / "copy.so")
    assert cpu_decode.levels(tmp_path / "copy.so")
    monkeypatch.setattr(cpu_build, "source_hash", lambda: "0" * 64)
    assert not cpu_decode.levels(tmp_path / "copy.so")


def test_the_user_cache_must_be_private(tmp_path, monkeypatch):
    """A library that others may write is not loaded."""
    package = tmp_path / "package"
    package.mkdir()
    shutil.copy(cpu_build.SOURCE, package)
    monkeypatch.setattr(cpu_build, "SOURCE", package / cpu_build.SOURCE.name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cpu_build.find() is None
    cached = cpu_build.user_cache()
    cached.parent.mkdir(mode=0o700, parents=True)
    cached.write_bytes(b"")
    assert cpu_build.find() == cached
    cached.parent.chmod(cached.parent.stat().st_mode | stat.S_IWOTH)
    assert cpu_build.find() is None
    cached.parent.chmod(0o700)
    (package / cpu_build.NAME).write_bytes(b"")
    assert cpu_build.find() == package / cpu_build.NAME
