"""Finite in, finite out: numbers at the edge of what float16, bfloat16 and float32 hold, by every reader.

Where nothing is beyond what a codec holds (``FARTHEST``), the error is within the step that the state itself names.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import llama_config

from hf_kvcache import KVCache, cpu_decode
from hf_kvcache.attention import attend
from hf_kvcache.codecs import ALWAYS, CODECS, FARTHEST, NEVER, find_codec, rotation
from hf_kvcache.lowbit import GroupedCodec
from hf_kvcache.part import Part
from hf_kvcache.reference import attend_reference, attend_torch

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
GROUP = 8
NAMES = [f"{name}{turned}" for name in ("int8", "fp8_e4m3", "fp8_e5m2", "int4c", "int4t", "int2c", "int2t")
         for turned in ("", "+turned")]  # fmt: skip
every = pytest.mark.parametrize("name", NAMES)


def codec_of(name):
    name, _, turned = name.partition("+")
    rotated = ALWAYS if turned else NEVER
    if name in CODECS:
        return find_codec(name).rotating(rotated)
    return GroupedCodec(int(name[3]), GROUP, "channel" if name[4] == "c" else "token", rotated)


def rows(kind, size, width, dtype, seed):
    """[2, 2, 3 * GROUP, width] of magnitudes up to ``size``, which ``dtype`` holds."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(2, 2, 3 * GROUP, width, generator=g, dtype=torch.float64) * 2 - 1
    if kind == "constant":
        x = torch.ones_like(x)
    elif kind == "signs":
        x = x.sign()
    elif kind == "one":
        x = torch.zeros_like(x).index_fill_(3, torch.tensor([seed % width]), 1.0)
    elif kind == "mixed":  # rows of 1e-6 beside rows at the edge
        x[:, :, ::2] *= 1e-6 / size
    elif kind == "row of the rotation":  # all of a rotated row in one number
        x = rotation(width, "cpu")[:, seed % width].sign().double().expand_as(x)
    return (x * size).to(dtype).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)


def steps(codec, state, like):
    """What one code is from the next, at most, for each number as it was encoded, [B, H, n, D] float64."""
    if isinstance(codec, GroupedCodec):
        b, h, n, d = like.shape
        scale = codec._spread(state.scale.double(), d)
        return scale.expand(b, h, n // codec.group, codec.group, d).reshape(like.shape)
    if codec.name == "int8":
        return state.scale.double().expand(like.shape)
    largest = {"fp8_e4m3": 32, "fp8_e5m2": 8192}[codec.name]  # between the two largest numbers of the format
    return state.scale.double().expand(like.shape) * largest


sizes = {
    HALF: st.sampled_from([65504.0, 65000.0, 62000.0, 55000.0, 1.0, 1e-6, 6e-8]),
    BRAIN: st.sampled_from([3.3895e38, 3e38, 1e35, 1e30, 1e20, 1e5, 1.0, 1e-20, 1e-36, 1e-39]),
    SINGLE: st.sampled_from([3.4028234e38, 3.395e38, 3e38, 1e35, 1e30, 1e20, 1e5, 1.0, 1e-20, 1e-36, 1e-39, 1e-45]),
}
inputs = st.sampled_from([HALF, BRAIN, SINGLE]).flatmap(
    lambda dtype: st.tuples(
        st.sampled_from(["random", "constant", "signs", "one", "mixed", "row of the rotation"]),
        sizes[dtype],
        st.sampled_from([1, 3, 8, 24, 64]),
        st.just(dtype),
        st.integers(0, 99),
    )
)


@every
@given(inputs)
@settings(max_examples=80, deadline=None)
def test_finite_in_finite_out(name, given_rows):
    codec, x = codec_of(name), rows(*given_rows)
    state = codec.encode(x)
    assert x.isfinite().all() and all(t.float().isfinite().all() for t in state)
    back = codec.decode(state, x.dtype)
    assert back.dtype == x.dtype and back.isfinite().all()
    # A mean of the values, and scores of a query so small that the true ones fit: nothing overflows on the way.
    probs = torch.softmax(torch.randn(2, 2, 3, x.shape[2]), -1)
    query = torch.randn(2, 2, 3, x.shape[3]) * 1e-4
    assert codec.mix(probs, state).isfinite().all() and codec.scores(query, state).isfinite().all()


@every
@given(inputs)
@settings(max_examples=80, deadline=None)
def test_the_error_is_within_the_step(name, given_rows):
    codec, x = codec_of(name), rows(*given_rows)
    rotated, width = x.shape[-1] in codec.rotated, x.shape[-1]
    exact = x.double()
    matrix = rotation(width, "cpu").double() if rotated else torch.eye(width, dtype=torch.float64)
    bound = FARTHEST if rotated or isinstance(codec, GroupedCodec) else torch.finfo(BRAIN).max
    inside = (exact @ matrix).abs().amax() <= bound  # otherwise something is clamped
    if not inside:
        return
    state = codec.encode(x)
    got = codec.decode(state, SINGLE).double()
    # Half a step in the space that was encoded; turned back, errors of a row add up by their norm. Beside it the
    # rounding of float32, of float32's smallest numbers, and rows that are stored as zeros for their scale's sake.
    limit = (0.51 * steps(codec, state, x)).norm(dim=-1, keepdim=True) if rotated else 0.51 * steps(codec, state, x)
    peak = exact.abs().amax()
    nothing = getattr(codec, "limit", 40.0) * 1.2e-38 * 2 * (width**0.5 if rotated else 1) + 1e-35 * rotated
    assert ((got - exact).abs() <= limit + 2e-6 * width**0.5 * peak + nothing).all()


@pytest.mark.parametrize("value", [55000.0, 62000.0, 64000.0, 65000.0, 65504.0])
@pytest.mark.parametrize(
    "spec",
    [
        "int8(rotate=on)",
        "fp8(rotate=on)",
        "fp8_e5m2(rotate=on)",
        "int4(residual=0,sinks=0)",
        "int2(residual=0,sinks=0,rotate=on)",
        "k8v2(group=4,residual=0,sinks=0)",
    ],
)
def test_u8_float16_keys_near_its_largest(spec, value):
    """Through a layer: a chunk, then tokens one by one."""
    layer = KVCache.from_spec(llama_config(1), spec).layers[0]
    x = (torch.randn(1, 2, 96, 16).clamp(-1, 1) * value).to(HALF)
    for piece in (x[:, :, :64], *x[:, :, 64:].split(1, 2)):
        keys, values = layer.update(piece, piece)
        assert keys.isfinite().all() and values.isfinite().all()
    assert keys.dtype == HALF and (keys.float() - x.float()).abs().max() < value


@pytest.mark.parametrize("dtype, value", [(HALF, 65504.0), (BRAIN, 3e36), (SINGLE, 3e36)])  # more, and SDPA overflows
@every
def test_a_mean_of_values_is_finite_by_every_backend(name, dtype, value):
    """Keys are plain: what is asked is the mean of values that round beyond the dtype."""
    codec = codec_of(name)
    values = rows("signs", value, 64, dtype, 3)
    values[:, :, :, 5] = value  # a mean at the very edge
    full = find_codec("full")
    keys = torch.randn(2, 2, values.shape[2], 64).to(dtype)
    parts = [Part(full, full.encode(keys), codec, codec.encode(values))]
    query = torch.randn(2, 4, 1, 64).to(dtype)
    for backend in (attend_reference, attend_torch, attend):
        out = backend(query, parts, 0.1)
        assert out.dtype == dtype and out.isfinite().all(), backend.__name__
    if cpu_decode.load() is not None:
        assert cpu_decode.supports(query, parts)
        assert cpu_decode.attend_compiled(query, parts, 0.1).isfinite().all()


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("turned", [False, True])
@given(inputs)
@settings(max_examples=40, deadline=None)
def test_one_token_in_c_is_the_bits_of_encode(name, turned, given_rows):
    if cpu_decode.load() is None:
        pytest.skip("the kernel is not built")
    codec, x = find_codec(name).rotating(ALWAYS if turned else NEVER), rows(*given_rows)[:, :, :1]
    expected = codec.encode(x)
    state = type(expected)(*(torch.zeros_like(t) for t in expected))
    assert cpu_decode.append(x, x, (codec, codec), (state, state), (0, 0)) is None
    assert torch.equal(state.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(state.scale, expected.scale)


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_still_seen(name, turned, value):
    """Clamping must not hide it: in C it is refused, in ``encode`` the scale shows it."""
    codec = find_codec(name).rotating(ALWAYS if turned else NEVER)
    x = torch.randn(1, 1, 1, 8)
    x[..., 3] = value
    state = codec.encode(x)
    assert not state.scale.isfinite().any()
    if cpu_decode.load() is not None:
        assert cpu_decode.append(torch.ones_like(x), x, (codec, codec), (state, state), (0, 0)) == "values"


@pytest.mark.parametrize("name", ["int4c", "int4t+turned", "int2c+turned", "int2t"])
def test_groups_do_not_hide_infinity(name):
    codec, x = codec_of(name), torch.randn(1, 1, GROUP, 8)
    x[0, 0, 2, 3] = float("inf")
    assert not codec.decode(codec.encode(x), SINGLE).isfinite().all()


@pytest.mark.parametrize("name", ["int8", "int8+turned", "fp8_e5m2+turned", "int4t+turned", "int2t"])
def test_the_mean_by_triton(name):
    pytest.importorskip("triton")
    from hf_kvcache.triton_decode import attend_triton

    codec, full = codec_of(name), find_codec("full")
    values = rows("signs", 65504.0, 64, HALF, 3)
    values[:, :, :, 5] = 65504.0
    keys = full.encode(torch.randn(2, 2, values.shape[2], 64).to(HALF))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    part = Part(full, type(keys)(keys.values.to(device)), codec, codec.encode(values.to(device)))
    query = torch.randn(2, 4, 1, 64, device=device).to(HALF)
    out = attend_triton(query, [part], 0.1)
    assert out.isfinite().all() and (out[..., 5] > 30000).all()


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("value", [3.4028234e38, 1e36, 1e30, 1.0, 1e-35, 1e-37, 0.0, float("inf")])
def test_one_token_in_triton_is_the_bits_of_encode(name, turned, value):
    pytest.importorskip("triton")
    from hf_kvcache.triton_decode import append_quantized

    device = "cuda" if torch.cuda.is_available() else "cpu"
    codec = find_codec(name).rotating(ALWAYS if turned else NEVER)
    x = (torch.rand(1, 2, 2, 64) * 2 - 1).to(device) * value
    if value == float("inf"):  # stays to be seen; NaN is the layer's to find
        x = torch.randn(1, 2, 2, 64, device=device).index_fill_(3, torch.tensor([1], device=device), value)
    expected = codec.encode(x)
    state = type(expected)(*(torch.zeros_like(t) for t in expected))
    append_quantized(x, state, 0, codec)
    torch.testing.assert_close(state.scale, expected.scale, rtol=0, atol=0)
    if x.isfinite().all():
        assert torch.equal(state.codes.view(torch.uint8), expected.codes.view(torch.uint8))
