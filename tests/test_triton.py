"""The Triton kernels against the reference, on the CPU under Triton's interpreter; on a GPU where there is one.

What the interpreter cannot show, that the compiler takes the kernels at all, is checked by compiling for GPUs that
need not be there.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models import llama_config, ragged, states

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton = pytest.importorskip("triton")
if DEVICE == "cpu" and isinstance(triton.language.sum, triton.JITFunction):
    pytest.skip("triton was imported before TRITON_INTERPRET=1 was set", allow_module_level=True)

from hf_kvcache import KVCache, triton_decode  # noqa: E402
from hf_kvcache.codecs import ALWAYS, CODECS, Codec, PerToken, Plain, Scaled, find_codec  # noqa: E402
from hf_kvcache.layers import Run  # noqa: E402
from hf_kvcache.lowbit import GroupedCodec  # noqa: E402
from hf_kvcache.part import (  # noqa: E402
    Part,  # noqa: E402
    map_state,
    narrow,
)
from hf_kvcache.reference import attend_reference, attend_torch  # noqa: E402
from hf_kvcache.spec import storage  # noqa: E402

SPARE = 37  # rows of a slab that hold garbage


class Case(NamedTuple):
    """Parts are (key codec, value codec, tokens)."""

    parts: list[tuple[str, str, int]]
    widths: tuple[int, int] = (64, 64)
    groups: int = 1
    batch: int = 1
    queries: int = 1
    dtype: torch.dtype = torch.float32
    mask: str = "none"
    softcap: float | None = None
    s_aux: bool = False
    heads: int = 1


def only(codec: str, tokens: int, values: str | None = None) -> list[tuple[str, str, int]]:
    return [(codec, values or codec, tokens)]


SINKS_AND_SEALED = [("full", "full", 4), ("int8", "int8", 129)]
CASES = {
    "one token": Case(only("full", 1), heads=2),
    "full bfloat16, hidden rows": Case(only("full", 63), (96, 96), 3, 3, 4, torch.bfloat16, "rows"),
    "full, long": Case(only("full", 1000), (128, 128), 4),
    "int8, one token": Case(only("int8", 1), (128, 128), 8, 3),
    "int8 bfloat16, long, padded": Case(only("int8", 1000), (64, 64), 3, 1, 1, torch.bfloat16, "keys"),
    "int8, wide": Case(only("int8", 129), (256, 256), 8, queries=4, softcap=20.0),
    "int8, odd widths": Case(only("int8", 63), (36, 20), 1, 3, heads=2),
    "int8, narrow values": Case(only("int8", 129), (96, 64), 4, 1, 4, torch.float16, s_aux=True),
    "e4m3 bfloat16": Case(only("fp8_e4m3", 129), (128, 128), 4, 3, 1, torch.bfloat16, "keys", s_aux=True),
    "e5m2": Case(only("fp8_e5m2", 63), (80, 80), 3, queries=4, mask="heads"),
    "mixed codecs": Case(only("fp8_e4m3", 129, "int8"), (64, 96), 4, heads=2),
    "full keys": Case(only("full", 63, "fp8_e5m2"), (64, 64), 3, dtype=torch.bfloat16),
    "two parts": Case(SINKS_AND_SEALED, (128, 64), 4, 1, 4, mask="rows", softcap=30.0, s_aux=True),
    "two parts, bfloat16": Case(SINKS_AND_SEALED, (64, 64), 3, 3, 1, torch.bfloat16, "keys"),
}


def poisoned(state: Any) -> Any:
    """The state as views of larger slabs: NaN, and the largest code where a format has none, in the spare rows."""

    def grow(t: torch.Tensor) -> torch.Tensor:
        garbage = float("nan") if t.is_floating_point() else 127  # 0x7F is NaN in both 8-bit floats
        slab = torch.full((*t.shape[:2], t.shape[2] + SPARE, *t.shape[3:]), garbage, dtype=t.dtype, device=t.device)
        slab[:, :, : t.shape[2]] = t
        return slab

    return narrow(map_state(state, grow), 0, state[0].shape[2])


def make_part(case: Case, keys: str | Codec, values: str | Codec, tokens: int) -> Part:
    def states(width: int) -> torch.Tensor:
        sizes = (torch.rand(tokens, 1) * 3 + 0.1) * (torch.rand(width) + 0.1)  # scales differ by token and channel
        return ((torch.randn(case.batch, case.heads, tokens, width) + 0.5) * sizes).to(DEVICE, case.dtype)

    key_codec, value_codec = (CODECS[c] if isinstance(c, str) else c for c in (keys, values))
    key_state, value_state = key_codec.encode(states(case.widths[0])), value_codec.encode(states(case.widths[1]))
    return Part(key_codec, poisoned(key_state), value_codec, poisoned(value_state))


def make_mask(case: Case, tokens: int) -> torch.Tensor | None:
    """``keys``: left padding, the last row of a batch all pads; ``rows``: causal too; ``heads``: one per head."""
    if case.mask == "none":
        return None
    if case.mask == "heads":
        return torch.rand(1, case.heads * case.groups, case.queries, tokens, device=DEVICE) > 0.5
    pads = torch.arange(case.batch) * tokens // max(case.batch - 1, 2)
    pads[-1] = tokens if case.batch > 1 else tokens // 2
    mask = (torch.arange(tokens) >= pads[:, None])[:, None, None, :]
    if case.mask == "rows":
        mask = mask & torch.ones(case.queries, tokens, dtype=torch.bool).tril(tokens - case.queries)
        mask[0, :, 0] = False
    return mask.to(DEVICE)


def plain(query: torch.Tensor, parts: list[Part], scaling: float, mask: Any, softcap: Any, s_aux: Any) -> torch.Tensor:
    """The same in the query's own dtype throughout: how far off torch itself is."""
    groups = query.shape[1] // parts[0].keys[0].shape[1]
    keys = torch.cat([p.key_codec.decode(p.keys, query.dtype) for p in parts], 2).repeat_interleave(groups, 1)
    values = torch.cat([p.value_codec.decode(p.values, query.dtype) for p in parts], 2).repeat_interleave(groups, 1)
    scores = query @ keys.transpose(-1, -2) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    aux = torch.full_like(scores[..., :1], float("-inf"))
    aux = aux if s_aux is None else s_aux.to(aux.dtype)[None, :, None, None].expand_as(aux)
    probs = torch.softmax(torch.cat([scores, aux], -1), -1).nan_to_num(0.0)
    return probs[..., :-1] @ values


def check(case: Case, parts: list[Part]) -> None:
    query_heads = case.heads * case.groups
    query = torch.randn(case.batch, case.queries, query_heads, case.widths[0]).to(DEVICE, case.dtype).transpose(1, 2)
    mask = make_mask(case, sum(part.tokens for part in parts))
    s_aux = torch.randn(query_heads, device=DEVICE) * 2 if case.s_aux else None
    arguments = (parts, case.widths[0] ** -0.5, mask, case.softcap, s_aux)
    assert triton_decode.supports(query, parts, mask, case.softcap, s_aux)
    got = triton_decode.attend_triton(query, *arguments)
    want = attend_reference(query.float(), *arguments)
    assert got.dtype == query.dtype and got.shape == want.shape
    if case.dtype == torch.float32:
        tolerance = 1e-5 * want.abs().max()
    else:
        tolerance = 2 * (plain(query, *arguments).float() - want).abs().max()
    assert (got.float() - want).abs().max() <= tolerance
    before = torch.rand(case.batch, case.heads, sum(part.tokens for part in parts), device=DEVICE)
    mass, share = before.clone(), torch.zeros_like(before)
    again = triton_decode.attend_triton(query, *arguments, mass)
    attend_torch(query.float(), *arguments, share)
    assert torch.equal(again, got)
    loose = 1e-5 if case.dtype == torch.float32 or DEVICE == "cpu" else 1e-2
    torch.testing.assert_close(mass - before, share, atol=loose * case.queries, rtol=10 * loose)
    if case.mask == "rows":
        assert not got[0, :, 0].any()  # hidden: zeros, neither NaN nor a mean of the values
    if case.mask in ("rows", "keys") and case.batch > 1:
        assert not got[-1].any()


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_reference(name):
    case = CASES[name]
    check(case, [make_part(case, *part) for part in case.parts])


# name: storage, tokens that are sealed, plain ones before and after, and the rest.
LOW = {
    "int4": ("int4", 64, 4, 31, Case([], (64, 64), 3)),
    "int4, long, groups of 200": ("int4(group=200)", 1000, 0, 1, Case([], (32, 64), 4, queries=2)),
    "int4, groups of 24, mask by head": ("int4(group=24)", 48, 0, 0, Case([], (64, 32), 3, queries=2, mask="heads")),
    "int4, nothing sealed": ("int4", 0, 1, 0, Case([], heads=2)),
    "int2 bfloat16, padded": ("int2", 64, 0, 33, Case([], (64, 64), 3, 3, 1, torch.bfloat16, "keys")),
    "int2, wide": ("int2(group=64)", 64, 4, 0, Case([], (256, 256), 8, softcap=20.0)),
    "int2, groups of 16, plain values": ("int2(group=16,rotate=off)", 64, 1, 63, Case([], (32, 96), 1, s_aux=True)),
    "k4v2, hidden rows": ("k4v2", 64, 4, 61, Case([], (96, 128), 4, 1, 4, torch.bfloat16, "rows")),
    "k2v4 float16": ("k2v4", 32, 0, 97, Case([], (128, 128), 8, 1, 1, torch.float16, softcap=30.0, s_aux=True)),
    "k8v4, odd widths": ("k8v4", 32, 0, 0, Case([], (64, 36), 3, 3, mask="keys")),
    "k4v8": ("k4v8", 32, 4, 27, Case([], (36, 64), 4, s_aux=True)),
    "keys by token": ("int4(key_axis=token)", 64, 1, 0, Case([], (80, 64), 3)),
    "rotated values in 8 bits": ("int8", 31, 4, 5, Case([], (64, 64), 2)),
}


def low_parts(name: str) -> tuple[Case, list[Part]]:
    spec, sealed, before, after, case = LOW[name]
    codecs = list(storage(spec)[1:3])
    if spec == "int8":
        codecs[1] = codecs[0]
    plain = ("full", "full")
    runs = [(*plain, before), (*codecs, sealed), (*plain, after)]
    return case, [make_part(case, *run) for run in runs if run[2] or run[0] != "full"]


@pytest.mark.parametrize("name", LOW)
def test_low_bits_equal_the_reference(name, monkeypatch):
    if "long" in name:  # fewer, larger blocks: the interpreter's time goes by blocks
        monkeypatch.setattr(triton_decode, "BLOCK_BYTES", 1 << 16)
        triton_decode.tile_sizes.cache_clear()
    check(*low_parts(name))
    triton_decode.tile_sizes.cache_clear()


@pytest.mark.parametrize("name", ["int4(rotate=off)", "k4v2(rotate=off)", "k8v4(rotate=off)", "k4v8(rotate=off)"])
def test_products_in_float16_keep_channels_far_from_zero(name, monkeypatch):
    """On a GPU codes are multiplied in float16, also where some channels are large and some far from zero."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_decode, "_dot_dtype", lambda query, state: triton.language.float16)
    codecs, sizes, offset = storage(name)[1:3], torch.ones(64), torch.zeros(64)
    sizes[:3] = torch.tensor([1e4, 1e-4, 1e-8])
    offset[[5, 15]] = 200.0
    encoded = [codec.encode((torch.randn(1, 1, 64, 64) * sizes + offset).to(DEVICE)) for codec in codecs]
    part = Part(codecs[0], encoded[0], codecs[1], encoded[1])
    query = torch.randn(1, 4, 1, 64)
    query[..., 0] *= 1e-4  # a trained model's query is small where its keys are large
    query = query.to(DEVICE, torch.float16)
    want = attend_reference(query.float(), [part], 0.125)
    got = triton_decode.attend_triton(query, [part], 0.125).float()
    off = (plain(query, [part], 0.125, None, None, None).float() - want).abs()
    for channels in (slice(0, 1), slice(3, None)):
        assert (got - want)[..., channels].abs().max() <= 2 * off[..., channels].max()


@pytest.mark.parametrize("name", ["full", "int8", "fp8_e4m3"])
def test_heads_of_different_lengths(name):
    """One of them empty; nothing of the neighbours is read, and a mask goes by slots."""
    case = Case([], (64, 36), 3, 2, 2, heads=2)
    part, tail = make_part(case, name, name, 150), make_part(case, "full", "full", 5)
    heads = part.keys[0].shape[1]
    chosen = torch.rand(2, heads, 150, device=DEVICE) < torch.rand(2, heads, 1, device=DEVICE)
    chosen[0, -1] = False
    run, query = ragged(part, chosen), torch.randn(2, 3 * heads, 2, 64, device=DEVICE)
    for tokens, visible in ((None, chosen), (3, chosen & (chosen.cumsum(-1) <= 3))):
        mask = None
        if tokens:
            mask = torch.arange(run.tokens + 5, device=DEVICE)
            mask = ((mask < tokens) | (mask >= run.tokens)).expand(2, 3 * heads, 1, -1)
        shown = torch.nn.functional.pad(visible.repeat_interleave(3, 1), (0, 5), value=True)[:, :, None]
        want = attend_reference(query, [part, tail], 0.125, shown)
        assert triton_decode.supports(query, [run, tail], mask)
        mass = torch.zeros(2, heads, run.tokens + 5, device=DEVICE)
        got = triton_decode.attend_triton(query, [run, tail], 0.125, mask, mass=mass)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        inside = torch.arange(run.tokens, device=DEVICE) < run.sizes[..., None]
        seen = inside if mask is None else inside & mask[:, ::3, 0, : run.tokens]
        seen = torch.nn.functional.pad(seen, (0, 5), value=True)[:, :, None]  # by KV head
        share = torch.zeros_like(mass)
        attend_torch(query, [run, tail], 0.125, seen, mass=share)
        torch.testing.assert_close(mass, share, atol=1e-5, rtol=1e-4)
        assert not mass[..., : run.tokens][~inside].any()
        by_head = triton_decode.attend_triton(query, [run, tail], 0.125, seen)  # in smaller blocks
        torch.testing.assert_close(by_head, got, atol=1e-6, rtol=1e-6)


def test_rotated_keys():
    case = Case(only("int8", 63), (64, 64), 4)
    codec = find_codec("int8").rotating(ALWAYS)
    part = make_part(case, *case.parts[0])
    states = torch.randn(1, 1, 63, 64, device=DEVICE)
    check(case, [part._replace(key_codec=codec, keys=codec.encode(states))])


def test_empty_parts_leave_zeros():
    case = Case(only("int8", 5))
    part = make_part(case, "int8", "int8", 5).block(0, 0)
    out = triton_decode.attend_triton(torch.randn(1, 2, 1, 64, device=DEVICE), [part], 1.0)
    assert out.shape == (1, 2, 1, 64) and not out.any()


def test_large_and_tiny_numbers_stay_finite():
    keys, values = torch.randn(1, 1, 70, 64), torch.randn(1, 1, 70, 64)
    keys[:, :, ::2] *= 1e5
    values[:, :, 1::2] *= 1e-6
    values[:, :, 3] = 0
    codec = find_codec("int8")
    part = Part(codec, *(codec.encode(keys.to(DEVICE)), codec), codec.encode(values.to(DEVICE)))
    query = (torch.randn(1, 4, 1, 64) * 1e5).to(DEVICE, torch.bfloat16)
    out = triton_decode.attend_triton(query, [part], 0.125)
    want = attend_reference(query, [part], 0.125)
    torch.testing.assert_close(out, want, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("name", ["int4", "k4v2(group=24)", "int4(group=200)", "k8v4(group=4)"])
def test_splits_are_whole_groups(name):
    codecs = storage(name)[1:3]
    forms = [triton_decode.form_of(codec, 128) for codec in codecs]
    tiles = triton_decode.tile_sizes(*forms, 1, 4, max(codec.group for codec in codecs))
    for groups in (1, 3, 40, 1001):
        lines = groups * tiles.lines
        for pairs in (1, 64):
            count, size = triton_decode.split_sizes(lines, tiles, pairs, 132)
            assert size % tiles.lines == 0 and size % tiles.block_n == 0
            assert (count - 1) * size < lines <= count * size
    if tiles.near:  # no block touches more groups than the kernel looks at
        starts = range(0, tiles.block_n * tiles.lines, tiles.block_n)
        assert all((at + tiles.block_n - 1) // tiles.lines - at // tiles.lines < tiles.near for at in starts)


@pytest.mark.parametrize("tokens", [1, 127, 1000, 8192, 100_000])
@pytest.mark.parametrize("pairs", [1, 8, 64, 5000])
def test_splits_cover_every_token_once(tokens, pairs):
    tiles = triton_decode.tile_sizes(*[triton_decode.form_of(CODECS["int8"], 128)] * 2, 1, 16)
    count, size = triton_decode.split_sizes(tokens, tiles, pairs, 132)
    assert size % tiles.block_n == 0
    assert (count - 1) * size < tokens <= count * size
    assert count == 1 or count * pairs <= 12 // tiles.warps * 132 or pairs > 12 // tiles.warps * 132


def test_what_is_not_supported():
    part = make_part(Case([]), "int8", "int8", 9)
    query = torch.randn(1, 2, 1, 64, device=DEVICE)
    supports = triton_decode.supports
    assert supports(query, [part])
    assert not supports(query.expand(1, 2, 17, 64), [part])
    assert not supports(query, [part], torch.zeros(1, 1, 1, 9, device=DEVICE))  # additive
    assert not supports(query.double(), [part])
    odd = Case([], (66, 66))
    assert not supports(torch.randn(1, 2, 1, 66, device=DEVICE), [make_part(odd, "int8", "int8", 9)])
    low = make_part(Case([]), GroupedCodec(4, 32), GroupedCodec(4, 32, "token"), 64)
    assert supports(query, [low])
    assert not supports(query, [low._replace(value_codec=low.key_codec, values=low.keys)])  # values by channel
    assert not supports(query, [low._replace(value_codec=GroupedCodec(4, 64, "token"))])  # two sizes of groups
    many = Case([], (64, 128))
    narrow_groups = GroupedCodec(4, 4, "token")
    assert not supports(query, [make_part(many, narrow_groups, narrow_groups, 8)])  # 32 channel groups
    assert not supports(query, [make_part(Case([]), "int8", GroupedCodec(4, 6, "token"), 12)])  # not whole words


def hard_rows(dtype: torch.dtype) -> torch.Tensor:
    """[2, 3, 50, 36]: sizes over many orders, a row of zeros, rows whose scale underflows, ties between codes."""
    x = torch.randn(2, 3, 50, 36) * torch.logspace(-3, 2, 50)[:, None]
    x[0, 0, 0] = 0
    x[0, 1] *= 1e-6
    x[0, 2, :3] *= 1e-42
    x[1, 0] *= torch.rand(50, 36) ** 20
    x[1, 1, :, 0] = 127
    x[1, 1, :, 1:] = torch.randint(-120, 120, (50, 35)) + 0.5
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_append_writes_the_bits_of_encode(name, dtype):
    codec, x = find_codec(name), hard_rows(dtype)
    want = codec.encode(x)
    slab = Scaled(*(torch.full((2, 3, 60, t.shape[3]), 77, dtype=t.dtype, device=DEVICE) for t in want))
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)  # as projections come: [B, n, H, D] in memory
    triton_decode.append_quantized(strided, slab, 7, codec)
    assert torch.equal(slab.scale[:, :, 7:57], want.scale)
    assert torch.equal(slab.codes[:, :, 7:57], want.codes)
    for t in slab:
        assert (t[:, :, :7] == 77).all() and (t[:, :, 57:] == 77).all()


def test_append_rotates():
    codec = find_codec("int8").rotating(ALWAYS)
    x = hard_rows(torch.float32)
    want = codec.encode(x)
    slab = Scaled(torch.empty_like(want.codes), torch.empty_like(want.scale))
    triton_decode.append_quantized(x, slab, 0, codec)
    assert torch.equal(slab.codes, want.codes) and torch.equal(slab.scale, want.scale)


def test_append_one_token_then_attend():
    """A slab that grew by single appends reads like one that was encoded at once."""
    codec, x = find_codec("fp8_e4m3"), torch.randn(1, 2, 5, 64, device=DEVICE)
    whole = codec.encode(x)
    slab = Scaled(torch.zeros_like(whole.codes), torch.zeros_like(whole.scale))
    for slot in range(5):
        triton_decode.append_quantized(x[:, :, slot : slot + 1], slab, slot, codec)
    query = torch.randn(1, 4, 1, 64, device=DEVICE)
    parts = [[Part(codec, state, codec, state)] for state in (slab, whole)]
    got, want = (triton_decode.attend_triton(query, part, 0.125) for part in parts)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "spec, width",
    [
        ("int8", 64),  # rotated keys, plain values
        ("fp8_e5m2", 32),
        ("int8+sink(2,9)", 32),  # a ring that wraps
        ("fp8+sink(0,7)", 64),
        ("int8(residual=3,sinks=2)", 32),  # sealed out of the tail
        ("int8(quantize_after=5)", 32),
    ],
)
def test_a_layer_that_appends_by_kernel_stores_the_same_bytes(spec, width, monkeypatch):
    """``Run.append_one``, which only CUDA takes by itself, against encode and append."""
    calls = []

    def fuses(run: Run, plain: Part) -> bool:
        codecs = isinstance(run.key_codec, PerToken) and isinstance(run.value_codec, PerToken)
        return fused and codecs and run.keys.state is not None

    def append_one(run: Run, plain: Part) -> None:
        calls.append(len(run))
        normal(run, plain)

    normal = Run.append_one
    monkeypatch.setattr(Run, "fuses", fuses)
    monkeypatch.setattr("hf_kvcache.cpu_decode.appends", lambda *states: False)  # it would come first
    monkeypatch.setattr(Run, "append_one", append_one)
    layers = [KVCache.from_spec(llama_config(1), spec).layers[0] for _ in range(2)]
    new = [x.to(DEVICE).transpose(1, 2).contiguous().transpose(1, 2) for x in states(24, 2, 3, width)]
    at = 0
    for count in (4, *[1] * 12, 3, *[1] * 5):
        chunk = [x[:, :, at : at + count] for x in new]
        fused = False
        want = layers[0].update(*chunk)
        fused = True
        got = layers[1].update(*chunk)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        at += count
    assert len(calls) >= 12 and at == 24
    for run, other in zip(layers[0].runs, layers[1].runs, strict=True):
        assert len(run) == len(other)
        for slab, same in zip(run.slabs, other.slabs, strict=True):
            assert slab.appended == same.appended
            if slab.state is not None:
                assert all(torch.equal(a, b) for a, b in zip(slab.view(), same.view(), strict=True))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="triton compiles on Linux only")
def test_kernels_compile_for_real_gpus():
    """The interpreter takes Python that the compiler refuses; compiling needs no GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("compile_triton.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_plain_values_of_another_dtype():
    """float32 states beside a bfloat16 query, as a mixed-precision model may leave them."""
    case = Case(only("full", 40), (64, 64), 2, dtype=torch.bfloat16)
    codec, states = CODECS["full"], torch.randn(1, 1, 40, 64, device=DEVICE)
    check(case, [Part(codec, Plain(states), codec, Plain(states))])
