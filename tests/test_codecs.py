"""How exact are the bits? Bounds follow from the step of each format, not from what was measured."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import round_trip

from hf_kvcache.codecs import ALIASES, CODECS, Float8, Scaled, find_codec

EIGHT = ["int8", "fp8_e4m3", "fp8_e5m2"]
FLOATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
MANTISSA = {"fp8_e4m3": 3, "fp8_e5m2": 2}
TINIEST = {"fp8_e4m3": 2.0**-9, "fp8_e5m2": 2.0**-16}  # the smallest subnormal
eight_bits = pytest.mark.parametrize("name", EIGHT)
shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 9), st.sampled_from([1, 2, 8, 64, 80]))
magnitudes = st.floats(-6, 5).map(lambda exponent: 10.0**exponent)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def numbers(name, codes):
    """What the codes mean, by the cast."""
    return codes.view(FLOATS[name]).float() if name in FLOATS else codes.float()


def half_step(name, codes, scale):
    """Largest rounding error of each value, given what it was rounded to."""
    if name == "int8":
        return 0.5 * scale.expand(codes.shape)
    value = numbers(name, codes).abs()
    exponent = torch.floor(torch.log2(value.clamp_min(TINIEST[name])))
    ulp = torch.exp2(exponent - MANTISSA[name]).clamp_min(TINIEST[name])
    return 0.5 * ulp * scale  # at a power of two the ulp below is smaller, never larger


def check(name, x):
    codec = find_codec(name)
    before = x.clone()
    state = codec.encode(x)
    assert torch.equal(x, before)
    assert state.scale.dtype == torch.float32 and state.scale.shape == (*x.shape[:3], 1)
    assert state.codes.shape == x.shape and state.codes.dtype.itemsize == 1
    assert state.scale.isfinite().all() and (state.scale > 0).all()
    assert numbers(name, state.codes).isfinite().all()
    saved = state.codes.clone(), state.scale.clone()
    back = codec.decode(state, torch.float32)
    assert torch.equal(state.codes.view(torch.uint8), saved[0].view(torch.uint8))
    assert torch.equal(state.scale, saved[1])
    assert back.isfinite().all()
    error, bound = (back - x.float()).abs(), half_step(name, state.codes, state.scale)
    # The quotient x / scale and the product code * scale are rounded to float32 as well.
    assert (error <= bound + 3e-7 * x.float().abs() + 1e-37).all()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = codec.decode(state, dtype)
        assert out.dtype == dtype and out.shape == x.shape
        assert torch.equal(out, back.to(dtype))
    return state, back


@eight_bits
@given(shapes, magnitudes, dtypes, st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_round_trip_is_within_half_a_step(name, shape, magnitude, dtype, seed):
    torch.manual_seed(seed)
    if dtype == torch.float16:
        magnitude = min(magnitude, 1e4)
    check(name, (torch.randn(shape) * magnitude).to(dtype))


@eight_bits
@given(shapes, magnitudes, st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_rows_have_scales_of_their_own(name, shape, magnitude, seed):
    """A token with values of 1e5 beside one with 1e-6 costs the small one nothing."""
    torch.manual_seed(seed)
    x = torch.randn(shape)
    codec = find_codec(name)
    scaled = x.clone()
    scaled[:, :, ::2] *= magnitude
    one, two = codec.encode(x), codec.encode(scaled)
    assert torch.equal(one.codes.view(torch.uint8)[:, :, 1::2], two.codes.view(torch.uint8)[:, :, 1::2])
    assert torch.equal(one.scale[:, :, 1::2], two.scale[:, :, 1::2])


@eight_bits
@pytest.mark.parametrize("value", [1e5, -1e5, 1e-6, -1e-6, 3.0, 65504.0, 1e-30, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_constant_rows(name, value, dtype):
    x = torch.full((1, 2, 3, 64), value, dtype=dtype)
    _, back = check(name, x)
    torch.testing.assert_close(back, x.float(), rtol=1e-6, atol=0)


@eight_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_come_back_as_zeros(name, dtype):
    _, back = check(name, torch.zeros(2, 1, 3, 8, dtype=dtype))
    assert (back == 0).all()


@eight_bits
@pytest.mark.parametrize("tiny", [1e-38, 1e-40, 1e-45, 1e-44])
def test_denormal_rows_stay_finite(name, tiny):
    """A scale below float32's normal range is refused a place: such a row is zero to every purpose."""
    state = find_codec(name).encode(torch.full((1, 1, 2, 8), tiny))
    assert state.scale.isfinite().all() and (state.scale > 0).all()
    assert (find_codec(name).decode(state, torch.float32) - tiny).abs().max() <= tiny


@eight_bits
@given(st.integers(0, 63), magnitudes, st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_a_single_outlier(name, place, size, seed):
    torch.manual_seed(seed)
    x = torch.randn(1, 1, 4, 64) * 0.1
    x[..., place] = size
    _, back = check(name, x)
    top = x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(back.gather(-1, top), x.gather(-1, top), rtol=1e-6, atol=0)


@eight_bits
def test_bfloat16_of_one_hundred_thousand_in_both_signs(name):
    x = torch.randn(2, 2, 50, 64).sign() * 1e5
    check(name, x.bfloat16())
    x[..., ::3] = 1e-6
    check(name, x.bfloat16())


@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_b51_a_constant_channel_in_half_precision(name, dtype):
    x = torch.full((1, 2, 40, 64), 3.0, dtype=dtype)
    x[..., 1:] = torch.randn(1, 2, 40, 63).to(dtype)
    state, back = check(name, x)
    assert ((back[..., 0] - 3).abs() <= 0.03 if name == "int8" else (back[..., 0] - 3).abs() <= 0.4).all()
    _, back = check(name, torch.full((1, 2, 40, 64), 3.0, dtype=dtype))
    assert ((back - 3).abs() <= 0.03).all()


@eight_bits
def test_b53_scales_are_not_frozen_on_the_first_token(name):
    codec = find_codec(name)
    small, large = torch.full((1, 1, 4, 8), 0.01), torch.full((1, 1, 4, 8), 5.0)
    codec.encode(small)
    for run in (large, torch.cat([small, large], 2)):
        back = codec.decode(codec.encode(run), torch.float32)
        assert ((back - run).abs() <= 0.04 * run).all()


@pytest.mark.parametrize("name", FLOATS)
def test_b62_clamped_before_the_cast(name):
    """A cast beyond the maximum saturates, or gives NaN or infinity, by device: no code may come from there."""
    codec = find_codec(name)
    beyond = torch.tensor([1e6, -1e6, codec.limit * 1.01, -codec.limit * 1.5])
    assert numbers(name, codec.to_codes(beyond.clone())).tolist() == [codec.limit, -codec.limit] * 2
    assert numbers(name, codec.to_codes(torch.tensor([float("nan")]))).isnan().all()


@eight_bits
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_input_leaves_a_non_finite_scale(name, value):
    x = torch.randn(1, 1, 3, 8)
    x[0, 0, 1, 5] = value
    assert find_codec(name).encode(x).scale[0, 0, :, 0].isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("name", FLOATS)
def test_bit_move_equals_the_cast_for_all_codes(name):
    """All 256, subnormals, both zeros and the NaNs included."""
    codec, bits = find_codec(name), torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    expected = bits.view(FLOATS[name]).float()
    moved = codec.to_float(bits.view(torch.uint8))
    unit = codec.unit_scale(Scaled(bits.view(torch.uint8), torch.ones(1)))
    assert moved.dtype == torch.float32
    finite = expected.isfinite()
    assert finite.sum() >= 248
    assert torch.equal((moved * unit)[finite].view(torch.int32), expected[finite].view(torch.int32))


@pytest.mark.parametrize("name", FLOATS)
def test_bit_move_leaves_the_codes_alone(name):
    codes = find_codec(name).encode(torch.randn(1, 2, 5, 8)).codes
    before = codes.view(torch.uint8).clone()
    moved = find_codec(name).to_float(codes)
    moved.zero_()
    assert torch.equal(codes.view(torch.uint8), before)


def test_int8_uses_its_range_evenly():
    x = torch.linspace(-1, 1, 2001).view(1, 1, 1, -1)
    codes = find_codec("int8").encode(x).codes
    assert codes.min() == -127 and codes.max() == 127
    assert torch.equal(codes, -codes.flip(-1))


@pytest.mark.parametrize("name", EIGHT)
def test_as_written_a_second_time(name):
    x = torch.randn(2, 3, 50, 64) * torch.logspace(-5, 5, 50)[:, None]
    codec = find_codec(name)
    for dtype in (torch.float32, torch.bfloat16):
        given_x = x.to(dtype)
        assert torch.equal(codec.decode(codec.encode(given_x), dtype), round_trip(given_x, name))


@pytest.mark.parametrize("name", ["full", *EIGHT])
@pytest.mark.parametrize("n, width, rows", [(1, 32, 1), (63, 64, 3), (129, 80, 4), (400, 128, 2)])
def test_scores_and_mix_equal_decode_then_matmul(name, n, width, rows):
    codec = find_codec(name)
    state = codec.encode(torch.randn(2, 3, n, width) * torch.logspace(-2, 2, n)[:, None])
    plain = codec.decode(state, torch.float64)
    query, probs = torch.randn(2, 3, rows, width), torch.rand(2, 3, rows, n)
    saved = query.clone(), probs.clone(), [t.clone() for t in state]
    scores, mixed = codec.scores(query, state), codec.mix(probs, state)
    assert scores.dtype == mixed.dtype == torch.float32
    expected = query.double() @ plain.transpose(-1, -2)
    size = query.double().abs() @ plain.abs().transpose(-1, -2)
    assert ((scores - expected).abs() <= 1e-6 * size).all()
    expected, size = probs.double() @ plain, probs.double() @ plain.abs()
    assert ((mixed - expected).abs() <= 1e-6 * size).all()
    assert torch.equal(query, saved[0]) and torch.equal(probs, saved[1])
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(state, saved[2], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_full_is_the_identity(dtype):
    codec, x = find_codec("full"), torch.randn(1, 2, 5, 8).to(dtype)
    assert codec.lossless and torch.equal(codec.decode(codec.encode(x), dtype), x)


def test_names():
    assert [name for name in CODECS] == [codec.name for codec in CODECS.values()]
    assert find_codec("fp8") is CODECS[ALIASES["fp8"]] and isinstance(find_codec("fp8"), Float8)
    assert [name for name, codec in CODECS.items() if codec.lossless] == ["full"]
    with pytest.raises(ValueError) as caught:
        find_codec("int9")
    for word in ("int9", *CODECS, *ALIASES):
        assert word in str(caught.value)
